"""Copies inside a GPU that leave the links their speed: for what stays on a rank while other bytes cross links.

A plain copy of a gigabyte inside a GPU takes memory bandwidth in a burst, and what crosses links meanwhile waits for
memory: on two H100s, 512 MiB from rank to rank take 1,378 us, 1,479 with such a copy beside them, and 1,649 instead of
1,438 where they are read. Two pitched copies of half the rows each take the GPU 1.8 times as long and the links
nothing: 1,380 and 1,448 us (results/h100x2/probes.txt). Next to a GEMM it is the other way round: there a copy inside
the GPU and the GEMM take turns, and the fastest copy is the best one.
"""

from __future__ import annotations

import dataclasses

from sidelane.execute.cuda.calls import Memcpy, MemcpyEveryOther, Operand

LEAST_BYTES = 16 << 20
"""Of a copy that is worth two calls more: they cost 3 us at 8 MiB, and save 1 at 16 (in graphs; probes.txt)."""

ROW_BYTES, MOST_ROWS = 64 << 10, 1 << 15
"""Copies of 65,536 rows and more slowed reads, too; those of 32,768 and fewer did not (probes.txt: 512 and 256 MiB)."""


def split_in_rows(copy: Memcpy) -> tuple[Memcpy | MemcpyEveryOther, ...]:
    """A copy within a rank as two of every other row each, and one of what is left behind the last row."""
    assert isinstance(copy.dst, Operand)
    assert isinstance(copy.src, Operand)
    row = ROW_BYTES
    while copy.nbytes // (2 * row) > MOST_ROWS:
        row *= 2
    rows = copy.nbytes // (2 * row)
    rest = copy.nbytes - 2 * row * rows
    calls: list[Memcpy | MemcpyEveryOther] = [
        MemcpyEveryOther(_behind(copy.dst, start), _behind(copy.src, start), row, rows) for start in (0, row)
    ]
    if rest:
        ends = _behind(copy.dst, copy.nbytes - rest), _behind(copy.src, copy.nbytes - rest)
        calls.append(Memcpy(*ends, rest, within_rank=True))
    return tuple(calls)


def _behind(operand: Operand, nbytes: int) -> Operand:
    return dataclasses.replace(operand, offset=operand.offset + nbytes)

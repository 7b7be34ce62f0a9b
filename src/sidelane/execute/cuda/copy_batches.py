"""Optimization of a stream's copies: several in one call, and copies within the GPU in rows.

A batch holds copies to or from peers; graphs cannot hold batches. A copy within the GPU is split into every other row,
which does not slow down copies over links.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from sidelane.execute.cuda.calls import Call, Memcpy, MemcpyBatch, MemcpyEveryOther, Operand, StreamCall

LEAST_SPLIT_BYTES = 16 << 20
"""Fewest bytes of a copy that is split in rows: the two further calls cost 3 us at 8 MiB, and save 1 at 16 (in graphs;
probes.txt)."""

HALF_ROW_BYTES, MOST_ROWS = 64 << 10, 1 << 15
"""Smallest row in bytes, and largest number of rows: copies of 65,536 rows and more slowed down reads, those of 32,768
and fewer did not (probes.txt: 512 and 256 MiB)."""


def split_in_rows(copy: Memcpy) -> tuple[Memcpy | MemcpyEveryOther, ...]:
    """Split a copy within a rank into two copies of every other row each, and one of the rest after the last row."""
    assert isinstance(copy.dst, Operand)
    assert isinstance(copy.src, Operand)
    row = HALF_ROW_BYTES
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


class CopyFootprint:
    """The bytes of buffers that copies read and write; adding and testing a copy take logarithmic time."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], Ranges] = {}
        self._written: dict[tuple[int, str], Ranges] = {}

    def add(self, copy: Memcpy) -> None:
        """Add the bytes that a copy reads and writes."""
        for side, found in ((copy.src, self._read), (copy.dst, self._written)):
            if isinstance(side, Operand):
                found.setdefault((side.rank, side.buffer), Ranges()).add(side.offset, side.offset + copy.nbytes)

    def is_apart(self, copy: Memcpy) -> bool:
        """Return True if ``copy`` writes no bytes that added copies use, and reads none that they write."""
        return not (
            _meet(self._written, copy.dst, copy.nbytes)
            or _meet(self._read, copy.dst, copy.nbytes)
            or _meet(self._written, copy.src, copy.nbytes)
        )


class Ranges:
    """A union of byte ranges.

    >>> ranges = Ranges()
    >>> ranges.add(8, 12); ranges.add(0, 4); ranges.add(4, 6)
    >>> ranges.meet(6, 8), ranges.meet(5, 6)
    (False, True)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add ``[start, end)``."""
        first, behind = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < behind:
            start, end = min(start, self._starts[first]), max(end, self._ends[behind - 1])
        self._starts[first:behind], self._ends[first:behind] = [start], [end]

    def meet(self, start: int, end: int) -> bool:
        """Return True if any byte of ``[start, end)`` is in the union."""
        index = bisect_left(self._starts, end) - 1
        return index >= 0 and self._ends[index] > start


def _meet(touched: dict[tuple[int, str], Ranges], place: object, nbytes: int) -> bool:
    if not isinstance(place, Operand) or (place.rank, place.buffer) not in touched:
        return False
    return touched[place.rank, place.buffer].meet(place.offset, place.offset + nbytes)


def batch_copies(steps: Sequence[StreamCall]) -> tuple[StreamCall, ...]:
    """Join neighbours on one stream: copies to or from peers that do not depend on each other."""
    joined: list[StreamCall] = []
    touched = CopyFootprint()  # of the last joined call
    for step in steps:
        last = joined[-1] if joined else None
        if last is not None and last.stream == step.stream and isinstance(step.call, Memcpy):
            before = _batch_copies_of(last.call)
            if before and _crosses(step.call) and touched.is_apart(step.call):
                joined[-1] = StreamCall(step.stream, MemcpyBatch((*before, step.call)))
                touched.add(step.call)
                continue
        joined.append(step)
        touched = CopyFootprint()
        if isinstance(step.call, Memcpy):
            touched.add(step.call)
    return tuple(joined)


def _batch_copies_of(call: Call) -> tuple[Memcpy, ...]:
    if isinstance(call, MemcpyBatch):
        return call.copies
    return (call,) if isinstance(call, Memcpy) and _crosses(call) else ()


def _crosses(copy: Memcpy) -> bool:
    # A copy within the GPU slows down the others in a batch (64 MiB: 183 us instead of 169 with its own stream).
    return not copy.within_rank and isinstance(copy.dst, Operand)

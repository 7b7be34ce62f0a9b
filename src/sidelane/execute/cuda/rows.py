"""Small copies out of the memory of rank after rank, as one call: for graphs, which hold no batches of copies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from sidelane.execute.cuda.calls import Call, Memcpy, MemcpyRows, Operand, StreamCall
from sidelane.program.builders import ROW_BYTES

MOST_PITCH = (1 << 31) - 1
"""Distance of rows that the driver takes."""


def join_rows(steps: Sequence[StreamCall]) -> tuple[StreamCall, ...]:
    """Join neighbours on one stream that copy equal parts from rank after rank to one buffer, part after part."""
    joined: list[StreamCall] = []
    for step in steps:
        last = joined[-1] if joined else None
        if last is not None and last.stream == step.stream and isinstance(step.call, Memcpy):
            before = _copies_of(last.call)
            if before and _continues(before[-1], step.call):
                joined[-1] = StreamCall(step.stream, MemcpyRows((*before, step.call)))
                continue
        joined.append(step)
    return tuple(joined)


def pitch(addresses: Sequence[int], nbytes: int) -> int | None:
    """Distance of rows of ``nbytes`` at these addresses; None if they are not rows of anything.

    >>> pitch([100, 150, 200], 50), pitch([100, 150, 210], 50), pitch([100, 150], 60), pitch([200, 100], 50)
    (50, None, None, None)
    """
    distances = {after - before for before, after in itertools.pairwise(addresses)}
    if len(distances) != 1 or not nbytes <= (distance := distances.pop()) <= MOST_PITCH:
        return None
    return distance


def _copies_of(call: Call) -> tuple[Memcpy, ...]:
    if isinstance(call, MemcpyRows):
        return call.copies
    return (call,) if isinstance(call, Memcpy) else ()


def _continues(last: Memcpy, copy: Memcpy) -> bool:
    if not last.nbytes == copy.nbytes <= ROW_BYTES:
        return False
    match last.dst, last.src, copy.dst, copy.src:
        case Operand() as last_dst, Operand() as last_src, Operand() as dst, Operand() as src:
            next_dst = dataclasses.replace(last_dst, offset=last_dst.offset + copy.nbytes)
            next_src = dataclasses.replace(last_src, rank=last_src.rank + 1)
            return (dst, src) == (next_dst, next_src)
    return False

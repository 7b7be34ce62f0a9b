"""Calls on streams in words, for ``sidelane explain``."""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from sidelane.execute.cuda.calls import (
    Call,
    Cell,
    DeviceWord,
    HostWord,
    LaunchReduce,
    Memcpy,
    MemcpyBatch,
    MemcpyEveryOther,
    MemcpyRows,
    MemOps,
    Operand,
    RecordEvent,
    RecordStamp,
    Route,
    StreamPlan,
    WaitEvent,
    WaitValue,
    WriteValue,
)
from sidelane.execute.submitted import Counts
from sidelane.program.ir import Flag

DETOUR = Counts(events=4, calls=4)
"""Calls that an internal stream adds: it forks from the caller's by an event and joins it by another."""


def counts_of(plan: StreamPlan, route: Route = Route.DIRECT) -> Counts:
    """Count the calls of one invocation.

    Args:
        plan: calls that are submitted, ahead of the collective and by it.
        route: way in which they are submitted.
    """
    found: Counter[str] = Counter()
    for call in plan.calls():
        found["calls"] += 1
        match call:
            case MemOps(ops):
                writes = sum(isinstance(op, WriteValue) for op in ops)
                found["writes"] += writes
                found["waits"] += len(ops) - writes
            case Memcpy(within_rank=within):
                found["local_copies" if within else "peer_copies"] += 1
            case MemcpyBatch(copies) | MemcpyRows(copies):
                local = sum(copy.within_rank for copy in copies)
                found["local_copies"] += local
                found["peer_copies"] += len(copies) - local
            case MemcpyEveryOther():
                found["local_copies"] += 1
            case LaunchReduce():
                found["kernels"] += 1
            case RecordEvent() | WaitEvent() | RecordStamp():
                found["events"] += 1
            case _:
                assert_never(call)
    counts = Counts(**found)
    return counts + DETOUR if route is Route.INTERNAL else counts


def describe_call(call: Call) -> str:
    """Describe a call in one line.

    >>> describe_call(RecordEvent(2))
    'record event 2'
    """
    match call:
        case MemOps(ops):
            return f"memory operations: {'; '.join(map(_operation, ops))}"
        case Memcpy(dst, src, nbytes, within):
            return f"{'local' if within else 'peer'} copy of {nbytes} bytes, {_place(dst)} <- {_place(src)}"
        case MemcpyBatch(copies):
            return f"{len(copies)} copies in one call: {'; '.join(map(describe_call, copies))}"
        case MemcpyRows(copies):
            return f"{len(copies)} rows in one copy: {'; '.join(map(describe_call, copies))}"
        case MemcpyEveryOther(dst, src, nbytes, rows):
            return f"local copy of every other of {2 * rows} rows of {nbytes} bytes, {_place(dst)} <- {_place(src)}"
        case LaunchReduce(dst, srcs, nbytes, reduction):
            return f"kernel: {reduction} of {len(srcs)} x {nbytes} bytes -> {_place(dst)}"
        case RecordEvent(event):
            return f"record event {event}"
        case WaitEvent(event):
            return f"wait for event {event}"
        case RecordStamp(slot):
            return f"time stamp {slot}"


def _operation(op: WriteValue | WaitValue) -> str:
    if isinstance(op, WaitValue):
        return f"wait {_place(op.flag)} {op.comparison} {op.value}"
    return f"write {_place(op.target)} = {op.value}"


def _place(place: Operand | Flag | Cell | HostWord | DeviceWord) -> str:
    match place:
        case Operand(rank, buffer, offset):
            return f"{buffer}@{rank}+{offset}"
        case Flag(rank, index):
            return f"flag {index}@{rank}"
        case Cell(index):
            return f"cell {index}"
        case DeviceWord():
            return f"word '{place}'"
        case _:
            return f"host word '{place}'"

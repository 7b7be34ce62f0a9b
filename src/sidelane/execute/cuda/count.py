"""What a plan submits, counted by the class of engine that executes it."""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from sidelane.execute.cuda.calls import (
    LaunchReduce,
    Memcpy,
    MemcpyBatch,
    MemcpyEveryOther,
    MemcpyRows,
    MemOps,
    Plan,
    RecordEvent,
    RecordStamp,
    Route,
    WaitEvent,
    WriteValue,
)
from sidelane.execute.submitted import Counts

DETOUR = Counts(events=4, calls=4)
"""What an internal stream adds: it forks from the caller's by an event and joins it by another."""


def counts_of(plan: Plan, route: Route = Route.DIRECT) -> Counts:
    """Count the calls of one invocation.

    Args:
        plan: what is submitted, ahead of the call and by it.
        route: how it reaches its streams.
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

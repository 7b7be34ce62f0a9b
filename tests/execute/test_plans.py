"""Which calls of the driver a program becomes, on which streams and in which order: ``goldens/plans.txt`` has them."""

from __future__ import annotations

import dataclasses
from typing import Any

from small_programs import SUM, all_gather

from goldens import check_golden
from sidelane.execute.cuda import calls
from sidelane.execute.cuda.copy_batches import LEAST_SPLIT_BYTES
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.streams import INLINE_BYTES
from sidelane.program import collective as define
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, build_batch
from sidelane.program.builders.relay import relay
from sidelane.program.ir import Copy, Engine, EngineKind, Flag, Program, Queue, Stamp
from sidelane.program.transform import freeze, lower
from sidelane_lab.sim.prelaunch import prelaunch
from sidelane_lab.studies.phases.stamp import stamp

LARGE = 256 << 20


def listed(*parts: tuple[define.Collective, Transport]) -> Program:
    collectives, transports = zip(*parts, strict=True)
    return lower(build_batch(Batch("list", collectives[0].world_size, collectives), "b2b", [*transports]), {Copy})


def swap(parts: int, *, in_place: bool = False) -> Program:
    return lower(build(define.all_to_all([[parts] * 4] * 4, in_place=in_place), "swap"), {Copy})


IN_PLACE = build(all_gather(4, in_place=True), "b2b")
OWN_PART = build(all_gather(4, 1024), "b2b")
ALONE = dataclasses.replace(build(define.all_gather([LEAST_SPLIT_BYTES + 16] * 2), "b2b", Transport.PUSH), alone=True)
LIST = listed(*[(define.all_gather([64 + k] * 3, in_place=True), Transport.PUSH) for k in range(3)])
RELAY = relay(define.broadcast(24 << 20, 4, 1, in_place=True), rounds=2)
SCATTER = build(define.reduce_scatter([LARGE] * 4, SUM), "b2b")
STAMPS = Queue(0, Engine(EngineKind.DMA), (Stamp(0), Stamp(1)))

PLANS: dict[str, tuple[Program, int, dict[str, Any]]] = {
    "a gather in place": (IN_PLACE, 0, {}),
    "its rank 2: copies go in rotated order": (IN_PLACE, 2, {}),
    "without batches of copies": (IN_PLACE, 0, {"copy_batches": False}),
    "in a graph, which holds no epoch and no batch": (freeze(IN_PLACE), 0, {"captured": True}),
    "an own part, beside and joined behind the signals": (OWN_PART, 0, {}),
    "an own part in a graph, joined before the signals": (freeze(OWN_PART), 0, {"captured": True}),
    "an own part that nothing computes next to, in rows": (ALONE, 0, {}),
    "an own part that is pulled": (build(all_gather(3, 1024), "b2b", Transport.PULL), 1, {}),
    "an own part that is staged": (build(all_gather(3, 1024), "b2b", Transport.STAGED), 1, {}),
    "stripes": (build(all_gather(4, 1000, in_place=True), "striped"), 0, {}),
    "an engine for each peer": (build(all_gather(4, 2 * INLINE_BYTES), "pcpy"), 1, {}),
    "signals that are copied": (build(all_gather(3, in_place=True), "b2b"), 0, {"peer_writes": False}),
    "a swap": (swap(INLINE_BYTES), 0, {}),
    "a swap in a graph": (freeze(swap(INLINE_BYTES)), 0, {"captured": True}),
    "a swap of two ranks: three copies in their order": (
        lower(build(define.all_to_all([[8, 8], [8, 8]], in_place=True), "swap"), {Copy}),
        0,
        {},
    ),
    "a small reduction": (build(define.reduce_scatter([1024] * 4, SUM), "b2b"), 1, {}),
    "a larger one, on the same stream": (
        build(define.reduce_scatter([12 << 20] * 4, SUM), "b2b"),
        1,
        {},
    ),
    "a small all-reduce": (build(define.all_reduce([1024] * 4, SUM), "b2b"), 1, {}),
    "a larger all-reduce": (build(define.all_reduce([12 << 20] * 4, SUM), "b2b"), 1, {}),
    "a small all-reduce that is staged": (build(define.all_reduce([1024] * 4, SUM), "b2b", Transport.STAGED), 1, {}),
    "a larger one, with a stream for sums": (
        build(define.all_reduce([12 << 20] * 4, SUM), "b2b", Transport.STAGED),
        1,
        {},
    ),
    "a reduction in pieces: each is added up between the copies of the next and their signals": (SCATTER, 1, {}),
    "with stamps": (stamp(SCATTER), 1, {}),
    "with an engine for each peer": (build(define.reduce_scatter([LARGE] * 4, SUM), "pcpy"), 1, {}),
    "of a small shard among large ones": (
        build(define.reduce_scatter([LARGE, 1024, 0, LARGE], SUM), "b2b"),
        1,
        {},
    ),
    "an all-reduce in pieces": (build(define.all_reduce([LARGE] * 4, SUM), "b2b"), 0, {}),
    "a relay": (RELAY, 2, {}),
    "a relay in a graph": (freeze(RELAY), 1, {"captured": True}),
    "a list": (LIST, 1, {}),
    "a list in a graph": (freeze(LIST), 1, {"captured": True}),
    "a list that is pushed and pulled": (
        listed(
            (define.all_gather([64] * 3, in_place=True), Transport.PUSH), (define.all_gather([50] * 3), Transport.PULL)
        ),
        0,
        {},
    ),
    "held for a trigger": (prelaunch(build(all_gather(2), "b2b")), 0, {}),
    "stamps": (Program(all_gather(1, 0), "test", (STAMPS,), (0,), 0), 0, {}),
}


def place(where: object) -> str:
    match where:
        case calls.Operand(rank, buffer, offset):
            return f"{buffer}@{rank}+{offset}"
        case Flag(rank, index):
            return f"flag {index}@{rank}"
        case calls.SignalWord(index):
            return f"cell {index}"
    return str(where)


def text(call: object) -> str:
    match call:
        case calls.MemOps(ops):
            return ", ".join(map(text, ops))
        case calls.WriteValue(target, value):
            return f"{place(target)} = {value}"
        case calls.WaitValue(flag, value, comparison):
            return f"until {place(flag)} {comparison} {value}"
        case calls.Memcpy(dst, src, nbytes, within_rank):
            return f"{'own ' * within_rank}{place(dst)} <- {place(src)} ({nbytes})"
        case calls.MemcpyBatch(copies):
            return "together " + ", ".join(map(text, copies))
        case calls.MemcpyEveryOther(dst, src, nbytes, rows):
            return f"{place(dst)} <- {place(src)} ({nbytes}, {rows} rows)"
        case calls.LaunchReduce(dst, srcs, nbytes, reduction):
            return f"{place(dst)} <- {reduction.op} of {', '.join(map(place, srcs))} ({nbytes})"
        case calls.RecordEvent(event) | calls.WaitEvent(event):
            return f"{'record' if isinstance(call, calls.RecordEvent) else 'wait for'} event {event}"
        case calls.RecordStamp(slot):
            return f"stamp {slot}"
    raise AssertionError(call)


def listing(plan: calls.StreamPlan) -> str:
    head = f"{plan.streams} streams, {plan.events} events, {plan.signal_words} words"
    return "\n".join([head, *(f"{step.stream}: {text(step.call)}" for step in plan.steps)])


def test_plans() -> None:
    check_golden(
        "plans", {name: listing(plan_calls(program, rank, **how)) for name, (program, rank, how) in PLANS.items()}
    )

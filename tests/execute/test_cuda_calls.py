"""What the CUDA executor would submit, read without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
from small_programs import SUM, all_gather, programs

from sidelane.execute.cuda.calls import LaunchReduce, Memcpy, MemcpyBatch, MemOps, Route, StreamPlan, choose_route
from sidelane.execute.cuda.plan import MAX_BATCH, plan_calls
from sidelane.execute.cuda.release import READ_CAPACITY
from sidelane.program import collective as define
from sidelane.program import ir
from sidelane.program.builders import build, variants
from sidelane.program.collective import Span
from sidelane.program.transform import freeze
from sidelane_lab.sim.prelaunch import prelaunch


def of_type(plan: StreamPlan, kind: type) -> list:
    return [call for call in plan.calls() if isinstance(call, kind)]


def copies_of(plan: StreamPlan) -> list[Memcpy]:
    """Copies in the order of submission, whether they go alone or in a batch."""
    return [
        copy
        for call in plan.calls()
        if isinstance(call, Memcpy | MemcpyBatch)
        for copy in (call.copies if isinstance(call, MemcpyBatch) else [call])
    ]


def test_flags_of_all_programs_can_be_read_to_explain_a_stall() -> None:
    for n in (2, 3, 4, 8, 16):
        huge = [
            define.broadcast(64 << 30, n, 0),
            define.all_reduce([1 << 30] * n, SUM),
            define.all_gather([1 << 30] * n),
        ]
        for collective, variant in ((each, variant) for each in huge for variant in variants(each.kind)):
            assert prelaunch(build(collective, variant)).flag_count <= READ_CAPACITY, (collective, variant)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_moving_collectives_are_copies_and_memory_operations_alone(world_size: int) -> None:
    for program in programs(world_size):
        reducing = program.collective.reduction is not None
        for rank in range(world_size):
            plan = plan_calls(program, rank)
            assert bool(of_type(plan, LaunchReduce)) == reducing
            moved = sum(copy.nbytes for copy in copies_of(plan))
            asked = sum(c.src.nbytes for q in program.queues_of(rank) for c in q.commands if isinstance(c, ir.Copy))
            assert moved == asked


def test_nothing_is_submitted_for_zero_bytes() -> None:
    span = Span(0, define.Buffer.OUTPUT, 0, 0)
    source = Span(0, define.Buffer.INPUT, 0, 0)
    queue = ir.Queue(0, ir.Engine(ir.EngineKind.LOCAL), (ir.Copy(span, source),))
    plan = plan_calls(ir.Program(all_gather(1, 0), "test", (queue,), (0,), 0), 0)
    assert not copies_of(plan) and plan.streams == 1


def test_a_batch_respects_the_limit_of_the_driver() -> None:
    waits = tuple(ir.Wait(ir.Flag(0, index), ir.EPOCH) for index in range(MAX_BATCH + 10))
    program = ir.Program(
        all_gather(1, 0), "test", (ir.Queue(0, ir.Engine(ir.EngineKind.DMA), waits),), (0,), len(waits)
    )
    batches = of_type(plan_calls(program, 0), MemOps)
    assert [len(batch.ops) for batch in batches] == [MAX_BATCH, 12]


def test_a_rank_without_queues_has_no_trigger() -> None:
    program = build(all_gather(4), "pcpy")
    idle = dataclasses.replace(program, queues=tuple(queue for queue in program.queues if queue.rank))
    assert plan_calls(prelaunch(idle), 0) == plan_calls(idle, 0)


def test_a_captured_prelaunched_program_is_the_program() -> None:
    program = build(all_gather(4), "pcpy")
    plan, plain = (plan_calls(freeze(each), 0, captured=True) for each in (prelaunch(program), program))
    assert plan.streams == plain.streams and plan.marks == plain.marks == ()
    copies, copies_of_plain = ([call for call in each.calls() if isinstance(call, Memcpy)] for each in (plan, plain))
    assert copies == copies_of_plain


@pytest.mark.parametrize(
    "command",
    [
        ir.Swap(Span(0, define.Buffer.OUTPUT, 0, 4), Span(0, define.Buffer.OUTPUT, 4, 4)),
        ir.Signal(ir.Flag(0, 0), ir.Value(1), ir.SignalOp.ADD),
        ir.Wait(ir.Flag(1, 0), ir.EPOCH),
    ],
)
def test_commands_that_the_driver_lacks_are_refused(command: object) -> None:
    program = ir.Program(all_gather(2, 4), "test", (ir.Queue(0, ir.Engine(ir.EngineKind.DMA), (command,)),), (0, 0), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the driver has no such command"):
        plan_calls(program, 0)


def test_routes() -> None:
    assert [choose_route(handle, False, False) for handle in (0, 1, 2)] == [Route.INTERNAL] * 3
    assert choose_route(0x55550000, False, False) is Route.DIRECT
    assert choose_route(0x55550000, True, True) is Route.CAPTURE
    with pytest.raises(ValueError, match=r"value=a capture, allowed=eager calls"):
        choose_route(0x55550000, True, False)
    with pytest.raises(ValueError, match=r"value=an eager call, allowed=a graph"):
        choose_route(0x55550000, False, True)
    program = build(all_gather(2), "b2b")
    assert ir.has_epochs(program) and not ir.has_epochs(freeze(program))

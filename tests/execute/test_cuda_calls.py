"""What the CUDA executor would submit, read without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
from small_programs import SUM, all_gather, programs

from sidelane.execute.cuda.calls import (
    HostWord,
    LaunchReduce,
    Memcpy,
    MemcpyBatch,
    MemOps,
    RecordEvent,
    RecordStamp,
    Route,
    StreamPlan,
    WaitEvent,
    WaitValue,
    WriteValue,
    choose_route,
)
from sidelane.execute.cuda.plan import MAX_BATCH, plan_calls
from sidelane.execute.cuda.release import READ_CAPACITY
from sidelane.execute.cuda.streams import INLINE_BYTES
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import Kind, Span
from sidelane.program.ir import (
    EPOCH,
    Copy,
    Engine,
    EngineKind,
    Flag,
    Program,
    Queue,
    Signal,
    SignalOp,
    Stamp,
    Swap,
    Value,
    Wait,
    has_epochs,
)
from sidelane.program.transform import freeze, lower
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


def test_one_queue_needs_no_event_and_no_stream() -> None:
    plan = plan_calls(build(all_gather(4, in_place=True), "b2b"), 0)
    assert (plan.streams, plan.events) == (1, 0)
    assert not of_type(plan, RecordEvent) and not of_type(plan, WaitEvent)


def test_copies_go_in_rotated_order() -> None:
    plan = plan_calls(build(all_gather(4, in_place=True), "b2b"), 2)
    assert [copy.dst.rank for copy in copies_of(plan)] == [3, 0, 1]


def test_signals_and_waits_are_one_call_before_the_copies_and_one_after() -> None:
    program = build(all_gather(4, in_place=True), "b2b")
    plan = plan_calls(program, 0)
    assert [type(call) for call in plan.calls()] == [MemOps, MemcpyBatch, MemOps]
    single = [type(call) for call in plan_calls(program, 0, copy_batches=False).calls()]
    assert single == [MemOps, Memcpy, Memcpy, Memcpy, MemOps]
    captured = [type(call) for call in plan_calls(freeze(program), 0, captured=True).calls()]
    assert captured == single, "the driver cannot capture a batch of copies"
    first, last = of_type(plan, MemOps)
    assert [type(op) for op in first.ops] == [WriteValue] * 4 + [WaitValue] * 3  # three entries and started
    assert first.ops[3] == WriteValue(HostWord.STARTED, EPOCH), "the peers come before the host"
    assert last.ops[-1] == WriteValue(HostWord.FINISHED, EPOCH)
    assert [type(op) for op in last.ops] == [WriteValue] * 3 + [WaitValue] * 3 + [WriteValue]


def test_the_own_part_is_copied_beside_and_joined_behind_the_signals() -> None:
    plan = plan_calls(build(all_gather(4, 1024), "b2b"), 0)
    assert (plan.streams, plan.events) == (2, 2)
    first, begin, copies, signals, join, waits = plan.calls(0)
    assert isinstance(first, MemOps) and isinstance(copies, MemcpyBatch)
    assert [type(op) for op in signals.ops] == [WriteValue] * 3
    assert [type(op) for op in waits.ops] == [WaitValue] * 3 + [WriteValue], "and the end"
    wait, own, end = plan.calls(1)
    assert (wait.event, own.within_rank, join.event) == (begin.event, True, end.event)


def test_in_a_graph_the_own_part_is_joined_before_the_signals_and_the_end_follows_the_last_wait() -> None:
    plan = plan_calls(freeze(build(all_gather(4, 1024), "b2b")), 0, captured=True)
    *copies, join, last = plan.calls(0)[2:]
    assert [type(copy) for copy in copies] == [Memcpy] * 3 and isinstance(join, WaitEvent)
    *_, wait, end, reset = last.ops
    assert isinstance(wait, WaitValue) and end == WriteValue(HostWord.BUSY, Value(0)) and reset.target == wait.flag


def test_stripes_begin_and_end_together() -> None:
    plan = plan_calls(build(all_gather(4, 1000, in_place=True), "striped"), 0)
    assert (plan.streams, plan.events) == (2, 2)
    (_, begin, first, join, _), (wait, second, end) = plan.calls(0), plan.calls(1)
    assert (wait.event, join.event) == (begin.event, end.event)
    assert [copy.dst.rank for copy in first.copies] == [copy.dst.rank for copy in second.copies] == [1, 2, 3]
    assert [copy.nbytes for copy in (*first.copies, *second.copies)] == [512] * 3 + [488] * 3


def test_a_reduction_that_nothing_runs_beside_is_on_the_callers_stream() -> None:
    large = 12 << 20
    for make, nbytes, transport, streams, launches in (
        (define.reduce_scatter, 1024, Transport.PUSH, 1, 1),
        (define.reduce_scatter, large, Transport.PUSH, 1, 1),
        (define.all_reduce, 1024, Transport.PUSH, 1, 1),
        (define.all_reduce, large, Transport.PUSH, 1, 1),
        (define.all_reduce, 1024, Transport.STAGED, 1, 2),
        (define.all_reduce, large, Transport.STAGED, 2, 2),  # its second one would hold up the pulls
    ):
        plan = plan_calls(build(make([nbytes] * 4, SUM), "b2b", transport), 0)
        assert plan.streams == streams
        found = [step.stream for step in plan.steps if isinstance(step.call, LaunchReduce)]
        assert found == [streams - 1] * launches


def test_flags_of_all_programs_can_be_read_to_explain_a_stall() -> None:
    for n in (2, 3, 4, 8, 16):
        huge = [
            define.broadcast(64 << 30, n, 0),
            define.all_reduce([1 << 30] * n, SUM),
            define.all_gather([1 << 30] * n),
        ]
        for collective, variant in ((each, variant) for each in huge for variant in variants(each.kind)):
            assert prelaunch(build(collective, variant)).flag_count <= READ_CAPACITY, (collective, variant)


def test_every_queue_but_the_first_forks_and_joins_once() -> None:
    program = build(all_gather(4, 2 * INLINE_BYTES), "pcpy")  # three DMA queues and the local one
    plan = plan_calls(program, 1)
    assert plan.streams == 4
    main = plan.calls(0)
    fork = main[0]
    assert isinstance(fork, RecordEvent)
    joins = []
    for stream in (1, 2, 3):
        calls = plan.calls(stream)
        assert isinstance(calls[0], WaitEvent) and (calls[0].event == fork.event) == (stream < 3)
        assert isinstance(calls[-1], RecordEvent)
        joins.append(calls[-1].event)
    begin = plan.calls(3)[0].event
    assert RecordEvent(begin) in main[1:], "the own part begins with the copies to peers"
    assert [call.event for call in main if isinstance(call, WaitEvent)] == [joins[2], *joins[:2]]
    assert len({fork.event, begin, *joins}) == 5 == plan.events
    assert main[-1] == MemOps((WriteValue(HostWord.FINISHED, EPOCH),)), "the end is written behind the joins"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_moving_collectives_are_copies_and_memory_operations_alone(world_size: int) -> None:
    for program in programs(world_size):
        reducing = program.collective.reduction is not None
        for rank in range(world_size):
            plan = plan_calls(program, rank)
            assert bool(of_type(plan, LaunchReduce)) == reducing
            moved = sum(copy.nbytes for copy in copies_of(plan))
            asked = sum(c.src.nbytes for q in program.queues_of(rank) for c in q.commands if isinstance(c, Copy))
            assert moved == asked


@pytest.mark.parametrize("kind", [Kind.REDUCE_SCATTER, Kind.ALL_REDUCE])
def test_reductions_take_the_own_part_from_the_input(kind: Kind) -> None:
    make = define.reduce_scatter if kind is Kind.REDUCE_SCATTER else define.all_reduce
    program = build(make([256] * 4, SUM), "b2b", Transport.STAGED)
    for rank in range(4):
        launch, *again = of_type(plan_calls(program, rank), LaunchReduce)
        assert [other.srcs for other in again] == [launch.srcs] * (kind is Kind.ALL_REDUCE)
        assert launch.nbytes == 256 and len(launch.srcs) == 4
        assert launch.srcs[rank].buffer == "input" and launch.srcs[rank].rank == rank


def test_nothing_is_submitted_for_zero_bytes() -> None:
    span = Span(0, define.Buffer.OUTPUT, 0, 0)
    source = Span(0, define.Buffer.INPUT, 0, 0)
    queue = Queue(0, Engine(EngineKind.LOCAL), (Copy(span, source),))
    plan = plan_calls(Program(all_gather(1, 0), "test", (queue,), (0,), 0), 0)
    assert not copies_of(plan) and plan.streams == 1


def test_a_batch_respects_the_limit_of_the_driver() -> None:
    waits = tuple(Wait(Flag(0, index), EPOCH) for index in range(MAX_BATCH + 10))
    program = Program(all_gather(1, 0), "test", (Queue(0, Engine(EngineKind.DMA), waits),), (0,), len(waits))
    batches = of_type(plan_calls(program, 0), MemOps)
    assert [len(batch.ops) for batch in batches] == [MAX_BATCH, 12]


def test_without_peer_writes_a_signal_is_a_copy_behind_a_write_to_a_cell() -> None:
    plan = plan_calls(build(all_gather(3, in_place=True), "b2b"), 0, peer_writes=False)
    signals = [copy for copy in of_type(plan, Memcpy) if isinstance(copy.dst, Flag)]
    assert len(signals) == plan.signal_words == 4  # two entries, two exits
    assert all(copy.nbytes == 4 and copy.dst.rank != 0 for copy in signals)
    targets = [op.target for batch in of_type(plan, MemOps) for op in batch.ops if isinstance(op, WriteValue)]
    assert not any(isinstance(target, Flag) for target in targets), "no write reaches a peer"
    calls = plan.calls()
    for copy in signals:
        before = calls[: calls.index(copy)]
        assert any(
            isinstance(c, MemOps) and any(getattr(op, "target", None) == copy.src for op in c.ops) for c in before
        )
    # The entries leave before the first wait: a wait in the batch of their cells would hold them back.
    first_wait = next(i for i, c in enumerate(calls) if isinstance(c, MemOps) and isinstance(c.ops[-1], WaitValue))
    assert [c.dst for c in calls[:first_wait] if isinstance(c, Memcpy)] == [Flag(1, 0), Flag(2, 0)]


def test_queues_of_one_rank_wait_for_each_other_by_events() -> None:
    program = lower(build(define.all_to_all([[INLINE_BYTES] * 4] * 4), "swap"), {Copy})
    for captured in (False, True):
        plan = plan_calls(freeze(program) if captured else program, 0, captured=captured)
        assert plan.streams > 1 and of_type(plan, RecordEvent)
        own = [op for batch in of_type(plan, MemOps) for op in batch.ops if isinstance(op, WaitValue)]
        local = [flag for flag in (op.flag for op in own) if flag.index >= 8]
        assert not local, "flags beyond the handshakes are local"
        assert all(plan.calls().count(call) == 1 for call in of_type(plan, RecordEvent))


def test_a_rank_without_queues_has_no_trigger() -> None:
    program = build(all_gather(4), "pcpy")
    idle = dataclasses.replace(program, queues=tuple(queue for queue in program.queues if queue.rank))
    assert plan_calls(prelaunch(idle), 0) == plan_calls(idle, 0)


def test_copies_that_depend_on_each_other_are_not_one_call() -> None:
    """A swap is save, overwrite, land: three copies whose order matters."""
    exchange = define.all_to_all([[8, 8], [8, 8]], in_place=True)
    program = lower(build(exchange, "swap"), {Copy})
    plan = plan_calls(program, 0)
    assert not of_type(plan, MemcpyBatch) and len(of_type(plan, Memcpy)) == 3


def test_a_captured_prelaunched_program_is_the_program() -> None:
    program = build(all_gather(4), "pcpy")
    plan, plain = (plan_calls(freeze(each), 0, captured=True) for each in (prelaunch(program), program))
    assert plan.streams == plain.streams and plan.marks == plain.marks == ()
    copies, copies_of_plain = ([call for call in each.calls() if isinstance(call, Memcpy)] for each in (plan, plain))
    assert copies == copies_of_plain


def test_a_captured_plan_holds_no_epoch() -> None:
    plan = plan_calls(freeze(build(all_gather(4), "b2b")), 0, captured=True)
    ops = [op for batch in of_type(plan, MemOps) for op in batch.ops]
    assert all(op.value.per_epoch == 0 for op in ops)
    busy = [op.value.base for op in ops if isinstance(op, WriteValue) and op.target is HostWord.BUSY]
    assert busy == [1, 0]


def test_stamps_are_timed_events() -> None:
    queue = Queue(0, Engine(EngineKind.DMA), (Stamp(0), Stamp(1)))
    plan = plan_calls(Program(all_gather(1, 0), "test", (queue,), (0,), 0), 0)
    assert of_type(plan, RecordStamp) == [RecordStamp(0), RecordStamp(1)]


@pytest.mark.parametrize(
    "command",
    [
        Swap(Span(0, define.Buffer.OUTPUT, 0, 4), Span(0, define.Buffer.OUTPUT, 4, 4)),
        Signal(Flag(0, 0), Value(1), SignalOp.ADD),
        Wait(Flag(1, 0), EPOCH),
    ],
)
def test_commands_that_the_driver_lacks_are_refused(command: object) -> None:
    program = Program(all_gather(2, 4), "test", (Queue(0, Engine(EngineKind.DMA), (command,)),), (0, 0), 1)  # type: ignore[arg-type]
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
    assert has_epochs(program) and not has_epochs(freeze(program))

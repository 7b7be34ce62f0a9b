"""In which order a host hands over the commands of a rank, read without a GPU."""

from __future__ import annotations

import pytest
from small_programs import SUM, all_gather, programs

from sidelane.execute.cuda.calls import LaunchReduce, Memcpy, MemcpyBatch, MemOps, RecordEvent, WaitEvent
from sidelane.execute.cuda.order import submission_order
from sidelane.execute.cuda.plan import plan_calls
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.builders.reducing import reduce
from sidelane.program.builders.relay import relay
from sidelane.program.ir import Flag, Signal, Wait
from sidelane.program.transform import freeze
from sidelane_lab.studies.phases.stamp import stamp


@pytest.mark.parametrize("stamped", [False, True], ids=["plain", "stamped"])
@pytest.mark.parametrize("rank", range(4))
def test_a_piece_is_added_up_between_the_copies_of_the_next_and_their_signals(rank: int, stamped: bool) -> None:
    """Where all streams share a channel, it is free there: a signal holds it until the copies before it have ended."""
    program = build(define.reduce_scatter([256 << 20] * 4, SUM), "b2b")
    plan = plan_calls(stamp(program) if stamped else program, rank)
    assert plan.streams == 2
    moves = {MemcpyBatch: "copies", MemOps: "signals", LaunchReduce: "sum"}
    handed = [(step.stream, moves[type(step.call)]) for step in plan.steps if isinstance(step.call, (*moves,))]
    first = handed.index((0, "copies"))
    copies, told, waits, added = (0, "copies"), (0, "signals"), (1, "signals"), (1, "sum")
    assert handed[first:-1] == [copies, told, *[copies, waits, added, told] * 3, waits, added]
    batches = [step.call for step in plan.steps if isinstance(step.call, MemcpyBatch)]
    assert [len(call.copies) for call in batches] == [3] * 4


def test_a_small_shard_among_large_ones_is_added_up_on_the_callers_stream() -> None:
    """And behind its copies: these would wait for peers if it stood between them."""
    program = build(define.reduce_scatter([256 << 20, 1024, 0, 256 << 20], SUM), "b2b")
    small = [type(call) for call in plan_calls(program, 1).calls(0) if isinstance(call, MemcpyBatch | LaunchReduce)]
    assert small == [MemcpyBatch] * 4 + [LaunchReduce] * 3
    sums = [
        [step.stream for step in plan_calls(program, rank).steps if isinstance(step.call, LaunchReduce)]
        for rank in range(4)
    ]
    assert sums == [[1] * 4, [0] * 3, [], [1] * 4]


def test_waits_that_no_sum_follows_are_not_handed_over_early() -> None:
    """An engine for each peer: what one of them has moved is no piece yet."""
    program = build(define.reduce_scatter([256 << 20] * 4, SUM), "pcpy")
    for rank in range(4):
        steps = plan_calls(program, rank).steps
        last_copies = max(n for n, step in enumerate(steps) if isinstance(step.call, Memcpy | MemcpyBatch))
        sums = [n for n, step in enumerate(steps) if isinstance(step.call, LaunchReduce)]
        aside = steps[sums[0]].stream
        waits = [n for n, step in enumerate(steps) if step.stream == aside and isinstance(step.call, MemOps)]
        early = [n - 1 for n in sums if n < last_copies]
        assert [n for n in waits if sums[0] - 1 <= n < last_copies] == early != []


def test_an_all_reduce_tells_of_its_first_piece_on_a_stream_of_its_own() -> None:
    plan = plan_calls(build(define.all_reduce([256 << 20] * 4, SUM), "b2b"), 0)
    assert plan.streams == 3
    main = plan.calls(0)
    first, second = [index for index, call in enumerate(main) if isinstance(call, MemcpyBatch)][:2]
    (mark,) = main[first + 1 : second]
    assert isinstance(mark, RecordEvent)
    assert [call.event for call in plan.calls(1) if isinstance(call, WaitEvent)] == [mark.event]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_engines_of_a_relay_are_handed_their_chunks_in_turn(captured: bool) -> None:
    program = relay(define.broadcast(24 << 20, 4, 1, in_place=True), rounds=3)
    for rank, expected in ((1, [0, 1] * 3), (2, [0, 1] * 3), (0, [])):
        steps = plan_calls(freeze(program) if captured else program, rank, captured=captured).steps
        copies = [step for step in steps if isinstance(step.call, Memcpy)]
        assert [step.stream for step in copies] == expected
        assert sum(step.call.nbytes for step in copies) == (24 << 20 if copies else 0), "once, not once a peer"


def test_the_next_rank_hears_of_a_chunk_before_the_next_one_is_handed_over() -> None:
    steps = plan_calls(relay(define.broadcast(24 << 20, 4, 1, in_place=True), rounds=3), 1).steps
    handed = [(step.stream, type(step.call)) for step in steps if isinstance(step.call, Memcpy | MemOps)]
    first = handed.index((0, Memcpy))
    chunks = [(lane, call) for lane in (0, 1, 0, 1) for call in (Memcpy, MemOps)]
    assert handed[first : first + len(chunks)] == chunks


@pytest.mark.parametrize("inline", [False, True], ids=["aside", "inline"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_one_channel_a_rank_is_enough(world_size: int, inline: bool) -> None:
    """Run every rank's commands one after the other, as if all its streams shared one first-in-first-out channel."""
    uneven = [(rank % 3) * 3000 for rank in range(world_size)]
    in_pieces = [
        reduce(collective, variant, transport, pieces=(3, 2, 1))
        for collective in (define.reduce_scatter(uneven, SUM), define.all_reduce(uneven, SUM))
        for variant in ("b2b", "pcpy")
        for transport in (Transport.PUSH, Transport.STAGED)
    ]
    eager = programs(world_size) + in_pieces
    for program in eager + [freeze(program) for program in eager]:
        order = submission_order(program, lambda queue: inline)
        for rank, places in enumerate(order):
            queues = program.queues_of(rank)
            assert sorted(places) == [(q, i) for q in range(len(queues)) for i in range(len(queues[q].commands))]
        left = [[program.queues_of(rank)[q].commands[i] for q, i in places] for rank, places in enumerate(order)]
        words: dict[Flag, int] = {}
        moved = True
        while moved:
            moved = False
            for commands in left:
                while commands and not (
                    isinstance(commands[0], Wait) and words.get(commands[0].flag, 0) < commands[0].value.at(1)
                ):
                    command = commands.pop(0)
                    if isinstance(command, Signal):
                        words[command.flag] = command.value.at(1)
                    moved = True
        assert not any(left), f"{program.collective} {program.variant}: stuck"


def test_a_rank_with_one_queue_keeps_its_order() -> None:
    program = build(all_gather(4, in_place=True), "b2b")
    assert submission_order(program, lambda queue: False)[3] == tuple(
        (0, index) for index in range(len(program.queues_of(3)[0].commands))
    )

"""Many collectives as one program: the same handshakes as one of them, proved like any other, with seeded mistakes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attack.edits import begins_own_part, deleted, edited, perturbed_copies, places, without_flag
from attack.interpreter import failure
from sidelane.errors import ProgramError
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, build_batch, list_variants
from sidelane.program.collective import (
    REDUCING,
    Buffer,
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
    split_evenly,
)
from sidelane.program.ir import Copy, EngineKind, Program, Reduce, Signal, Wait
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch

SUM = Reduction(ReduceOp.SUM, "int32")
LARGEST = Reduction(ReduceOp.MAX, "int64")
LISTED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


def part_of(kind: Kind, n: int, size: int, in_place: bool, root: int = 0) -> Collective:
    """A collective of about ``size`` elements a part."""
    match kind:
        case Kind.ALL_GATHER:
            return all_gather([size] * n, in_place=in_place)
        case Kind.ALL_TO_ALL:
            return all_to_all([[size] * n] * n, in_place=in_place)
        case Kind.BROADCAST:
            return broadcast(size, n, root, in_place=in_place)
        case Kind.SCATTER:
            return scatter([size] * n, root)
        case Kind.GATHER:
            return gather([size] * n, root)
        case Kind.REDUCE_SCATTER:
            reduction = LARGEST if size % 2 else SUM
            return reduce_scatter([reduction.element_bytes * size] * n, reduction, in_place=in_place)
    shards = split_evenly(8 * size, n, granularity=8)  # some ranks reduce nothing
    return all_reduce(shards, LARGEST if size % 2 else SUM, in_place=in_place)


def transport_of(part: Collective, variant: str, wanted: Transport) -> Transport:
    """The one that is asked for, where it is possible."""
    if variant in ("bcst", "swap") or part.kind in REDUCING:
        return Transport.PUSH
    if part.kind is Kind.ALL_TO_ALL and part.in_place:
        return Transport.STAGED
    return wanted


def merged(parts: Sequence[Collective], variant: str, transports: Sequence[Transport], n: int = 0) -> Program:
    batch = Batch("batch", n or parts[0].world_size, tuple(parts))
    pairs = zip(parts, transports, strict=True)
    return build_batch(batch, variant, [transport_of(part, variant, wanted) for part, wanted in pairs])


def forms(program: Program) -> list[Program]:
    lowered = lower(program, {Copy})
    return [program, lowered, freeze(lowered), prelaunch(lowered), freeze(prelaunch(lowered))]


def accepts(program: Program) -> bool:
    try:
        verify(program)
    except ProgramError:
        return False
    return True


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_list_of_one_kind(data: st.DataObject) -> None:
    """Sizes, places and transports differ from tensor to tensor; some have no bytes."""
    n = data.draw(st.integers(1, 8), label="ranks")
    kind = data.draw(st.sampled_from(LISTED), label="kind")
    variant = data.draw(st.sampled_from(list_variants(kind)), label="variant")
    root = data.draw(st.integers(0, n - 1), label="root")
    drawn = data.draw(
        st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from(Transport)), max_size=5), label="tensors"
    )
    parts = [part_of(kind, n, size, in_place, root) for size, in_place, _ in drawn]
    program = merged(parts, variant, [transport for _, _, transport in drawn], n)
    for form in forms(program) if n < 5 else [freeze(lower(program, {Copy}))]:
        verify(form)
    chosen = data.draw(st.sampled_from(forms(program)), label="form")
    assert failure((chosen,) * 3, range(3)) is None


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_mixture_of_kinds(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5), label="ranks")
    variant = data.draw(st.sampled_from(("b2b", "pcpy")), label="variant")
    drawn = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(Kind),
                st.integers(0, 9),
                st.booleans(),
                st.integers(0, n - 1),
                st.sampled_from(Transport),
            ),
            min_size=1,
            max_size=5,
        ),
        label="parts",
    )
    parts = [part_of(kind, n, size, in_place, root) for kind, size, in_place, root, _ in drawn]
    program = merged(parts, variant, [transport for *_, transport in drawn])
    for form in forms(program):
        verify(form)
    assert failure((data.draw(st.sampled_from(forms(program)), label="form"),) * 3, range(3)) is None


@pytest.mark.parametrize("variant", ["b2b", "pcpy", "bcst"])
def test_the_handshakes_of_a_list_are_those_of_one(variant: str) -> None:
    one = build(all_gather([8] * 4, in_place=True), variant)
    many = merged([all_gather([size] * 4, in_place=True) for size in (8, 1, 300)], variant, [Transport.PUSH] * 3)
    assert [queue.engine for queue in many.queues] == [queue.engine for queue in one.queues]
    for queue, single in zip(many.queues, one.queues, strict=True):
        kinds = [type(command) for command in queue.commands]
        assert [c for c in queue.commands if isinstance(c, Signal | Wait)] == [
            c for c in single.commands if isinstance(c, Signal | Wait)
        ]
        moves = [k for k, kind in enumerate(kinds) if kind not in (Signal, Wait)]
        assert moves == list(range(moves[0], moves[-1] + 1)), "nothing stands between the copies of an engine"


def test_copies_to_one_peer_follow_each_other_in_rotation() -> None:
    program = merged([all_gather([8] * 4, in_place=True)] * 3, "b2b", [Transport.PUSH] * 3)
    for queue in program.queues:
        peers = [command.dst.rank for command in queue.commands if isinstance(command, Copy)]
        assert peers == [(queue.rank + step) % 4 for step in (1, 1, 1, 2, 2, 2, 3, 3, 3)]


def test_each_tensor_travels_as_its_place_allows() -> None:
    parts = [all_gather([8] * 2), all_gather([8] * 2), all_gather([8] * 2, in_place=True)]
    program = merged(parts, "b2b", [Transport.PUSH, Transport.PULL, Transport.STAGED])
    (dma,) = (queue for queue in program.queues_of(0) if queue.engine.kind is EngineKind.DMA)
    copies = [(command.dst.rank, command.src.buffer) for command in dma.commands if isinstance(command, Copy)]
    assert copies == [(1, Buffer.INPUT), (0, Buffer.INPUT), (0, Buffer.STAGING)]
    staging, own = (queue for queue in program.queues_of(0) if queue.engine.kind is EngineKind.LOCAL)
    assert [type(command) for command in staging.commands] == [Copy, Signal]
    assert [type(command) for command in own.commands] == [Wait, Copy, Copy], "beside the copies from peers"
    assert not any(isinstance(c, Signal) and c in staging.commands for c in dma.commands), "a peer is told once"


def test_staging_of_tensors_lies_apart() -> None:
    parts = [all_to_all([[size] * 3] * 3) for size in (100, 7, 0, 300)]
    program = merged(parts, "b2b", [Transport.STAGED] * 4)
    used = {
        (command.dst.offset, command.dst.nbytes)
        for queue in program.queues_of(0)
        for command in queue.commands
        if isinstance(command, Copy) and command.dst.buffer is Buffer.STAGING
    }
    assert used == {(100, 200), (519, 14), (1068, 600)}, "neighbours in one piece"
    assert program.staging_bytes[0] == 1668


def test_reductions_wait_once_for_all_tensors() -> None:
    program = merged([part_of(Kind.ALL_REDUCE, 3, size, True) for size in (9, 30)], "b2b", [Transport.PUSH] * 2)
    (compute,) = (queue for queue in program.queues_of(0) if queue.engine.kind is EngineKind.COMPUTE)
    assert [type(command) for command in compute.commands] == [Wait] * 2 + [Reduce] * 2 + [Signal] * 2 + [Reduce] * 2


def test_nothing_at_all() -> None:
    program = build_batch(Batch("all_gather", 3, ()), "b2b", [])
    assert not program.queues
    verify(program)
    assert str(program.collective) == "all_gather(3 ranks, 0 tensors, 0 bytes)"


def test_parts_of_another_world_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks of part 1"):
        Batch("batch", 2, (all_gather([8] * 2), all_gather([8] * 3)))


# --- mistakes ---------------------------------------------------------------------------------------------------------


def example() -> Program:
    parts = [all_gather([8] * 3), all_gather([5] * 3, in_place=True), all_gather([12] * 3, in_place=True)]
    return merged(parts, "b2b", [Transport.PUSH, Transport.STAGED, Transport.PUSH])


def test_an_exit_signal_before_the_last_copy_is_refused() -> None:
    program = example()
    verify(program)
    for q, queue in enumerate(program.queues):
        copies = [k for k, command in enumerate(queue.commands) if isinstance(command, Copy)]
        signals = [k for k, command in enumerate(queue.commands) if isinstance(command, Signal)]
        if queue.engine.kind is not EngineKind.DMA:
            continue
        for early in (k for k in signals if k > copies[-1]):
            signal = queue.commands[early]
            moved = [k for k in copies if signal.flag.rank in (queue.commands[k].dst.rank, queue.commands[k].src.rank)]
            rest = [command for k, command in enumerate(queue.commands) if k != early]
            rest.insert(moved[-1], signal)
            with pytest.raises(ProgramError, match="race|wrong bytes"):
                verify(edited(program, q, rest))


def test_a_staging_copy_behind_the_entry_is_refused() -> None:
    program = example()
    for q, queue in enumerate(program.queues):
        if queue.engine.kind is EngineKind.LOCAL and isinstance(queue.commands[-1], Signal):
            with pytest.raises(ProgramError, match="race"):
                verify(edited(program, q, [*queue.commands[1:], queue.commands[0]]))


def test_no_command_and_no_handshake_can_be_left_out() -> None:
    program = example()
    for place in places(program, object):
        assert not accepts(deleted(program, place)), program.queues[place[0]].commands[place[1]]
    for place in places(program, Wait):
        if not begins_own_part(program, place):
            assert not accepts(without_flag(program, place))


def test_bytes_of_another_piece_are_refused() -> None:
    """Copies that are off by a few bytes, or that run into the gap between two tensors, or across it."""
    program = example()
    original = [command for queue in program.queues for command in queue.commands]
    for broken in perturbed_copies(program):
        commands = [command for queue in broken.queues for command in queue.commands]
        (change,) = [new for old, new in zip(original, commands, strict=True) if old != new]
        if not accepts(broken):
            continue
        assert failure((broken,) * 3, range(10)) is None, change


def test_a_span_across_two_tensors_is_refused() -> None:
    batch = Batch("all_gather", 1, (all_gather([256]), all_gather([256])))
    program = build_batch(batch, "b2b", [Transport.PUSH] * 2)
    verify(program)
    across = Copy(Span(0, Buffer.OUTPUT, 0, 512), Span(0, Buffer.INPUT, 0, 512))
    with pytest.raises(ProgramError, match=r"output@0\[0:512\] is out of bounds: it does not lie within one piece"):
        verify(edited(program, 0, [across]))


@pytest.mark.parametrize("frozen", [False, True], ids=["eager", "frozen"])
def test_lists_and_single_calls_follow_each_other(frozen: bool) -> None:
    """They share flags and staging."""
    programs = [
        merged([part_of(kind, 3, size, False) for size in (5, 0, 2)], "b2b", [Transport.STAGED] * 3) for kind in LISTED
    ]
    programs += [build(part_of(kind, 3, 4, False), "pcpy", Transport.STAGED) for kind in LISTED]
    if frozen:
        programs = [freeze(program) for program in programs]
    for seed in range(3):
        sequence = random.Random(seed).sample(programs, 3)
        verify_sequence(sequence)
        assert failure(tuple(sequence) * 2, range(3)) is None


def test_the_cost_grows_with_the_commands() -> None:
    """The order is proved for the handshakes alone, and bytes that the same commands touch are compared once."""
    few, many = (verify(merged([all_gather([8] * 8)] * k, "b2b", [Transport.PUSH] * k)) for k in (2, 20))
    assert few.pairs == many.pairs

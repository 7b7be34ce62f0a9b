"""``verify`` accepts what the builders and transforms make, in every size, and random schedules agree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import long

from attack.interpreter import failure
from sidelane.errors import ProgramError
from sidelane.program.builders import Transport, build, variants
from sidelane.program.builders.reducing import reduce
from sidelane.program.builders.relay import relay
from sidelane.program.collective import (
    ELEMENT_BYTES,
    REDUCING,
    Buffer,
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
    split_evenly,
)
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, hold, lower
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch

SUM = Reduction(ReduceOp.SUM, "int32")


def make(kind: Kind, n: int, size: int, in_place: bool) -> Collective:
    """A collective whose parts are about ``size`` elements, uneven where the kind allows it."""
    uneven = [max(0, size + rank % 3 - 1) for rank in range(n)]
    match kind:
        case Kind.ALL_GATHER:
            return all_gather(uneven, in_place=in_place)
        case Kind.ALL_TO_ALL:
            return all_to_all([[uneven[(i + j) % n] for j in range(n)] for i in range(n)], in_place=in_place)
        case Kind.BROADCAST:
            return broadcast(size, n, root=n - 1, in_place=in_place)
        case Kind.SCATTER:
            return scatter(uneven, root=n // 2)
        case Kind.GATHER:
            return gather(uneven, root=0)
        case Kind.REDUCE_SCATTER:
            return reduce_scatter([4 * part for part in uneven], SUM, in_place=in_place)
    return all_reduce(split_evenly(4 * n * size + 4, n, granularity=4), SUM, in_place=in_place)


def programs(collective: Collective) -> list[Program]:
    """All variants and transports, lowered or not, prelaunched, held or not, frozen or not."""
    result = []
    for variant in variants(collective.kind):
        for transport in Transport if collective.kind is not Kind.REDUCE_SCATTER else [Transport.PUSH]:
            try:
                program = build(collective, variant, transport)
            except ValueError:
                continue  # bcst and swap only push, and an in-place all_to_all cannot
            for moves in (program, lower(program, {Copy})):
                result += [moves, freeze(moves), prelaunch(moves), freeze(prelaunch(moves))]
            result.append(hold(moves))
    assert result
    return result


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in"])
@pytest.mark.parametrize("kind", sorted(REDUCING))
@pytest.mark.parametrize("n", [2, 3, 5])
def test_reductions_in_pieces_are_accepted(kind: Kind, n: int, in_place: bool) -> None:
    make_it = all_reduce if kind is Kind.ALL_REDUCE else reduce_scatter
    for shards in ([1024] * n, [0, *range(100, 100 + 700 * (n - 1), 700)]):
        for variant in ("pcpy", "b2b"):
            for transport in (Transport.PUSH, Transport.STAGED):
                program = reduce(make_it(shards, SUM, in_place=in_place), variant, transport, pieces=(3, 2, 2))
                for form in (program, freeze(program), prelaunch(program)):
                    verify(form)


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in"])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("n", [1, 2, 3, long(4), 5, long(8)])
def test_everything_that_is_built_is_accepted(kind: Kind, n: int, in_place: bool) -> None:
    if kind in (Kind.SCATTER, Kind.GATHER) and in_place:
        in_place = False  # these two have no in-place form
    for size in (0, 1, 7) if n < 5 else (7,):
        collective = make(kind, n, size, in_place)
        left = [replace(collective, copies_own=False)] if kind is Kind.ALL_TO_ALL and not in_place else []
        for program in (one for each in (collective, *left) for one in programs(each)):
            verification = verify(program)
            assert verification.commands == sum(len(queue.commands) for queue in program.queues)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_own_parts_that_stay_are_neither_read_nor_written(n: int) -> None:
    counts = make(Kind.ALL_TO_ALL, n, 7, False).counts
    usual, left = all_to_all(counts), all_to_all(counts, copies_own=False)
    assert all_to_all(left.counts, in_place=n < 3, copies_own=False).copies_own == (n < 3), "in place all stay anyway"
    with pytest.raises(ValueError, match="own parts too"):
        build(left, "swap")
    for variant in variants(Kind.ALL_TO_ALL):
        for transport in Transport if variant != "swap" else ():
            program = build(left, variant, transport)
            moved = [c for queue in program.queues for c in queue.commands if isinstance(c, Copy)]
            assert not any(c.src.rank == c.dst.rank and c.dst.buffer == Buffer.OUTPUT for c in moved)
            assert sum(c.dst.nbytes for c in moved if c.dst.buffer == Buffer.OUTPUT) == sum(map(sum, counts)) - sum(
                counts[rank][rank] for rank in range(n)
            )
            for mistaken in (
                replace(program, collective=usual),
                replace(build(usual, variant, transport), collective=left),
            ):
                with pytest.raises(ProgramError, match="wrong bytes: rank 0 ends"):
                    verify(mistaken)


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_REDUCE])
def test_sixteen_ranks(kind: Kind) -> None:
    verify(build(make(kind, 16, 3, False), "pcpy"))


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("op", ReduceOp)
def test_every_reduction(op: ReduceOp, dtype: str) -> None:
    element = ELEMENT_BYTES[dtype]
    for collective in (
        reduce_scatter([element * 3, 0, element], Reduction(op, dtype)),
        all_reduce([element * 3, 0, element], Reduction(op, dtype), in_place=True),
    ):
        verify(build(collective, "b2b"))


def test_the_cost_does_not_depend_on_the_bytes() -> None:
    """A byte and a tebibyte are the same number of pairs to compare."""
    small, large = (verify(build(all_gather([nbytes] * 8), "pcpy")) for nbytes in (1, 1 << 40))
    assert (small.commands, small.pairs) == (large.commands, large.pairs)
    # 56 copies between ranks with a signal and a wait at either end, and 8 copies of own chunks, which
    # wait for a mark.
    assert small.commands == 5 * 56 + 3 * 8


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sizes(data: st.DataObject) -> None:
    """Uneven and empty parts of any kind; what is accepted survives random schedules."""
    n = data.draw(st.integers(1, 5), label="ranks")
    sizes = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    kind = data.draw(st.sampled_from(Kind), label="kind")
    in_place = data.draw(st.booleans(), label="in place")
    if kind is Kind.ALL_TO_ALL:
        counts = data.draw(st.lists(sizes, min_size=n, max_size=n), label="counts")
        if in_place:
            counts = [[counts[min(i, j)][max(i, j)] for j in range(n)] for i in range(n)]
        own = data.draw(st.booleans(), label="own parts are copied")
        collective = all_to_all(counts, in_place=in_place, copies_own=own)
    else:
        parts = data.draw(sizes, label="parts")
        root = data.draw(st.integers(0, n - 1), label="root")
        collective = {
            Kind.ALL_GATHER: lambda: all_gather(parts, in_place=in_place),
            Kind.BROADCAST: lambda: broadcast(parts[0], n, root, in_place=in_place),
            Kind.SCATTER: lambda: scatter(parts, root),
            Kind.GATHER: lambda: gather(parts, root),
            Kind.REDUCE_SCATTER: lambda: reduce_scatter([4 * part for part in parts], SUM, in_place=in_place),
            Kind.ALL_REDUCE: lambda: all_reduce([4 * part for part in parts], SUM, in_place=in_place),
        }[kind]()
    program = data.draw(st.sampled_from(programs(collective)), label="program")
    verify(program)
    assert failure((program,) * 3, range(4)) is None


@pytest.mark.parametrize("frozen", [False, True], ids=["eager", "frozen"])
@pytest.mark.parametrize("seed", range(12))
def test_programs_of_one_communicator_follow_each_other(seed: int, frozen: bool) -> None:
    """Any three programs, back to back, share flags and staging. Frozen ones are not prelaunched (see verify_order)."""
    rng = random.Random(seed)
    n = rng.choice((2, 3, 4))
    pool = [
        program
        for kind in Kind
        for program in programs(make(kind, n, 3, in_place=False))
        if ("frozen" in program.variant) == frozen and not (frozen and program.prelaunched)
    ]
    for _ in range(3):
        sequence = rng.sample(pool, 3)
        verify_sequence(sequence)
        assert failure(tuple(sequence) * 2, range(4)) is None


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in"])
@pytest.mark.parametrize(("n", "root", "rounds"), [(2, 0, 2), (3, 2, 3), (4, 1, 2), (5, 0, 2)])
def test_relays_in_rounds_are_accepted(n: int, root: int, rounds: int, in_place: bool) -> None:
    for nbytes in (300, 700, 1 << 14):
        program = relay(broadcast(nbytes, n, root, in_place=in_place), rounds=rounds)
        for form in (program, freeze(program), prelaunch(program), freeze(prelaunch(program))):
            verify(form)

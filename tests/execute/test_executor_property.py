"""``verify`` accepts what builders and transforms make, and it gives right bytes: random worlds, sizes and delays."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from worlds import LocalWorld, random_delays

from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import (
    ELEMENT_BYTES,
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
)
from sidelane.program.ir import Broadcast, Copy, Program, Swap
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify
from sidelane_lab.sim.prelaunch import prelaunch

SIZES = st.integers(0, 70)


@st.composite
def collectives(draw: st.DrawFn) -> Collective:
    n = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(Kind))
    in_place = draw(st.booleans())
    shards = draw(st.lists(SIZES, min_size=n, max_size=n))
    root = draw(st.integers(0, n - 1))
    if kind is Kind.ALL_TO_ALL:
        matrix = [draw(st.lists(SIZES, min_size=n, max_size=n)) for _ in range(n)]
        if in_place or draw(st.booleans()):
            matrix = [[matrix[min(i, j)][max(i, j)] for j in range(n)] for i in range(n)]
        return all_to_all(matrix, in_place=in_place, copies_own=draw(st.booleans()))
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
        reduction = Reduction(draw(st.sampled_from(ReduceOp)), draw(st.sampled_from(sorted(ELEMENT_BYTES))))
        make = reduce_scatter if kind is Kind.REDUCE_SCATTER else all_reduce
        return make([size * reduction.element_bytes for size in shards], reduction, in_place=in_place)
    if kind is Kind.BROADCAST:
        return broadcast(shards[0], n, root, in_place=in_place)
    if kind is Kind.ALL_GATHER:
        return all_gather(shards, in_place=in_place)
    return (scatter if kind is Kind.SCATTER else gather)(shards, root)


@st.composite
def programs(draw: st.DrawFn) -> Program | None:
    """A program that the builders make; None if they do not make it that way."""
    collective = draw(collectives())
    variant = draw(st.sampled_from(variants(collective.kind)))
    try:
        program = build(collective, variant, draw(st.sampled_from(Transport)))
    except ValueError:
        return None
    native = draw(st.sampled_from([{Copy}, {Copy, Broadcast}, {Copy, Broadcast, Swap}]))
    program = lower(program, native)
    if draw(st.booleans()):
        program = prelaunch(program)
    if draw(st.booleans()):
        program = freeze(program)
    return program


@given(program=programs(), seed=st.integers(0, 2**16), steps=st.lists(st.integers(1, 3), min_size=3, max_size=3))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_accepted_programs_give_right_bytes(program: Program | None, seed: int, steps: list[int]) -> None:
    assume(program is not None)
    assert program is not None
    verify(program)
    delays = {rank: random_delays(seed + rank, 0.1, 0.001) for rank in range(program.world_size)}
    with LocalWorld(program.world_size, delays=delays) as world:
        loaded = world.load(program)
        epoch = 0
        for step in steps:
            epoch += step
            loaded.run_checked(epoch)

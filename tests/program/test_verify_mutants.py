"""``verify`` against every mistake of a kind: nothing can be left out, nothing moved, and what is accepted is right.

Mistakes at random, and what is made up at random, are in ``tests/attack``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from listings import replace, without
from refusals import CYCLE, EPOCH_BARRIER, GATHER, RESET_BARRIER, gather, nothing

from attack.edits import begins_own_part, deleted, perturbed_copies, places, replaced, without_flag
from attack.interpreter import failure
from sidelane.errors import ProgramError
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import (
    REDUCING,
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    scatter,
)
from sidelane.program.collective import gather as gather_to
from sidelane.program.ir import Comparison, Copy, Program, Signal, Wait
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch

SUM = Reduction(ReduceOp.SUM, "int32")


def collectives(n: int) -> list[Collective]:
    both = [
        collective
        for in_place in (False, True)
        for collective in (
            all_gather([8] * n, in_place=in_place),
            all_to_all([[8] * n] * n, in_place=in_place),
            broadcast(8, n, root=0, in_place=in_place),
            reduce_scatter([8] * n, SUM, in_place=in_place),
            all_reduce([8] * n, SUM, in_place=in_place),
        )
    ]
    return [*both, scatter([8] * n, root=0), gather_to([8] * n, root=n - 1)]


def built(collective: Collective) -> Iterator[Program]:
    """Every variant on every transport that it has."""
    for variant in variants(collective.kind):
        for transport in Transport if collective.kind not in REDUCING else [Transport.PUSH]:
            try:
                yield build(collective, variant, transport)
            except ValueError:
                continue  # bcst and swap only push, and an in-place all_to_all cannot


def transformed(program: Program) -> list[Program]:
    if program.world_size > 2:
        return [program]
    lowered = lower(program, {Copy})
    return [program, lowered, freeze(lowered), prelaunch(lowered), freeze(prelaunch(program))]


def accepts(*programs: Program, rounds: int = 2) -> bool:
    try:
        verify_sequence(programs, rounds=rounds)
    except ProgramError:
        return False
    return True


SMALL = [pytest.param(c, id=f"{c.kind}-{c.world_size}-{c.in_place}") for n in (2, 3) for c in collectives(n)]


@pytest.mark.parametrize("collective", SMALL)
def test_no_command_can_be_left_out(collective: Collective) -> None:
    """Signals, waits, resets, triggers, moves and reductions: without any one of them the program is refused."""
    for right in built(collective):
        for program in transformed(right):
            assert accepts(program)
            needless = [place for place in places(program, object) if accepts(deleted(program, place))]
            assert not needless, program


@pytest.mark.parametrize("collective", SMALL)
def test_a_span_can_only_move_to_the_same_bytes(collective: Collective) -> None:
    """A perturbed destination, or one byte less, is always refused.

    A perturbed source is harmless only where it names another place that holds the same bytes by then: the input
    instead of its copy in staging, or a peer's output that has them already. Random schedules find no fault with those.
    """
    for right in built(collective):
        for program in (right, lower(right, {Copy})) if collective.world_size == 2 else (right,):
            original = dict(_copies(program))
            for broken in perturbed_copies(program):
                if accepts(broken):
                    (changed,) = [place for place, copy in _copies(broken) if copy != original[place]]
                    command = broken.queues[changed[0]].commands[changed[1]]
                    assert command.dst == original[changed].dst, broken
                    assert failure((broken,) * 3, range(20)) is None, broken


@pytest.mark.parametrize("collective", [c for n in (2, 3) for c in collectives(n)], ids=str)
def test_no_handshake_can_be_left_out(collective: Collective) -> None:
    """A wait together with its signals: the program needs every handshake that the builders put into it.

    The exception is an all_reduce that runs after itself. Its last exits could go: the entries of the next one say that
    the results were pulled; in pieces, so could the first entries. Between other programs, which use staging for other
    things, they are needed, as the next test shows.
    """
    for program in built(collective):
        handshakes = [place for place in places(program, Wait) if not begins_own_part(program, place)]
        needless = [place for place in handshakes if accepts(without_flag(program, place))]
        if collective.kind is Kind.ALL_REDUCE:
            each = 2 if program.variant == "chunked" else 1
            assert len(needless) == each * collective.world_size * (collective.world_size - 1)
        else:
            assert not needless, program


@pytest.mark.parametrize(("variant", "implied"), [("b2b", 0), ("chunked", 6)])
def test_an_all_reduce_among_others_needs_its_handshakes(variant: str, implied: int) -> None:
    """The first entries are for programs whose flags lie elsewhere (``builders.registry``), which these are not."""
    program = build(all_reduce([8] * 3, SUM), variant)
    # One overwrites results that a slow peer may still pull, the other one's peers push into slots still in use.
    others = [build(all_gather([900] * 3), "b2b", Transport.STAGED), build(reduce_scatter([400] * 3, SUM), "b2b")]
    assert all(accepts(program, other) for other in others)
    handshakes = [place for place in places(program, Wait) if not begins_own_part(program, place)]
    broken = [without_flag(program, place) for place in handshakes]
    assert sum(all(accepts(one, other) for other in others) for one in broken) == implied


SEEDED = {
    "no entry handshake": gather(without(GATHER, "signal rank 1 flag 0 set epoch", "wait flag 0 >= epoch")),
    "no exit handshake": gather(without(GATHER, "signal rank 1 flag 2 set epoch", "wait flag 2 >= epoch")),
    "missing signal": gather(without(GATHER, "signal rank 1 flag 2 set epoch")),
    "wrong flag": gather(replace(GATHER, "signal rank 1 flag 2 set epoch", "signal rank 1 flag 5 set epoch")),
    "wrong offset": gather(
        replace(GATHER, "copy output@0[8:16] <- input@1[0:8]", "copy output@0[7:15] <- input@1[0:8]")
    ),
    "cycle": nothing(3, CYCLE),
    "lost signal": nothing(2, RESET_BARRIER),
    "equal epochs": nothing(2, EPOCH_BARRIER.replace(">=", "==")),
}


@pytest.mark.parametrize("mistake", SEEDED)
def test_seeded_mistakes_can_be_made_to_fail(mistake: str) -> None:
    assert not accepts(SEEDED[mistake])
    assert failure((SEEDED[mistake],) * 4, range(100))


def test_a_wait_may_ask_for_equality_where_ranks_cannot_run_ahead() -> None:
    """The handshakes of the builders keep the next signal back until the last one was seen, so all of these hold."""
    for collective in collectives(2):
        for program in built(collective):
            for q, c in places(program, Wait):
                wait = program.queues[q].commands[c]
                equal = replaced(program, (q, c), Wait(wait.flag, wait.value, Comparison.EQ))
                assert accepts(equal)


def test_a_signal_that_lies_about_its_epoch() -> None:
    """One epoch too high frees the wait of the next invocation, one too low never frees its own."""
    program = build(all_gather((8, 8)), "b2b")
    for q, c in places(program, Signal):
        signal = program.queues[q].commands[c]
        for base in (-1, 1):
            value = type(signal.value)(base, 1)
            assert not accepts(replaced(program, (q, c), Signal(signal.flag, value, signal.op)))


def _copies(program: Program) -> Iterator[tuple[tuple[int, int], Copy]]:
    for q, c in places(program, Copy):
        yield (q, c), program.queues[q].commands[c]

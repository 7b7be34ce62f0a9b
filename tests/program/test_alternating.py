"""The proof of programs that follow each other, tried on those that alternate (tests/common/alternating.py)."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from alternating import Alternation, alternating, alternation, flags_of, staging_of
from marks import long
from test_verify_builders import make
from test_verify_pairs import with_flags_behind

from sidelane.errors import ProgramError
from sidelane.program.builders import Transport, build
from sidelane.program.collective import (
    REDUCING,
    Buffer,
    Collective,
    Kind,
    Span,
    all_gather,
    all_to_all,
    broadcast,
    gather,
    scatter,
)
from sidelane.program.ir import EPOCH, Command, Copy, EngineKind, Flag, Program, Signal, Wait, has_epochs
from sidelane.program.transform import freeze
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch

MOVING = tuple(kind for kind in Kind if kind not in REDUCING)
IN_PLACE = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST)
SLOT = 1024
ORDINARY_FLAGS, ORDINARY_STAGING = 200, 1 << 20
RANKS = (2, 3, 4, 5, 8)


def moved(program: Program, flag_set: int, slots: int) -> Program:
    """The program with flags and slots where a communicator puts them."""

    def span(old: Span) -> Span:
        if old.buffer is not Buffer.STAGING:
            return old
        return dataclasses.replace(old, offset=old.offset + ORDINARY_STAGING + slots * staging_of(SLOT))

    def command(old: Command) -> Command:
        return Copy(span(old.dst), span(old.src)) if isinstance(old, Copy) else old

    queues = tuple(dataclasses.replace(q, commands=tuple(map(command, q.commands))) for q in program.queues)
    staging = (ORDINARY_STAGING + 2 * staging_of(SLOT),) * program.world_size
    program = dataclasses.replace(program, queues=queues, staging_bytes=staging)
    return with_flags_behind(program, ORDINARY_FLAGS + flag_set * flags_of(program.world_size))


def placed(made: Alternation, flag_set: int, slots: int) -> list[Program]:
    """Turn 0, turn 1 and the opening, if there is one."""
    opening = [] if made.opening is None else [made.opening]
    return [moved(program, flag_set, slots) for program in (*made.turns, *opening)]


def eager(collective: Collective) -> list[Program]:
    return placed(alternation(collective, frozen=False, slot_bytes=SLOT), 0, 0)


def captured(collective: Collective) -> list[Program]:
    return placed(alternation(collective, frozen=True, slot_bytes=SLOT), 1, 1)


def collectives(n: int) -> list[Collective]:
    """Every kind, in and out of place, even and uneven, with ranks that send nothing, and nothing at all."""
    sizes = itertools.cycle((3, 1, 6))
    found = [make(kind, n, next(sizes), kind in IN_PLACE and place) for kind in MOVING for place in (False, True)]
    lonely = [[7 if (i, j) == (0, n - 1) else 0 for j in range(n)] for i in range(n)]
    left = [all_to_all([[5] * n] * n, copies_own=False)]
    found += [all_gather([40] * n, in_place=True), all_to_all(lonely), all_gather([0] * n)]
    return list(dict.fromkeys([*found, *left]))


def ordinary(n: int) -> list[Program]:
    """Programs with both handshakes."""
    result = []
    for kind, in_place in itertools.product(Kind, (False, True)):
        if in_place and kind in (Kind.SCATTER, Kind.GATHER):
            continue
        staged = kind is Kind.ALL_TO_ALL and in_place
        result.append(build(make(kind, n, 3, in_place), "b2b", Transport.STAGED if staged else Transport.PUSH))
    return result


def commands(program: Program, rank: int) -> list[Command]:
    return [command for queue in program.queues_of(rank) for command in queue.commands]


# --- shape ------------------------------------------------------------------------------------------------------------


def test_a_turn_has_one_handshake_and_the_own_part_stays():
    n = 4
    program = alternating(all_gather([8] * n, in_place=True), 1, slot_bytes=SLOT)
    for rank in range(n):
        own = Span(rank, Buffer.OUTPUT, 8 * rank, 8)
        moving, aside = program.queues_of(rank)
        found = moving.commands
        assert found[0] == Copy(Span(rank, Buffer.STAGING, SLOT, 8), own)
        assert [type(command) for command in found[1:]] == [Signal] * 3 + [Wait] * 3 + [Signal] + [Copy] * 3
        pulled = [command.src.rank for command in found if isinstance(command, Copy)][1:]
        spare = Copy(Span(rank, Buffer.STAGING, 2 * SLOT, 8), Span(rank, Buffer.STAGING, SLOT, 8))
        assert aside.commands == (Wait(Flag(rank, 3 * n), EPOCH), spare), (
            "a copy that keeps the pulls and the next apart"
        )
        assert pulled == [(rank + step) % n for step in (1, 2, 3)], "in rotated order"
    assert program.remote_buffers() == {Buffer.STAGING}, "nothing of the caller's has to be symmetric"


def test_the_own_part_is_copied_beside_the_pulls():
    pulls, own = alternating(all_gather([8] * 3), 0).queues_of(0)
    assert [type(command) for command in pulls.commands] == [Copy, *[Signal] * 2, *[Wait] * 2, Signal, Copy, Copy]
    assert own.engine.kind is EngineKind.LOCAL and [type(command) for command in own.commands] == [Wait, Copy]
    assert pulls.commands[5].flag == own.commands[0].flag


def test_an_opening_has_another_handshake_in_front():
    program = alternating(all_gather([8] * 3, in_place=True), 0, opening=True)
    kinds, moving = [Signal, Signal, Wait, Wait], program.queues_of(1)[0].commands
    assert [type(command) for command in moving] == [*kinds, Copy, *kinds, Signal, Copy, Copy]
    flags = [command.flag for command in moving if isinstance(command, Wait)]
    assert len(set(flags)) == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_in_graphs_flags_are_reset_beside_the_pulls(in_place: bool):
    n, large = 3, 1000
    program = alternating(all_gather([large] * n, in_place=in_place), 0, frozen=True)
    for rank in range(n):
        moving, aside = program.queues_of(rank)
        waited = [command.flag for command in moving.commands if isinstance(command, Wait)]
        assert not any(isinstance(c, Signal) and c.flag in waited for c in moving.commands)
        assert [c.flag for c in aside.commands[-2:]] == waited, "the resets, behind the own part"
        assert [type(c) for c in aside.commands[:-2]] == [Wait, Signal, *[Copy] * (not in_place)]


def test_the_resets_of_an_entry_handshake_are_in_a_hurry():
    """Its next signal may come before this rank has signalled anything else: in the graph of one call, replayed."""
    program = alternating(all_gather([8] * 3), 0, opening=True, frozen=True)
    entries = program.queues_of(1)[0].commands[:6]
    assert [type(command) for command in entries] == [Signal, Signal, Wait, Signal, Wait, Signal]

    def late(program: Program) -> Program:
        queues = []
        for queue in program.queues:
            resets = [queue.commands[3], queue.commands[5]] if queue.engine.kind is EngineKind.DMA else []
            others = [command for command in queue.commands if command not in resets]
            queues.append(dataclasses.replace(queue, commands=(*others, *resets)))
        return dataclasses.replace(program, queues=tuple(queues))

    verify(program)
    with pytest.raises(ProgramError, match="lost signal"):
        verify(late(program))


def test_all_that_a_rank_sends_is_staged_by_one_copy():
    counts = [[1, 2, 3], [2, 5, 0], [3, 0, 4]]
    program = alternating(all_to_all(counts, in_place=True), 0)
    assert commands(program, 1)[0] == Copy(Span(1, Buffer.STAGING, 0, 2), Span(1, Buffer.OUTPUT, 0, 2))
    assert commands(program, 0)[0] == Copy(Span(0, Buffer.STAGING, 1, 5), Span(0, Buffer.OUTPUT, 1, 5))


def test_every_rank_signals_every_other_one_whatever_it_sends():
    for collective in (gather([8] * 4, 2), broadcast(8, 4, 1), all_gather([0, 0, 5, 0]), all_gather([0] * 4)):
        for rank in range(4):
            found = alternating(collective, 0).queues_of(rank)[0].commands
            assert {c.flag.rank for c in found if isinstance(c, Signal)} - {rank} == set(range(4)) - {rank}
            assert sum(isinstance(c, Wait) for c in found) == 3


def test_one_rank_alone_copies_or_does_nothing():
    assert commands(alternating(all_gather([8]), 1), 0) == [
        Copy(Span(0, Buffer.OUTPUT, 0, 8), Span(0, Buffer.INPUT, 0, 8))
    ]
    assert alternating(all_gather([8], in_place=True), 0).queues == ()
    assert alternating(all_gather([8]), 0).staging_bytes == (0,)


def test_what_cannot_take_turns_is_refused():
    with pytest.raises(ValueError, match=r"sends in all_gather \(value=9, allowed=\.\.8\)"):
        alternating(all_gather([1, 9]), 0, slot_bytes=8)
    alternating(all_gather([8, 8]), 0, slot_bytes=8)
    alternating(gather([99, 8], 0), 0, slot_bytes=8)  # the root sends nothing
    with pytest.raises(ValueError, match="turn"):
        alternating(all_gather([1, 9]), 2)
    with pytest.raises(ValueError, match="only move bytes"):
        alternating(make(Kind.ALL_REDUCE, 2, 1, False), 0)


# --- proof ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, *RANKS])
def test_every_alternation_is_accepted(n: int):
    for collective in collectives(n):
        for frozen in (False, True):
            made = alternation(collective, frozen=frozen, slot_bytes=SLOT)
            assert all(has_epochs(program) is not frozen for program in made.turns if program.queues and n > 1)
            made.verify()


@pytest.mark.parametrize("n", [2, long(3), 4])
def test_every_two_calls_take_turns(n: int):
    """Whatever the first and the second are: (A in turn 0, B in turn 1), over and over."""
    pairs = list(itertools.product(collectives(n), repeat=2))
    assert len(pairs) > 60
    for first, second in pairs if n < 4 else pairs[::3]:
        verify_sequence((eager(first)[0], eager(second)[1]))


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("seed", range(3))
def test_any_calls_in_turn(n: int, seed: int):
    """Different kinds and sizes."""
    draw = random.Random(seed)
    pool = collectives(n)
    calls = [eager(draw.choice(pool))[call % 2] for call in range(8)]
    verify_sequence(calls, rounds=2)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("form", [eager, captured])
def test_one_turn_twice_is_refused(n: int, turn: int, form):
    first, second = form(all_gather([8] * n))[turn], form(all_to_all([[4] * n] * n, in_place=True))[turn]
    for sequence in ((first,), (first, second), (first, form(all_gather([8] * n))[1 - turn], second)):
        with pytest.raises(ProgramError, match="race on staging|lost signal"):
            verify_sequence(sequence)
    with pytest.raises(ProgramError):
        verify(first)


@pytest.mark.parametrize("n", [2, 5])
def test_what_is_refused_is_the_slot_that_a_peer_still_reads(n: int):
    with pytest.raises(ProgramError, match=r"race on staging@0.*nothing orders.*copy output@\d.*<- staging@0"):
        verify(alternating(all_gather([8] * n), 0))


def test_signals_only_where_bytes_go_are_not_enough():
    """The root of a gather alone would hear from the others: they would write into slots that it still reads."""
    collective = gather([8] * 3, 0)

    def kept(rank: int, command: Command) -> bool:
        if isinstance(command, Signal):
            return command.flag.rank == 0
        return not isinstance(command, Wait) or rank == 0

    def stripped(program: Program) -> Program:
        queues = [
            dataclasses.replace(queue, commands=tuple(c for c in queue.commands if kept(queue.rank, c)))
            for queue in program.queues
        ]
        return dataclasses.replace(program, queues=tuple(queues))

    even, odd = (alternating(collective, turn) for turn in (0, 1))
    verify_sequence((even, odd))
    with pytest.raises(ProgramError, match="race on staging"):
        verify_sequence((stripped(even), stripped(odd)))


def test_a_signal_before_the_copy_is_refused():
    def hasty(program: Program) -> Program:
        queues = [
            dataclasses.replace(queue, commands=(*queue.commands[1:3], queue.commands[0], *queue.commands[3:]))
            for queue in program.queues
        ]
        return dataclasses.replace(program, queues=tuple(queues))

    with pytest.raises(ProgramError, match="race on staging"):
        verify_sequence([hasty(alternating(all_gather([8] * 3), turn)) for turn in (0, 1)])


def test_frozen_turns_need_flags_of_their_own():
    """Slots that alternate do not help a flag that is signalled again before it was reset."""
    even, odd = alternation(all_gather([8] * 3), frozen=True, slot_bytes=SLOT).turns
    same_flags = with_flags_behind(odd, -3)
    verify_sequence((even, odd))
    with pytest.raises(ProgramError, match="lost signal"):
        verify_sequence((even, same_flags))


@pytest.mark.parametrize("n", RANKS)
def test_other_programs_may_come_between(n: int):
    """They have both handshakes, other flags and other staging, and do not count as a turn."""
    others, pool = ordinary(n), collectives(n)
    frozen = [with_flags_behind(freeze(program), 100) for program in others]
    for number, (other, frozen_other) in enumerate(zip(others, frozen, strict=True)):
        a, b = pool[number % len(pool)], pool[(number + 5) % len(pool)]
        verify_sequence((eager(a)[0], other, eager(b)[1], frozen_other), rounds=2)
        verify_sequence((other, eager(a)[0], eager(b)[1]), rounds=2)
        if n < 5:  # queues that do not hang behind the caller
            verify_sequence((eager(a)[0], prelaunch(other), eager(b)[1]), rounds=2)
        if n < 8:
            verify_sequence((captured(a)[2], frozen_other, captured(b)[1], other), rounds=2)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5])
def test_graphs_are_replayed(n: int, calls: int):
    """An opening, then turns 1, 0, 1 ...: any number of calls, over and over."""
    pool = collectives(n)
    graph = [captured(pool[call % len(pool)])[2 if call == 0 else call % 2] for call in range(calls)]
    verify_sequence(graph, rounds=3 if n < 8 else 2)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_graphs_follow_each_other_with_eager_calls_between(n: int):
    pool = itertools.cycle(collectives(n))
    sequence: list[Program] = []
    turns = itertools.cycle((0, 1))
    for calls in (1, 2, 1, 3, 2):
        sequence += [captured(next(pool))[2 if call == 0 else call % 2] for call in range(calls)]
        sequence += [eager(next(pool))[next(turns)] for _ in range(calls % 2 + 1)]
    verify_sequence(sequence, rounds=2)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_graph_of_an_odd_number_of_calls_needs_its_opening(calls: int):
    programs = captured(all_gather([8] * 3))
    with pytest.raises(ProgramError, match="race on staging|lost signal"):
        verify_sequence([programs[call % 2] for call in range(calls)])
    verify_sequence([programs[2], *(programs[call % 2] for call in range(1, calls))])


def test_graphs_and_eager_calls_need_slots_of_their_own():
    """A replay between two eager calls that used the same slots would take a turn that it knows nothing of."""
    collective = all_gather([8] * 3)
    even, odd = eager(collective)
    made = alternation(collective, frozen=True, slot_bytes=SLOT)
    apart, shared = captured(collective)[2], placed(made, 2, 0)[2]
    verify_sequence((even, odd, even, apart, odd))
    verify_sequence((even, odd, apart))
    with pytest.raises(ProgramError, match="race on staging"):
        verify_sequence((odd, shared, even, odd, even, odd))


def test_scatter_and_broadcast_from_every_root():
    for root in range(4):
        calls = (scatter([4] * 4, root), broadcast(9, 4, (root + 1) % 4, in_place=True))
        verify_sequence((eager(calls[0])[0], eager(calls[1])[1], eager(calls[1])[0], eager(calls[0])[1]))

"""Programs of one communicator share flags and staging: every pair of them survives ranks running ahead.

A pair (A, B) is verified as A B A B A B, so that B follows A and A follows B, on fresh flags and on used ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from marks import long
from test_verify_builders import make

from sidelane.collectives.prepare import FLAGS
from sidelane.errors import ProgramError
from sidelane.program.builders import Transport, build, variants
from sidelane.program.builders.reducing import reduce
from sidelane.program.builders.relay import relay
from sidelane.program.collective import REDUCING, Kind, ReduceOp, Reduction, all_reduce, broadcast, reduce_scatter
from sidelane.program.ir import Command, Copy, Flag, Program, Signal, Wait
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch

SUM = Reduction(ReduceOp.SUM, "int32")
SIZES = (3, 1, 6)  # elements of a part, give or take one: 0 and odd ones among them


def pool(n: int) -> list[Program]:
    """What executors with nothing but ``Copy`` get: kinds x variants x transports x in place, sizes in turn."""
    sizes = itertools.cycle(SIZES)
    result: dict[Program, None] = {}
    for kind, in_place in itertools.product(Kind, (False, True)):
        if in_place and kind in (Kind.SCATTER, Kind.GATHER):
            continue
        transports = [Transport.PUSH] if kind in REDUCING else list(Transport)
        for variant, transport in itertools.product(variants(kind), transports):
            try:
                program = build(make(kind, n, next(sizes), in_place), variant, transport)
            except ValueError:
                continue  # no such variant with this transport
            result[lower(program, {Copy})] = None
    return list(result)


def check_pairs(first: Sequence[Program], second: Sequence[Program] | None = None) -> int:
    """Verify every pair of ``first`` (with itself, too), or of one of ``first`` and one of ``second``."""
    both = itertools.product(first, second) if second else itertools.combinations_with_replacement(first, 2)
    count = 0
    for count, pair in enumerate(both, start=1):  # noqa: B007
        verify_sequence(pair)
    return count


def with_flags_behind(program: Program, offset: int) -> Program:
    """The same program with its flags ``offset`` further up, as frozen programs have them in a communicator."""

    def moved(command: Command) -> Command:
        if isinstance(command, Signal | Wait):
            return dataclasses.replace(command, flag=Flag(command.flag.rank, command.flag.index + offset))
        return command

    queues = tuple(dataclasses.replace(q, commands=tuple(map(moved, q.commands))) for q in program.queues)
    return dataclasses.replace(program, queues=queues, flag_count=program.flag_count + offset)


@pytest.mark.parametrize("n", [2, long(3)])
def test_every_pair(n: int) -> None:
    programs = pool(n)
    assert len(programs) > 30
    assert check_pairs(programs) == len(programs) * (len(programs) + 1) // 2


def test_pairs_of_four_ranks() -> None:
    """As the communicator makes them by default."""
    programs = [program for program in pool(4) if program.variant == "b2b"]
    assert {program.collective.kind for program in programs} == set(Kind)
    check_pairs(programs)


def test_pairs_of_eight_ranks() -> None:
    """One of each kind."""
    check_pairs(list({program.collective.kind: program for program in pool(8) if program.variant == "b2b"}.values()))


@pytest.mark.parametrize("n", [2, 3])
def test_pairs_with_prelaunched_programs(n: int) -> None:
    """Their queues do not hang behind the caller: only triggers and handshakes hold them."""
    programs = pool(n)
    check_pairs([prelaunch(program) for program in programs[::7]], programs[::2])


@pytest.mark.parametrize("n", [3, 4])
def test_pairs_with_programs_in_pieces(n: int) -> None:
    """Their flags of later phases lie where other programs have local ones, which a rank that is late may yet write."""
    large = [1 << 14] * n
    pieces = (2, 1)
    in_pieces = [
        *(relay(broadcast(1 << 14, n, root), rounds=2) for root in range(n)),
        reduce(reduce_scatter(large, SUM), "b2b", pieces=pieces),
        *(
            reduce(all_reduce(large, SUM), "pcpy", transport, pieces)
            for transport in (Transport.PUSH, Transport.STAGED)
        ),
    ]
    check_pairs(in_pieces)
    others = {(program.collective.kind, program.variant): program for program in pool(n)}
    check_pairs([form for program in others.values() for form in (program, prelaunch(program))], in_pieces)


@pytest.mark.parametrize("n", [long(2), 3])
def test_pairs_of_captured_programs(n: int) -> None:
    """Frozen programs share flags among themselves, and staging with those of eager calls."""
    programs = pool(n)
    frozen = [freeze(program) for program in programs[::3]]
    check_pairs(frozen)
    check_pairs([with_flags_behind(program, FLAGS) for program in frozen[::2]], programs[1::3])


def test_a_pair_can_be_refused_whose_programs_are_right() -> None:
    """Why frozen programs have flags of their own: an epoch, which nobody resets, looks like a raised flag."""
    eager = build(make(Kind.ALL_GATHER, 3, 3, False), "b2b")
    frozen = freeze(eager)
    verify(eager)
    verify(frozen)
    with pytest.raises(ProgramError, match="flag 0 of rank 1 changes by 1 an epoch here, and by 0 in rank 0"):
        verify_sequence((eager, frozen))
    verify_sequence((eager, with_flags_behind(frozen, eager.flag_count)))

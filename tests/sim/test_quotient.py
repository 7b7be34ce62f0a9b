"""Proofs by the ranks that stand for all others: the verdicts of ``verify`` on the programs that moves make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from marks import long

from sidelane.errors import ProgramError
from sidelane.program.collective import Kind
from sidelane.program.ir import Command, Copy, Flag, Program, Reduce, Signal, Wait
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named
from sidelane_lab.sim.action import Action, AsymmetryError, act
from sidelane_lab.sim.quotient import prove
from sidelane_lab.studies import nodes as study

RINGED = [kind for kind in Kind if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL)]
WAYS = [(way, kind) for kind in RINGED for way in ("hierarchical", "flat")] + [("tree", Kind.ALL_REDUCE)]


def cluster(nodes: int, gpus: int = 8):
    return dataclasses.replace(named("h100x8x2"), nodes=nodes, gpus=gpus)


def symmetric(nodes: int, way: str, kind: Kind, nbytes: int, pieces: int, gpus: int = 8) -> tuple[Program, Action]:
    by_place = way != "hierarchical" or kind is not Kind.REDUCE_SCATTER
    return study.symmetric(cluster(nodes, gpus), kind, nbytes, way, pieces, alike=by_place)


def cases() -> Iterator[object]:
    for way, kind in WAYS:
        for nodes, gpus in ((2, 4), (4, 4), (8, 8)):
            if way == "hierarchical" or nodes * gpus < 64 or kind is Kind.ALL_TO_ALL:
                yield (
                    long(way, kind, nodes, gpus)
                    if nodes == 8 or (nodes, way) == (4, "flat")
                    else (
                        way,
                        kind,
                        nodes,
                        gpus,
                    )
                )


@pytest.mark.parametrize(("way", "kind", "nodes", "gpus"), list(cases()), ids=str)
def test_moves_make_the_program_of_all_ranks_and_both_proofs_accept_it(way, kind, nodes, gpus):
    """Rank by rank, what is built for it is what the moves make; the library proves that it is right."""
    for pieces in (1, 4) if way == "hierarchical" else (0,):
        program, moves = symmetric(nodes, way, kind, 1 << 20, pieces, gpus)
        by_place = way != "hierarchical" or kind is not Kind.REDUCE_SCATTER
        for element in range(moves.size):
            along, across = divmod(element, moves.across)
            by = along * moves.fold.nodes, across * moves.fold.places
            image = study._build(cluster(nodes, gpus), kind, 1 << 20, way, pieces, moved=by, alike=by_place)
            moves.compare(program, image.program, element)
        assert prove(program, moves) > 0
        everyone = moves.expand(program)
        assert {queue.rank for queue in everyone.queues} == set(range(nodes * gpus))
        assert verify(everyone).commands == sum(len(queue.commands) for queue in everyone.queues)


def mutants(program: Program, moves: Action) -> Iterator[tuple[str, Program]]:
    """Mistakes in one queue of each kind of engine, first and last of each: all ranks make them alike."""
    for number, queue in enumerate(program.queues):

        def put(*commands: Command, number: int = number) -> Program:
            queues = list(program.queues)
            queues[number] = dataclasses.replace(queues[number], commands=commands)
            return dataclasses.replace(program, queues=tuple(queues))

        before = queue.commands
        for kind in (Wait, Signal, Copy, Reduce):
            places = [at for at, command in enumerate(before) if isinstance(command, kind)]
            for at in {*places[:1], *places[-1:]}:
                rest, command = before[at + 1 :], before[at]
                yield f"without {kind.__name__} {at}", put(*before[:at], *rest)
                if isinstance(command, Signal):
                    ranks = moves.fold.machine.world_size
                    flag = Flag((command.flag.rank + moves.fold.machine.gpus) % ranks, command.flag.index)
                    yield (
                        f"signal {at} to another rank",
                        put(*before[:at], dataclasses.replace(command, flag=flag), *rest),
                    )
                    yield f"signal {at} at the end", put(*before[:at], *rest, command)
                    yield f"signal {at} first", put(command, *before[:at], *rest)
                if isinstance(command, Wait):
                    yield f"wait {at} first", put(command, *before[:at], *rest)
                    yield f"wait {at} at the end", put(*before[:at], *rest, command)
                if isinstance(command, Copy):
                    for which in ("dst", "src"):
                        span = getattr(command, which)
                        for other in before:
                            found = getattr(other, which, None) if isinstance(other, Copy) else None
                            if found is not None and found != span and found.nbytes == span.nbytes:
                                wrong = dataclasses.replace(command, **{which: found})
                                yield f"{which} of copy {at} moved", put(*before[:at], wrong, *rest)
                                break
                        rank = (span.rank + moves.fold.machine.gpus) % moves.fold.machine.world_size
                        wrong = dataclasses.replace(command, **{which: dataclasses.replace(span, rank=rank)})
                        yield f"{which} of copy {at} of another rank", put(*before[:at], wrong, *rest)


def verdict(check) -> str:
    try:
        check()
    except ProgramError as error:
        return str(error).split("\n")[1].strip().split(" ")[0] if "\n" in str(error) else "refused"
    return "accepted"


@pytest.mark.parametrize(
    ("way", "kind", "nodes", "gpus"),
    [(way, kind, 2, 2) if kind is Kind.ALL_REDUCE else long(way, kind, 2, 2) for way, kind in WAYS]
    + [long(way, kind, 4, 4) for way, kind in WAYS],
    ids=str,
)
def test_both_proofs_refuse_the_same_mistakes(way, kind, nodes, gpus):
    program, moves = symmetric(nodes, way, kind, 1 << 16, 2, gpus)
    refused = 0
    for name, mutant in mutants(program, moves):
        try:
            everyone = moves.expand(mutant)
        except AsymmetryError:
            continue
        verdicts = [verdict(lambda: prove(mutant, moves)), verdict(lambda: verify(everyone))]  # noqa: B023
        assert len({each == "accepted" for each in verdicts}) == 1, (name, verdicts)
        refused += verdicts[0] != "accepted"
    assert refused >= 8


def test_a_wait_in_a_circle_of_ranks_is_a_deadlock():
    program, moves = symmetric(4, "flat", Kind.ALL_GATHER, 1 << 16, 0, 4)
    queues = []
    for queue in program.queues:
        tells = next(n for n, command in enumerate(queue.commands) if isinstance(command, Signal))
        commands = [*queue.commands]
        if any(isinstance(command, Copy) for command in commands):
            commands[tells], commands[tells + 1] = commands[tells + 1], commands[tells]  # waits before it tells
        queues.append(dataclasses.replace(queue, commands=tuple(commands)))
    mutant = dataclasses.replace(program, queues=tuple(queues))
    for check in (lambda: prove(mutant, moves), lambda: verify(moves.expand(mutant))):
        with pytest.raises(ProgramError, match="deadlock"):
            check()


def test_programs_that_are_not_alike_are_refused():
    program, moves = symmetric(4, "flat", Kind.ALL_GATHER, 1 << 16, 0, 4)
    other, _ = symmetric(4, "flat", Kind.ALL_GATHER, 1 << 17, 0, 4)
    with pytest.raises(AsymmetryError, match="moves: "):
        act(lambda by: other if any(by) else program, moves.fold)
    with pytest.raises(AsymmetryError, match="no rank stands"):
        symmetric(4, "hierarchical", Kind.BROADCAST, 1 << 16, 1, 4)


@pytest.mark.long
@pytest.mark.parametrize(("way", "kind"), WAYS, ids=str)
def test_large_groups_are_proved_at_their_own_size(way, kind):
    program, moves = symmetric(64, way, kind, 1 << 24, 2)
    assert moves.fold.machine.world_size == 512 and prove(program, moves) > 0

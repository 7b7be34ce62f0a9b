"""The program that takes parts of a GEMM to their ranks as they are finished: proved, and its mistakes refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from sidelane.errors import ProgramError
from sidelane.program.ir import Command, Copy, EngineKind, Program, Signal, Wait
from sidelane.program.pieces import arriving_program, coming, gathering_program, going, row_slices, split_program
from sidelane.program.transform import arrivals_of, freeze, triggers_of
from sidelane.program.verify import verify

TABLES = ([[3]], [[2, 3], [1, 0]], [[0, 5, 1], [2, 2, 0], [0, 1, 4]], [[2] * 4] * 4, [[0, 0], [7, 0]])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_it_is_proved(table: list[list[int]], pieces: int) -> None:
    program = split_program(table, pieces, 8, 20)
    verify(program)
    verify(freeze(program))  # that of graphs
    for rank, row in enumerate(table):
        parts = going(table, rank, pieces)
        assert len(triggers_of(program, rank)) == len(parts)
        computed = sorted(number for part in parts for number in range(part.start, part.stop))
        first = sum(row[:rank])
        assert computed == [number for number in range(sum(row)) if not first <= number < first + row[rank]]


MISTAKES = {
    "copies do not wait for what is computed": lambda command, most, n: (
        isinstance(command, Wait) and command.flag.index < most
    ),
    "nobody asks whether an output is free": lambda command, most, n: (
        isinstance(command, Wait) and most <= command.flag.index < most + n
    ),
    "nobody waits for what comes": lambda command, most, n: (
        isinstance(command, Wait) and command.flag.index >= most + n
    ),
    "nobody says that his output is free": lambda command, most, n: (
        isinstance(command, Signal) and most <= command.flag.index < most + n
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: str) -> None:
    table, pieces = TABLES[2], 2
    right = split_program(table, pieces, 8, 20)
    most, n = (len(table) - 1) * pieces, len(table)
    is_wrong: Callable[[Command, int, int], bool] = MISTAKES[mistake]
    for form in (right, freeze(right)):
        with pytest.raises(ProgramError):
            verify(without(form, lambda command: is_wrong(command, most, n)))


def test_a_part_that_is_left_out_is_refused() -> None:
    right = split_program(TABLES[1], 2, 8, 20)
    copies = [c for q in right.queues if q.engine.kind is EngineKind.DMA for c in q.commands if hasattr(c, "src")]
    for copy in copies:
        with pytest.raises(ProgramError):
            verify(without(right, lambda command, copy=copy: command == copy))  # type: ignore[misc]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_arriving_parts_are_proved_and_are_all_that_leaves(table: list[list[int]], pieces: int) -> None:
    program = arriving_program(table, pieces, 8, 20)
    verify(program)
    verify(freeze(program))  # that of graphs
    assert rows_that_travel(program) == rows_that_travel(split_program(table, pieces, 8, 20))
    for rank in range(len(table)):
        came = coming(table, rank, pieces)
        assert len(arrivals_of(program, rank)) == len(came)
        first = sum(row[rank] for row in table[:rank])
        mine = range(first, first + table[rank][rank])
        found = sorted(number for part in came for number in range(part.start, part.stop))
        assert found == [number for number in range(sum(row[rank] for row in table)) if number not in mine]


def rows_that_travel(program: Program) -> set[tuple[int, int, int, int, int]]:
    copies = [c for q in program.queues if q.engine.kind is EngineKind.DMA for c in q.commands if isinstance(c, Copy)]
    found = [(c.src.rank, c.src.offset, c.dst.rank, c.dst.offset, c.src.nbytes) for c in copies]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gathers_in_parts_are_proved(n: int) -> None:
    for pieces in (1, 2, 7):
        program = gathering_program(n, 5, pieces, 8)
        verify(program)
        verify(freeze(program))
        assert [len(arrivals_of(program, rank)) for rank in range(n)] == [(n - 1) * len(row_slices(5, pieces))] * n


@pytest.mark.parametrize("program", [arriving_program(TABLES[2], 2, 8, 20), gathering_program(3, 5, 2, 8)])
def test_arrivals_with_mistakes_are_refused(program: Program) -> None:
    used = sorted({c.flag.index for q in program.queues for c in q.commands if isinstance(c, Signal | Wait)})
    refused = 0
    for form, kind, flag, callers in itertools.product((program, freeze(program)), (Signal, Wait), used, (False, True)):
        wrong = without(form, of_flag(kind, flag), callers=callers)
        if wrong != form:
            refused += 1
            with pytest.raises(ProgramError):
                verify(wrong)
    assert refused > 2 * len(used)


def of_flag(kind: type[Signal] | type[Wait], index: int) -> Callable[[Command], bool]:
    """True for a command of that kind on that flag."""
    return lambda command: isinstance(command, kind) and command.flag.index == index


def without(program: Program, left_out: Callable[[Command], bool], *, callers: bool = False) -> Program:
    """Commands of the copy engines, or of callers, left out."""
    queues = [
        dataclasses.replace(queue, commands=tuple(itertools.filterfalse(left_out, queue.commands)))
        if (queue.engine.kind is EngineKind.CALLER) == callers
        else queue
        for queue in program.queues
    ]
    return dataclasses.replace(program, queues=tuple(queues))

"""The program that takes parts of a GEMM to their ranks as they are finished: proved, and its mistakes refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from sidelane.errors import ProgramError
from sidelane.program.ir import Command, Copy, EngineKind, Program, Signal, Wait
from sidelane.program.pieces import going, numbers_of, part_program, rows_of, split_program, turn_program
from sidelane.program.transform import freeze
from sidelane.program.transform.triggers import triggers_of
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
def test_single_parts_are_proved_and_are_all_that_leaves(table: list[list[int]], pieces: int) -> None:
    copies = []
    for number in numbers_of(table, pieces):
        program = part_program(table, pieces, number, 8, 20)
        verify(program)
        copies += [(c.dst, c.src) for q in program.queues for c in q.commands if isinstance(c, Copy)]
    whole = split_program(table, pieces, 8, 20)
    assert set(copies) == {
        (c.dst, c.src)
        for q in whole.queues
        if q.engine.kind is EngineKind.DMA
        for c in q.commands
        if isinstance(c, Copy)
    }
    assert len(copies) == len(set(copies))
    for rank in range(len(table)):
        rows = [rows_of(table, rank, pieces, number) for number in numbers_of(table, pieces)]
        assert [part for part in rows if part is not None] == going(table, rank, pieces)


def test_single_parts_with_mistakes_are_refused() -> None:
    table, pieces = TABLES[2], 2
    for number in numbers_of(table, pieces):
        right = part_program(table, pieces, number, 8, 20)
        for kind, flag in itertools.product((Signal, Wait), range(2)):
            with pytest.raises(ProgramError):
                verify(without(right, of_flag(kind, flag)))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_turns_of_a_gather_are_proved_and_their_mistakes_refused(n: int) -> None:
    for turn, part in itertools.product(range(1, n), (slice(0, 3), slice(3, 5))):
        right = turn_program(n, turn, 5, part, 8)
        verify(right)
        for kind, flag in itertools.product((Signal, Wait), range(2)):
            with pytest.raises(ProgramError):
                verify(without(right, of_flag(kind, flag)))


def of_flag(kind: type[Signal] | type[Wait], index: int) -> Callable[[Command], bool]:
    """True for a command of that kind on that flag."""
    return lambda command: isinstance(command, kind) and command.flag.index == index


def without(program: Program, left_out: Callable[[Command], bool]) -> Program:
    """Commands of the copy engines left out."""
    queues = [
        dataclasses.replace(queue, commands=tuple(itertools.filterfalse(left_out, queue.commands)))
        if queue.engine.kind is EngineKind.DMA
        else queue
        for queue in program.queues
    ]
    return dataclasses.replace(program, queues=tuple(queues))

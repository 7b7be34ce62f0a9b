"""The protocols of fused operators are proved, back to back, and with a mistake in them they are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from contracts import map_spans
from kernel_mistakes import changed, edited, moves, signals_before_stores, without_flags
from shadows import (
    fused_combine,
    fused_dispatch_gemm,
    fused_embedding,
    fused_gemm,
    fused_gemv,
    fused_rms_norm,
    token_rows,
)

from sidelane.errors import ProgramError
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Copy, EngineKind, Flag, Program, Signal, Wait
from sidelane.program.pieces import arriving_program, coming
from sidelane.program.verify import verify_sequence

TILE = 16
Edit = Callable[[Program], Program]


def without(kind: type[Signal] | type[Wait], flags: Callable[[Flag], bool]) -> Edit:
    """Signals, or waits, of some flags left out."""
    return lambda program: changed(
        program, lambda command: None if isinstance(command, kind) and flags(command.flag) else command
    )


def without_meeting(flags: Callable[[Flag], bool]) -> Edit:
    return lambda program: without_flags(program, flags)


def arrivals_before_stores(program: Program) -> Program:
    """A block counts itself in front of what it moves, each time."""

    def change(commands: list[Command]) -> list[Command]:
        found = list(commands)
        for at, (one, other) in enumerate(itertools.pairwise(commands)):
            if moves(one) and isinstance(other, Signal):
                found[at : at + 2] = other, one
        return found

    return edited(program, change)


def one_place(program: Program, bytes_of_a_place: int) -> Program:
    """Even and odd generations share their places."""

    def change(span: Span) -> Span:
        if span.buffer == Buffer.STAGING:
            return dataclasses.replace(span, offset=span.offset % bytes_of_a_place)
        return span

    return changed(program, lambda command: map_spans(command, change))


def refuse(programs: tuple[Program, ...], mistake: str, change: Edit) -> None:
    with pytest.raises(ProgramError):
        verify_sequence([change(program) for program in programs])
        pytest.fail(f"accepted: {mistake}")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gemv_all_reduce_in_cells_is_proved(n: int) -> None:
    """With blocks of one tile and more, the last with fewer rows; of several tokens, some of which are not there."""
    for rows, each, tokens, padded in ((1, 1, 1, 1), (5, 2, 1, 1), (5, 4, 1, 1), (3, 3, 2, 4)):
        verify_sequence(fused_gemv.cells(n, rows, each, tile_rows=2, lanes=3, tokens=tokens, padded=padded))


def test_mistakes_of_gemvs_in_cells_are_refused() -> None:
    right = fused_gemv.cells(3, 5, 2, tile_rows=2, lanes=3)
    refuse(right, "a cell that is not waited for", without(Wait, lambda flag: flag.index in (6, 21)))
    refuse(right, "a rank's own cell that is not waited for", without(Wait, lambda flag: flag.index in (0, 15)))
    refuse(right, "a cell that is never sent", without(Signal, lambda flag: flag.index in (6, 21)))
    refuse(right, "a generation before its data", signals_before_stores)
    with pytest.raises(ProgramError):
        verify_sequence(right[:1])  # one place for all generations
        pytest.fail("accepted: one place")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_combine_attention_is_proved(n: int) -> None:
    """Ranks with as many heads and with one more, in one block and in several, with one and two cells behind a row."""
    for more, blocks, words, pitch in ((0, 1, 1, 2), (0, 1, 2, 4), (n, 2, 1, 2), (n + 1, 2, 2, 4), (1, 1, 3, 4)):
        verify_sequence(fused_combine.cells(n, blocks, n + more, words, pitch))


def test_mistakes_of_merged_heads_are_refused() -> None:
    right = fused_combine.cells(3, 2, 7, 1, 2)
    refuse(right, "a cell that is not waited for", without(Wait, lambda flag: flag.index in (6, 24)))
    refuse(right, "a cell that is never sent", without(Signal, lambda flag: flag.index in (6, 24)))
    refuse(right, "a generation before its data", signals_before_stores)
    with pytest.raises(ProgramError):
        verify_sequence(right[:1])  # one place for all generations
        pytest.fail("accepted: one place")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_reduce_rms_norm_is_proved(n: int) -> None:
    """In cells with one slice of a row and several, the last one shorter, with one for a block and more."""
    for rows, blocks, in_place in itertools.product((1, 3), (1, 2), (False, True)):
        verify_sequence(fused_rms_norm.pushed(n, blocks, rows, TILE, in_place=in_place))
        for words, slice_words, parts in ((2, 2, 1), (3, 1, 1), (3, 2, 1), (5, 2, 2)):
            team = -(-words // (slice_words * parts))
            options = {"slice_words": slice_words, "parts": parts, "in_place": in_place}
            verify_sequence(fused_rms_norm.cells(n, blocks * team, rows, words, **options))


def test_mistakes_of_norms_in_cells_are_refused() -> None:
    right = fused_rms_norm.cells(3, 4, 3, 3, slice_words=2, in_place=True)
    refuse(right, "a cell that is not waited for", without(Wait, lambda flag: flag.index in (10, 37)))
    refuse(right, "a cell that is never sent", without(Signal, lambda flag: flag.index in (10, 37)))
    refuse(right, "a generation before its data", signals_before_stores)
    sums, threads = fused_rms_norm.sum_flags(3, 3, 3), fused_rms_norm.loaded_flags(3, 3, 3, 2)
    for number in (sums, sums + 1, sums + 5):  # of the first row, and of the last
        refuse(right, "a sum that is not waited for", without(Wait, lambda flag, number=number: flag.index == number))
        refuse(right, "a sum that is never told", without(Signal, lambda flag, number=number: flag.index == number))
    counts = right[0].flag_count - 4
    refuse(right, "no barrier of threads", without_meeting(lambda flag: threads <= flag.index < counts))
    with pytest.raises(ProgramError):
        verify_sequence(right[:1])  # one place for all generations
        pytest.fail("accepted: one place")


def test_blocks_of_a_row_in_other_turns_wait_for_ever() -> None:
    """One begins with the last of its rows, another one with the first."""
    sums = fused_rms_norm.sum_flags(2, 2, 2)

    def change(commands: list[Command]) -> list[Command]:
        ends = [at + 2 for at, command in enumerate(commands) if isinstance(command, Wait) and ends_row(command.flag)]
        if len(ends) != 2 or not any(isinstance(c, Signal) and c.flag.index == sums + 1 for c in commands):
            return commands
        start = max(at for at, command in enumerate(commands[: ends[0]]) if is_barrier(command)) + 1
        return [*commands[:start], *commands[ends[0] : ends[1]], *commands[start : ends[0]], *commands[ends[1] :]]

    def ends_row(flag: Flag) -> bool:
        return flag.index in (sums + 1, sums + 3)

    def is_barrier(command: Command) -> bool:
        return isinstance(command, Wait) and command.flag.index >= fused_rms_norm.loaded_flags(2, 2, 2, 1)

    right = fused_rms_norm.cells(2, 2, 2, 2, slice_words=1, counts=False)
    verify_sequence(right)
    with pytest.raises(ProgramError, match="deadlock: rank 0"):
        verify_sequence([edited(program, change) for program in right])


@pytest.mark.parametrize("n", [1, 3])
def test_mistakes_of_an_early_end_are_refused(n: int) -> None:
    """What counts launches is written when all blocks have read it, and not before."""
    right = fused_rms_norm.cells(n, 2, 3, 2, slice_words=1)
    flags = right[0].flag_count - 2
    refuse(right, "a block counts itself before it has read", with_counts_first(flags))
    refuse(right, "not all are waited for", without(Wait, lambda flag: flag.index == flags))
    refuse(right, "a block that does not count itself", without(Signal, lambda flag: flag.index == flags))


def with_counts_first(flags: int) -> Edit:
    """Signals of these flags, and of those behind them, stand in front of their queues."""

    def change(commands: list[Command]) -> list[Command]:
        return sorted(commands, key=lambda c: not (isinstance(c, Signal) and c.flag.index >= flags))

    return lambda program: edited(program, change)


def test_mistakes_of_pushed_norms_are_refused() -> None:
    right = fused_rms_norm.pushed(3, 2, 5, TILE, in_place=True)
    refuse(right, "no meeting", without_meeting(lambda flag: True))
    refuse(right, "no signal", without(Signal, lambda flag: flag.index == 1))
    refuse(right, "no wait", without(Wait, lambda flag: flag.index == 1))
    refuse(right, "signals before stores", signals_before_stores)
    with pytest.raises(ProgramError, match="race on staging"):
        verify_sequence([one_place(program, 3 * 5 * TILE) for program in right])


@pytest.mark.parametrize("counts", [(2,), (1, 2), (2, 1, 1), (1, 1, 2, 1)])
def test_embedding_all_to_all_is_proved(counts: tuple[int, ...]) -> None:
    """With uneven tables and batches, and with an order of its own on each rank."""
    mixed = [rank % 2 == 0 for rank in range(len(counts))]
    for blocks, first in itertools.product((1, 3), (False, True, mixed)):
        program = fused_embedding.embedding_all_to_all(counts, blocks, 2 * len(counts) + 1, 8, remote_first=first)
        verify_sequence([program])


def test_mistakes_of_embedding_all_to_all_are_refused() -> None:
    n, counts = 3, (2, 1, 1)
    program = fused_embedding.embedding_all_to_all(counts, 3, 7, 8)
    flags = 2 * n  # behind them: arrivals of the launch
    right = (program,)
    refuse(right, "nobody says that his output is free", without_meeting(lambda flag: flag.index < n))
    refuse(right, "one rank is not waited for", without(Wait, lambda flag: flag.index == 1))
    refuse(right, "the launch does not wait for the others", without_meeting(lambda flag: n <= flag.index < flags))
    refuse(right, "done is said before all blocks have ended", without(Wait, lambda flag: flag.index == flags))
    refuse(right, "arrivals before stores", arrivals_before_stores)
    refuse(right, "a block that does not arrive", without(Signal, lambda flag: flag.index == flags))


@pytest.mark.parametrize("counts", [(2,), (1, 2), (2, 1, 1), (1, 1, 2, 1)])
def test_the_backward_of_embeddings_is_proved(counts: tuple[int, ...]) -> None:
    for blocks, rest in itertools.product((1, 3), (0, 1)):
        verify_sequence([fused_embedding.backward(counts, blocks, 2 * len(counts) + rest, 8)])


def test_mistakes_of_the_backward_of_embeddings_are_refused() -> None:
    right, flags = (fused_embedding.backward((2, 1, 1), 2, 7, 8),), 2 * 3
    for phase in range(2):
        refuse(right, f"no meeting {phase}", without_meeting(lambda flag, phase=phase: flag.index // flags == phase))
        refuse(right, f"no wait {phase}", without(Wait, lambda flag, phase=phase: flag.index // flags == phase))
    refuse(right, "signals before stores", arrivals_before_stores)


COUNTS = ([[3]], [[2, 3], [1, 0]], [[0, 5, 1], [2, 2, 0], [0, 1, 4]])


@pytest.mark.parametrize("counts", COUNTS)
def test_gemm_all_to_all_is_proved(counts: list[list[int]]) -> None:
    for number, (blocks, rows, across) in enumerate(itertools.product((1, 3), (1, 2), (1, 2))):
        verify_sequence([fused_gemm.gemm_all_to_all(counts, blocks, rows, across, 8, group=1 + number % 3)])


def test_mistakes_of_gemm_all_to_all_are_refused() -> None:
    right, n = (fused_gemm.gemm_all_to_all(COUNTS[2], 3, 2, 2, 8),), 3
    refuse(right, "nobody says that his output is free", without_meeting(lambda flag: flag.index < n))
    refuse(right, "one rank is not waited for", without(Wait, lambda flag: flag.index == 1))
    refuse(right, "the launch does not wait for the others", without_meeting(lambda flag: n <= flag.index < 2 * n))
    refuse(right, "done is said before all blocks have ended", without(Wait, lambda flag: flag.index == 2 * n))
    refuse(right, "a block that does not arrive", without(Signal, lambda flag: flag.index == 2 * n))
    refuse(right, "arrivals before stores", arrivals_before_stores)


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_that_are_copied_on_are_proved(counts: list[list[int]]) -> None:
    for number, (blocks, rows, across) in enumerate(itertools.product((1, 2, 3), (1, 2), ((1, 0), (2, 1)))):
        for copies in (False, True):
            verify_sequence(
                [
                    token_rows.exchange_rows(
                        *(counts, blocks, rows, across, 8), most_rows=8, group=1 + number % 3, copies=copies
                    )
                ]
            )
    for blocks in (1, 3):  # launches of one kernel with other columns beside, and on other numbers of units
        launches = (blocks, (2, 1), True), (1, (2, 1), False), (blocks, (2, 0), True)
        verify_sequence(
            [
                token_rows.exchange_rows(counts, units, 2, across, 8, most_rows=8, group=2, copies=copies)
                for units, across, copies in launches
            ]
        )


def test_mistakes_of_rows_that_are_copied_on_are_refused() -> None:
    right, n = (token_rows.exchange_rows(COUNTS[2], 2, 2, (1, 1), 8, most_rows=8),), 3
    refuse(right, "nobody says that his output is free", without_meeting(lambda flag: flag.index < n))
    refuse(right, "one rank is not waited for", without(Wait, lambda flag: flag.index == 1))
    refuse(right, "arrivals before stores", arrivals_before_stores)
    after = (token_rows.exchange_rows(COUNTS[2], 2, 2, (1, 1), 8, most_rows=8, copies=False),)
    refuse(after, "the launch does not wait for the others", without_meeting(lambda flag: n <= flag.index < 2 * n))
    refuse(after, "arrivals before stores", arrivals_before_stores)
    for tile in range(6):  # of the five rows of rank 0 for rank 1, and those beside
        refuse(right, f"no wait {tile}", without(Wait, lambda flag, tile=tile: flag == Flag(1, n * (1 + tile))))
        refuse(right, f"no signal {tile}", without(Signal, lambda flag, tile=tile: flag == Flag(1, n * (1 + tile))))


@pytest.mark.parametrize("counts", COUNTS)
def test_gemms_of_what_comes_by_counts_are_proved(counts: list[list[int]]) -> None:
    """Ranks that send nothing, and that get nothing; more tiles than blocks and fewer."""
    for number, (blocks, rows, across) in enumerate(itertools.product((1, 3), (1, 2), (1, 2))):
        options = {"group": 1 + number % 2, "by_one": number % 3 == 0}
        verify_sequence([fused_dispatch_gemm.all_to_all_gemm(counts, blocks, rows, across, 8, **options)])  # type: ignore[arg-type]


def test_mistakes_of_gemms_of_what_comes_by_counts_are_refused() -> None:
    n = 3
    right = (fused_dispatch_gemm.all_to_all_gemm(COUNTS[2], 2, 2, 1, 8),)
    refuse(right, "nobody says that the last launch has ended", without_meeting(lambda flag: flag.index < n))
    refuse(right, "one rank is not waited for", without(Wait, lambda flag: flag.index == 1))
    for tile in range(3):  # of the five rows of rank 0 for rank 1
        refuse(right, f"no wait {tile}", without(Wait, lambda flag, tile=tile: flag == Flag(1, n * (1 + tile))))
        refuse(right, f"no signal {tile}", without(Signal, lambda flag, tile=tile: flag == Flag(1, n * (1 + tile))))
    refuse(right, "signals before stores", arrivals_before_stores)


def test_parts_that_come_are_those_that_leave() -> None:
    """Copies of the program, and where the host looks for its rows, in the order of arrivals."""
    for counts, pieces in itertools.product(COUNTS, (1, 2, 3)):
        program = arriving_program(counts, pieces, 8, 12)
        verify_sequence([program])
        for rank in range(len(counts)):
            reads = [q.commands[-1] for q in program.queues_of(rank) if q.engine.kind is EngineKind.CALLER]
            there = [slice(copy.src.offset // 8, copy.src.end // 8) for copy in reads if isinstance(copy, Copy)]
            assert there == coming(counts, rank, pieces)

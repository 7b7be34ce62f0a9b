"""The protocols of fused operators are proved, back to back, and with a mistake in them they are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from contracts import map_spans

from sidelane.errors import ProgramError
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Copy, Flag, Program, Reduce, Signal, Wait
from sidelane.program.shadows import fused_gemv, fused_rms_norm
from sidelane.program.verify import verify_sequence

TILE = 16
Edit = Callable[[list[Command]], list[Command]]


def edited(program: Program, change: Edit) -> Program:
    queues = tuple(dataclasses.replace(queue, commands=tuple(change(list(queue.commands)))) for queue in program.queues)
    return dataclasses.replace(program, queues=queues)


def without(kind: type[Signal] | type[Wait], flags: Callable[[Flag], bool]) -> Edit:
    """Signals, or waits, of some flags left out."""
    return lambda commands: [found for found in commands if not (isinstance(found, kind) and flags(found.flag))]


def without_flags(flags: Callable[[Flag], bool]) -> Edit:
    return lambda commands: without(Wait, flags)(without(Signal, flags)(commands))


def signals_overtake(commands: list[Command]) -> list[Command]:
    """What follows moves of bytes directly, of signals, comes in front of these."""
    found: list[Command] = []
    for is_signal, some in itertools.groupby(commands, lambda command: isinstance(command, Signal)):
        first = len(found)
        while is_signal and first and isinstance(found[first - 1], Copy | Reduce):
            first -= 1
        found[first:first] = some
    return found


def one_place(program: Program, bytes_of_a_place: int) -> Program:
    """Even and odd generations share their places."""

    def change(span: Span) -> Span:
        if span.buffer == Buffer.STAGING:
            return dataclasses.replace(span, offset=span.offset % bytes_of_a_place)
        return span

    return edited(program, lambda commands: [map_spans(command, change) for command in commands])


def refuse(programs: tuple[Program, ...], mistake: str, change: Edit) -> None:
    with pytest.raises(ProgramError):
        verify_sequence([edited(program, change) for program in programs])
        pytest.fail(f"accepted: {mistake}")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gemv_all_reduce_is_proved(n: int) -> None:
    """With fewer tiles than blocks and more, and owners that have fewer than others."""
    for tiles, blocks in itertools.product((1, 3, 5), (1, 2)):
        verify_sequence(fused_gemv.one_shot(n, blocks, tiles, TILE))
        for copies, first in itertools.product((False, True), repeat=2):
            program = fused_gemv.two_phase(n, blocks, tiles, TILE, copies=copies, remote_first=first)
            verify_sequence([program])


def test_mistakes_of_one_shot_are_refused() -> None:
    right = fused_gemv.one_shot(3, 2, 5, TILE)
    refuse(right, "no meeting", without_flags(lambda flag: True))
    refuse(right, "no signal", without(Signal, lambda flag: flag.index == 1))
    refuse(right, "no wait", without(Wait, lambda flag: flag.index == 1))
    refuse(right, "signals before stores", signals_overtake)
    with pytest.raises(ProgramError, match="race on staging"):
        verify_sequence([one_place(program, 3 * 5 * TILE) for program in right])


@pytest.mark.parametrize("copies", [False, True])
def test_mistakes_of_two_phases_are_refused(copies: bool) -> None:
    right = (fused_gemv.two_phase(3, 2, 5, TILE, copies=copies),)
    for phase in range(2):
        refuse(right, f"no meeting {phase}", without_flags(lambda flag, phase=phase: flag.index // 6 == phase))
        refuse(right, f"no wait {phase}", without(Wait, lambda flag, phase=phase: flag.index // 6 == phase))
    refuse(right, "signals before stores", signals_overtake)
    refuse(
        right,
        "one flag for both phases",
        lambda commands: [
            dataclasses.replace(command, flag=Flag(command.flag.rank, command.flag.index % 6))
            if isinstance(command, Signal | Wait)
            else command
            for command in commands
        ],
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_reduce_rms_norm_is_proved(n: int) -> None:
    for rows, blocks in itertools.product((1, 3), (1, 2)):
        verify_sequence(fused_rms_norm.all_reduce_rms_norm(n, blocks, rows, 2))


def test_mistakes_of_all_reduce_rms_norm_are_refused() -> None:
    right = fused_rms_norm.all_reduce_rms_norm(3, 2, 3, 2)
    refuse(right, "a cell that is not waited for", without(Wait, lambda flag: flag.index % 18 == 7))
    refuse(right, "a cell that is never sent", without(Signal, lambda flag: flag.index % 18 == 7))
    refuse(right, "a generation before its data", signals_overtake)
    with pytest.raises(ProgramError):
        verify_sequence(right[:1])  # one place for all generations
        pytest.fail("accepted: one place")

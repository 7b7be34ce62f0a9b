"""The shadows of kernels are proved, back to back, and with a mistake in the protocol they are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from sidelane.errors import ProgramError
from sidelane.program.collective import Buffer, Collective, Span, all_gather, all_to_all
from sidelane.program.ir import Command, Copy, Flag, Program, Queue, Signal, Wait
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows import SHADOWS
from sidelane.program.verify import verify, verify_sequence

TILE = 16


def definition(n: int, part: int, *, distinct: bool, in_place: bool) -> Collective:
    if distinct:
        return all_to_all([[part] * n] * n, in_place=in_place)
    return all_gather([part] * n, in_place=in_place)


def shadow(protocol: Protocol, collective: Collective, blocks: int) -> Program:
    return SHADOWS[protocol](KernelProgram(collective, "one_shot", protocol, blocks), blocks, TILE)


CASES = [
    (protocol, distinct, in_place)
    for protocol, distinct, in_place in itertools.product(SHADOWS, (False, True), (False, True))
    if not (protocol is Protocol.PUSH and distinct and in_place)  # the kernel is not for that either
]


@pytest.mark.parametrize(("protocol", "distinct", "in_place"), CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_shadow_is_proved(protocol: Protocol, distinct: bool, in_place: bool, n: int) -> None:
    """With fewer tiles than blocks and more, none or some left over."""
    for part, blocks in itertools.product((1, 16, 40, 96, 110), (1, 2, 3)):
        if n < 5 or part == 40:
            verify(shadow(protocol, definition(n, part, distinct=distinct, in_place=in_place), blocks))


@pytest.mark.parametrize("n", [2, 3])
def test_launches_of_one_kernel_follow_each_other(n: int) -> None:
    """All kernels share flags; as many blocks, and other sizes."""
    for protocol in SHADOWS:
        programs = [
            shadow(protocol, definition(n, part, distinct=distinct, in_place=False), 2)
            for part, distinct in ((40, False), (96, True))
        ]
        verify_sequence(programs)


def edited(program: Program, change: Callable[[Queue], list[Command]]) -> Program:
    queues = tuple(dataclasses.replace(queue, commands=tuple(change(queue))) for queue in program.queues)
    return dataclasses.replace(program, queues=queues)


def phase_of(program: Program, flag: Flag) -> int:
    return int(flag.index >= program.flag_count // 2)


def without_phase(phase: int) -> Callable[[Program], Program]:
    def edit(program: Program) -> Program:
        def keep(command: Command) -> bool:
            return not isinstance(command, Signal | Wait) or phase_of(program, command.flag) != phase

        return edited(program, lambda queue: [c for c in queue.commands if keep(c)])

    return edit


def one_flag_for_both_phases(program: Program) -> Program:
    half = program.flag_count // 2

    def change(command: Command) -> Command:
        if not isinstance(command, Signal | Wait):
            return command
        return dataclasses.replace(command, flag=Flag(command.flag.rank, command.flag.index % half))

    return edited(program, lambda queue: [change(c) for c in queue.commands])


def signals_before_stores(program: Program) -> Program:
    """The signal of a phase overtakes the copies in front of it."""

    def change(queue: Queue) -> list[Command]:
        commands = list(queue.commands)
        last = max(k for k, c in enumerate(commands) if isinstance(c, Copy))
        first = last
        while first and isinstance(commands[first - 1], Copy):
            first -= 1
        signals = [c for c in commands[last + 1 :] if isinstance(c, Signal)]
        rest = [c for c in commands[last + 1 :] if not isinstance(c, Signal)]
        return [*commands[:first], *signals, *commands[first : last + 1], *rest]

    return edited(
        program, lambda queue: change(queue) if any(isinstance(c, Copy) for c in queue.commands) else [*queue.commands]
    )


def one_slot_too_few(program: Program) -> Program:
    """Staging for one part less: the last two share theirs."""
    stride = max(span.offset for queue in program.queues for c in queue.commands if isinstance(c, Copy)
                 for span in (c.dst, c.src) if span.buffer == Buffer.STAGING) // TILE * TILE  # fmt: skip

    def change(span: Span) -> Span:
        if span.buffer == Buffer.STAGING and span.offset >= stride:
            return dataclasses.replace(span, offset=span.offset - stride)
        return span

    def of(command: Command) -> Command:
        return Copy(change(command.dst), change(command.src)) if isinstance(command, Copy) else command

    return edited(program, lambda queue: [of(c) for c in queue.commands])


MISTAKES = {
    "no first meeting": without_phase(0),
    "no second meeting": without_phase(1),
    "one flag for both": one_flag_for_both_phases,
    "signals before stores": signals_before_stores,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("protocol", list(SHADOWS))
def test_mistakes_of_a_protocol_are_refused(protocol: Protocol, distinct: bool, mistake: str) -> None:
    right = shadow(protocol, definition(3, 40, distinct=distinct, in_place=False), 2)
    verify(right)
    with pytest.raises(ProgramError):
        verify(MISTAKES[mistake](right))


def test_a_slot_too_few_is_refused() -> None:
    right = shadow(Protocol.PULL, definition(3, 16, distinct=True, in_place=False), 1)
    with pytest.raises(ProgramError):
        verify(one_slot_too_few(right))

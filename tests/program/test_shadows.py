"""The shadows of kernels are proved, back to back, and with a mistake in the protocol they are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
from contracts import map_spans

from sidelane.errors import ProgramError
from sidelane.program.collective import (
    Buffer,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from sidelane.program.ir import Command, Copy, Flag, Program, Queue, Reduce, Signal, Wait
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows import SHADOWS
from sidelane.program.verify import verify, verify_sequence

TILE = 16
MOVING = (Copy, Reduce)
FLOATS = Reduction(ReduceOp.SUM, "float32")


def kernels(protocol: Protocol, n: int, part: int, blocks: int) -> Iterator[KernelProgram]:
    """Everything that kernels of a protocol are for, with parts of so many bytes (where they reduce, of elements)."""
    for in_place in (False, True):
        if protocol in (Protocol.PUSH, Protocol.PULL):
            definitions = [("one_shot", all_gather([part] * n, in_place=in_place))]
            if not (protocol is Protocol.PUSH and in_place):
                definitions.append(("one_shot", all_to_all([[part] * n] * n, in_place=in_place)))
        else:
            shard = 4 * part
            last = [shard] * (n - 1) + [4 * (part // 3)]
            definitions = [("one_shot", reduce_scatter([shard] * n, FLOATS, in_place=in_place))]
            definitions += [("two_shot", all_reduce(sizes, FLOATS, in_place=in_place)) for sizes in ([shard] * n, last)]
            if not (protocol is Protocol.DIRECT and in_place):
                definitions.append(("one_shot", all_reduce(last, FLOATS, in_place=in_place)))
        for variant, collective in definitions:
            yield KernelProgram(collective, variant, protocol, blocks)


def shadow(kernel: KernelProgram) -> Program:
    return SHADOWS[kernel.protocol](kernel, kernel.blocks, TILE)


@pytest.mark.parametrize("protocol", list(SHADOWS))
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_shadow_is_proved(protocol: Protocol, n: int) -> None:
    """With fewer tiles than blocks and more, none or some left over."""
    for part, blocks in itertools.product((1, 16, 40, 110), (1, 3)):
        if n < 5 or part == 40:
            for kernel in kernels(protocol, n, part, blocks):
                verify(shadow(kernel))


@pytest.mark.parametrize("n", [2, 3])
def test_launches_follow_each_other(n: int) -> None:
    """All kernels of a communicator share flags, and those with staging share that: any two, of as many blocks."""
    programs = [shadow(kernel) for protocol in SHADOWS for kernel in itertools.islice(kernels(protocol, n, 9, 2), 2)]
    flags = max(program.flag_count for program in programs)
    for one, other in itertools.product(programs, repeat=2):
        verify_sequence([dataclasses.replace(program, flag_count=flags) for program in (one, other)])


def edited(program: Program, change: Callable[[Queue], list[Command]]) -> Program:
    queues = tuple(dataclasses.replace(queue, commands=tuple(change(queue))) for queue in program.queues)
    return dataclasses.replace(program, queues=queues)


def phases_of(program: Program) -> int:
    return 3 if "two_shot reduce" in program.variant else 2


def phase_of(program: Program, flag: Flag) -> int:
    return flag.index // (program.flag_count // phases_of(program))


def without_phase(phase: int) -> Callable[[Program], Program]:
    def edit(program: Program) -> Program:
        def keep(command: Command) -> bool:
            return not isinstance(command, Signal | Wait) or phase_of(program, command.flag) != phase

        return edited(program, lambda queue: [c for c in queue.commands if keep(c)])

    return edit


def one_flag_for_both_phases(program: Program) -> Program:
    half = program.flag_count // phases_of(program)

    def change(command: Command) -> Command:
        if not isinstance(command, Signal | Wait):
            return command
        return dataclasses.replace(command, flag=Flag(command.flag.rank, command.flag.index % half))

    return edited(program, lambda queue: [change(c) for c in queue.commands])


def signals_before_stores(program: Program) -> Program:
    """The signal of a phase overtakes the copies in front of it."""

    def change(queue: Queue) -> list[Command]:
        commands = list(queue.commands)
        last = max(k for k, c in enumerate(commands) if isinstance(c, MOVING))
        first = last
        while first and isinstance(commands[first - 1], MOVING):
            first -= 1
        signals = [c for c in commands[last + 1 :] if isinstance(c, Signal)]
        rest = [c for c in commands[last + 1 :] if not isinstance(c, Signal)]
        return [*commands[:first], *signals, *commands[first : last + 1], *rest]

    return edited(
        program,
        lambda queue: change(queue) if any(isinstance(c, MOVING) for c in queue.commands) else [*queue.commands],
    )


def one_slot_too_few(program: Program) -> Program:
    """Staging for one part less: the last two share theirs."""
    stride = max(program.staging_bytes) // program.world_size
    last = stride * (program.world_size - 1)

    def change(span: Span) -> Span:
        if span.buffer == Buffer.STAGING and span.offset >= last:
            return dataclasses.replace(span, offset=span.offset - stride)
        return span

    return edited(program, lambda queue: [map_spans(command, change) for command in queue.commands])


MISTAKES = {
    "no first meeting": without_phase(0),
    "no second meeting": without_phase(1),
    "one flag for all": one_flag_for_both_phases,
    "signals before stores": signals_before_stores,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("protocol", list(SHADOWS))
def test_mistakes_of_a_protocol_are_refused(protocol: Protocol, mistake: str) -> None:
    for kernel in kernels(protocol, 3, 40, 2):
        right = shadow(kernel)
        verify(right)
        with pytest.raises(ProgramError):
            verify(MISTAKES[mistake](right))


def test_no_last_meeting() -> None:
    """In two shots through staging there are three: without the last one, the next call stages what is still read."""
    kernel = next(each for each in kernels(Protocol.REDUCE, 3, 40, 2) if each.two_shot)
    with pytest.raises(ProgramError, match="race on staging"):
        verify(without_phase(2)(shadow(kernel)))


@pytest.mark.parametrize("protocol", [Protocol.PULL, Protocol.REDUCE])
def test_a_slot_too_few_is_refused(protocol: Protocol) -> None:
    for kernel in kernels(protocol, 3, 16, 1):
        if kernel.distinct:
            with pytest.raises(ProgramError):
                verify(one_slot_too_few(shadow(kernel)))

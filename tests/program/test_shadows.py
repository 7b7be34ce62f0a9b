"""The shadows of kernels are proved, back to back, and with a mistake in the protocol they are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
from contracts import map_spans

from sidelane.errors import ProgramError
from sidelane.program import pushed
from sidelane.program.collective import (
    Buffer,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from sidelane.program.ir import Command, Copy, Program, Reduce, Signal, Wait
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows import SHADOWS
from sidelane.program.verify import verify_sequence

TILE = 16
FLOATS = Reduction(ReduceOp.SUM, "float32")


def kernels(protocol: Protocol, n: int, part: int, blocks: int) -> Iterator[KernelProgram]:
    """Everything that kernels of a protocol are for, with parts of so many bytes (where they reduce, of elements)."""
    for in_place in (False, True):
        moving = [all_gather([part] * n, in_place=in_place)]
        if not (protocol is Protocol.PUSH and in_place):
            moving.append(all_to_all([[part] * n] * n, in_place=in_place))
        reducing = [reduce_scatter([4 * part] * n, FLOATS, in_place=in_place)]
        last = [4 * part] * (n - 1) + [4 * (part // 3)]
        if not (protocol is Protocol.DIRECT and in_place):
            reducing.append(all_reduce(last, FLOATS, in_place=in_place))
        match protocol:
            case Protocol.PUSH | Protocol.PULL:
                chosen = moving
            case Protocol.PARCELS:
                chosen = [*moving, *reducing, *[broadcast(part, n, n // 2, in_place=True)] * in_place]
            case _:
                chosen = reducing
                for sizes in (last, [4 * part] * n):
                    variant = "two_shot_push" if protocol is Protocol.SEND else "two_shot"
                    yield KernelProgram(all_reduce(sizes, FLOATS, in_place=in_place), variant, protocol, blocks)
        if protocol is Protocol.SEND:
            continue
        for collective in chosen:
            yield KernelProgram(collective, "one_shot", protocol, blocks)


def shadow(kernel: KernelProgram) -> tuple[Program, ...]:
    return SHADOWS[kernel.protocol](kernel, kernel.blocks, TILE)


@pytest.mark.parametrize("protocol", list(SHADOWS))
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_shadow_is_proved(protocol: Protocol, n: int) -> None:
    """With fewer tiles than blocks and more, none or some left over."""
    for part, blocks in itertools.product((1, 16, 40, 110), (1, 3)):
        if n < 5 or part == 40:
            for kernel in kernels(protocol, n, part, blocks):
                verify_sequence(shadow(kernel))


@pytest.mark.parametrize("n", [2, 3])
def test_launches_follow_each_other(n: int) -> None:
    """All kernels of a communicator share flags and generations, those with staging share that, and parcels places."""
    turns = [shadow(kernel) for protocol in SHADOWS for kernel in itertools.islice(kernels(protocol, n, 9, 2), 2)]
    flags = max(program.flag_count for programs in turns for program in programs)
    for pair in itertools.product(turns, repeat=2):
        chosen = [programs[generation % len(programs)] for generation, programs in enumerate(pair)]
        verify_sequence([beside_staging(dataclasses.replace(program, flag_count=flags)) for program in chosen])


def edited(program: Program, change: Callable[[list[Command]], list[Command]]) -> Program:
    queues = tuple(dataclasses.replace(queue, commands=tuple(change(list(queue.commands)))) for queue in program.queues)
    return dataclasses.replace(program, queues=queues)


def respanned(program: Program, change: Callable[[Span], Span]) -> Program:
    return edited(program, lambda commands: [map_spans(command, change) for command in commands])


def beside_staging(program: Program) -> Program:
    """Places of parcels are in arenas: here, behind whatever staging others have."""
    if "parcels" not in program.variant:
        return program
    far = 1 << 20

    def change(span: Span) -> Span:
        return dataclasses.replace(span, offset=span.offset + far) if span.buffer == Buffer.STAGING else span

    return dataclasses.replace(
        respanned(program, change), staging_bytes=tuple(size + far for size in program.staging_bytes)
    )


def phases_of(program: Program) -> int:
    if "parcels" in program.variant:
        return 1
    if "send" in program.variant:  # one for each chunk between the first and the last
        n, blocks = program.world_size, len(program.queues_of(0))
        return program.flag_count // (n * blocks)
    return 3 if "two_shot reduce" in program.variant else 2


def without_phase(phase: int) -> Callable[[Program], Program]:
    def edit(program: Program) -> Program:
        flags = program.flag_count // phases_of(program)

        def keep(command: Command) -> bool:
            return not isinstance(command, Signal | Wait) or command.flag.index // flags != phase

        return edited(program, lambda commands: list(filter(keep, commands)))

    return edit


def one_flag_for_all_phases(program: Program) -> Program:
    flags = program.flag_count // phases_of(program)

    def change(command: Command) -> Command:
        if not isinstance(command, Signal | Wait):
            return command
        return dataclasses.replace(command, flag=dataclasses.replace(command.flag, index=command.flag.index % flags))

    return edited(program, lambda commands: list(map(change, commands)))


def signals_before_stores(program: Program) -> Program:
    """The last signals that stand behind copies overtake these."""

    def change(commands: list[Command]) -> list[Command]:
        behind = [k for k, (a, b) in enumerate(itertools.pairwise(commands), 1) if moves(a) and isinstance(b, Signal)]
        if not behind:
            return commands
        first = last = behind[-1]
        while first and moves(commands[first - 1]):
            first -= 1
        while last < len(commands) and isinstance(commands[last], Signal):
            last += 1
        return [*commands[:first], *commands[behind[-1] : last], *commands[first : behind[-1]], *commands[last:]]

    return edited(program, change)


def moves(command: Command) -> bool:
    return isinstance(command, Copy | Reduce)


def one_slot_too_few(program: Program) -> Program:
    """Staging for one part less: the last two share theirs."""
    stride = max(program.staging_bytes) // program.world_size
    last = stride * (program.world_size - 1)

    def change(span: Span) -> Span:
        if span.buffer == Buffer.STAGING and span.offset >= last:
            return dataclasses.replace(span, offset=span.offset - stride)
        return span

    return respanned(program, change)


def mistakes(kernel: KernelProgram) -> Iterator[tuple[str, tuple[Program, ...]]]:
    """Every mistake that a protocol has room for, in all of its programs."""
    right = shadow(kernel)
    phases = phases_of(right[0])
    # Who hears of a chunk knows that its sender runs: the first meeting of these is one too many.
    for phase in range(kernel.protocol is Protocol.SEND, phases):
        yield f"no meeting {phase}", tuple(map(without_phase(phase), right))
    if phases > 1:
        yield "one flag for all phases", tuple(map(one_flag_for_all_phases, right))
    yield "signals before stores", tuple(map(signals_before_stores, right))
    if len(right) > 1:
        yield "one place instead of two", right[:1]
    elif max(right[0].staging_bytes) and kernel.distinct and kernel.protocol is not Protocol.SEND:
        yield "one slot too few", tuple(map(one_slot_too_few, right))


@pytest.mark.parametrize("protocol", list(SHADOWS))
def test_mistakes_of_a_protocol_are_refused(protocol: Protocol) -> None:
    seen = set()
    for kernel in kernels(protocol, 3, 40, 2):
        verify_sequence(shadow(kernel))
        for mistake, programs in mistakes(kernel):
            seen.add(mistake)
            with pytest.raises(ProgramError):
                verify_sequence(programs)
                pytest.fail(f"accepted: {mistake} in {kernel}")
    assert {f"no meeting {int(protocol is Protocol.SEND)}", "signals before stores"} <= seen


def test_a_meeting_that_nobody_needs() -> None:
    """Found by the proof: ``reduce_push`` would be right without its first one."""
    for kernel in kernels(Protocol.SEND, 3, 40, 2):
        verify_sequence(tuple(map(without_phase(0), shadow(kernel))))


@pytest.mark.parametrize(("slots", "fine"), [(3, False), (4, True), (5, True)])
def test_four_slots_are_enough_and_three_are_not(monkeypatch: pytest.MonkeyPatch, slots: int, fine: bool) -> None:
    """``program/pushed.py`` says so in words."""
    monkeypatch.setattr(pushed, "SLOTS", slots)
    for n, in_place in itertools.product((2, 3), (False, True)):
        collective = all_reduce([16 * 60] * n, FLOATS, in_place=in_place)
        (program,) = shadow(KernelProgram(collective, "two_shot_push", Protocol.SEND, 1))
        if fine:
            verify_sequence([program])
            continue
        with pytest.raises(ProgramError, match="race on staging"):
            verify_sequence([program])

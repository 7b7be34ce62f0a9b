"""Mistakes that kernels could have, planted in their shadows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from contracts import map_spans
from shadows.arena import ARENA, cell_flag, loaded_flag, once_flag
from shadows.blocks import BLOCK_FLAGS, DONE

from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Copy, Flag, Program, Reduce, Signal, Value, Wait
from sidelane.program.kernel import MOST_BLOCKS, MOST_RANKS

Programs = tuple[Program, ...]
"""Of a kernel, in turn."""

PHASE_FLAGS = MOST_BLOCKS * MOST_RANKS


def mistakes_of(right: Programs) -> Iterator[tuple[str, Programs]]:
    """Every mistake that a protocol has room for, in all of its programs."""
    phases = phases_of(right)
    for phase in phases:
        yield f"no meeting {'done' if phase == DONE else phase}", each(right, without_phase(phase))
    if len(phases) > 1:
        yield "one flag for all phases", each(right, one_flag_for_all_phases)
    if any(isinstance(command, Copy | Reduce) for command in commands_of(right)):
        yield "signals before stores", each(right, signals_before_stores)
    yield "no generation", each(right, without_generations)
    yield "a reset where a generation belongs", each(right, resets)
    if len(right) > 1:
        yield "one place instead of two", right[:1]
    last = max(command.flag.index for command in commands_of(right) if isinstance(command, Wait))
    if last >= BLOCK_FLAGS:
        yield "a cell that is not waited for", each(right, without_first_cell)
    if last >= loaded_flag(0, 0, right[0].world_size, 0).index:
        yield "no barrier", each(right, without_barrier)
    if 0 < max(right[0].staging_bytes) < ARENA:
        yield "one slot too few", each(right, one_slot_too_few)


def each(programs: Programs, change: Callable[[Program], Program]) -> Programs:
    """The same mistake in all of them."""
    return tuple(map(change, programs))


def edited(program: Program, change: Callable[[list[Command]], Sequence[Command]]) -> Program:
    """With other commands in each queue."""
    queues = tuple(dataclasses.replace(queue, commands=tuple(change(list(queue.commands)))) for queue in program.queues)
    return dataclasses.replace(program, queues=queues)


def changed(program: Program, change: Callable[[Command], Command | None]) -> Program:
    """With other commands, or without some."""
    return edited(program, lambda commands: [new for command in commands if (new := change(command)) is not None])


def commands_of(programs: Programs) -> Iterator[Command]:
    return (command for program in programs for queue in program.queues for command in queue.commands)


def phases_of(programs: Programs) -> list[int]:
    """In which blocks meet."""
    indices = {command.flag.index for command in commands_of(programs) if isinstance(command, Wait)}
    return sorted({index // PHASE_FLAGS for index in indices if index < BLOCK_FLAGS})


def without_flags(program: Program, goes: Callable[[Flag], bool]) -> Program:
    """Without signals and waits of some flags."""
    return changed(
        program, lambda command: None if isinstance(command, Signal | Wait) and goes(command.flag) else command
    )


def without_phase(phase: int) -> Callable[[Program], Program]:
    return lambda program: without_flags(program, lambda flag: flag.index // PHASE_FLAGS == phase)


def without_first_cell(program: Program) -> Program:
    """A cell of each sender and receiver that nobody looks at, as if another one vouched for it."""
    n = program.world_size
    flags = itertools.product((cell_flag, once_flag), range(n), range(2))
    first = {flag_of(0, sender, parity, n, 0).index for flag_of, sender, parity in flags}
    return without_flags(program, lambda flag: flag.index in first)


def without_barrier(program: Program) -> Program:
    """Threads store results where others have not loaded yet."""
    n = program.world_size
    first, last = loaded_flag(0, 0, n, 0).index, once_flag(0, 0, 0, n, 0).index - 1
    return without_flags(program, lambda flag: first <= flag.index <= last)


def one_flag_for_all_phases(program: Program) -> Program:
    def change(command: Command) -> Command:
        if not isinstance(command, Signal | Wait) or command.flag.index >= BLOCK_FLAGS:
            return command
        return dataclasses.replace(command, flag=Flag(command.flag.rank, command.flag.index % PHASE_FLAGS))

    return changed(program, change)


def signals_before_stores(program: Program) -> Program:
    """The last signals of a queue that stand behind copies overtake these."""

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


def without_generations(program: Program) -> Program:
    """A flag that says 1 says so for good."""
    return changed(program, _says_one)


def resets(program: Program) -> Program:
    """A flag says 1, and whoever has waited for it takes it back."""

    def change(commands: list[Command]) -> Iterator[Command]:
        for command in map(_says_one, commands):
            yield command
            if isinstance(command, Wait):
                yield Signal(command.flag, Value(0))

    return edited(program, lambda commands: list(change(commands)))


def _says_one(command: Command) -> Command:
    return dataclasses.replace(command, value=Value(1)) if isinstance(command, Signal | Wait) else command


def one_slot_too_few(program: Program) -> Program:
    """What comes last in staging is staged over what comes before."""
    places = {
        (span.offset, span.nbytes)
        for command in commands_of((program,))
        if isinstance(command, Copy) and (span := command.dst).buffer == Buffer.STAGING
    }
    last = max(places)
    before = max((place for place in places if place[0] < last[0]), default=last)

    def change(span: Span) -> Span:
        if span.buffer == Buffer.STAGING and span.offset == last[0]:
            return dataclasses.replace(span, offset=before[0])
        return span

    return edited(program, lambda commands: [map_spans(command, change) for command in commands])

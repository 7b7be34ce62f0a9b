"""Programs with something changed: a command, a flag, a span."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Broadcast, Command, Copy, EngineKind, Flag, Program, Reduce, Signal, Swap, Value, Wait

Place = tuple[int, int]
"""Index of a queue, index of a command in it."""


def edited(program: Program, queue: int, commands: Sequence[Command]) -> Program:
    """Other commands in a queue."""
    queues = list(program.queues)
    queues[queue] = dataclasses.replace(queues[queue], commands=tuple(commands))
    return dataclasses.replace(program, queues=tuple(queues))


def places(program: Program, *kinds: type) -> Iterator[Place]:
    """Every command of the given kinds."""
    for q, queue in enumerate(program.queues):
        for c, command in enumerate(queue.commands):
            if isinstance(command, kinds):
                yield q, c


def at(program: Program, place: Place) -> Command:
    """The command at a place."""
    return program.queues[place[0]].commands[place[1]]


def replaced(program: Program, place: Place, *commands: Command) -> Program:
    """Put other commands in the place of one."""
    q, c = place
    others = program.queues[q].commands
    return edited(program, q, (*others[:c], *commands, *others[c + 1 :]))


def deleted(program: Program, place: Place) -> Program:
    """Leave out one command."""
    return replaced(program, place)


def changed(program: Program, place: Place, **fields: Any) -> Program:
    """Change fields of one command."""
    return replaced(program, place, dataclasses.replace(at(program, place), **fields))


def rewritten(program: Program, rewrite: Callable[[Command], Sequence[Command]]) -> Program:
    """Put what ``rewrite`` says in the place of every command."""
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(new for old in queue.commands for new in rewrite(old)))
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


def reflagged(program: Program, of: Callable[[Flag], Flag], flag_count: int | None = None) -> Program:
    """The same program with other flags."""

    def rewrite(command: Command) -> Sequence[Command]:
        if isinstance(command, Signal | Wait):
            return (dataclasses.replace(command, flag=of(command.flag)),)
        return (command,)

    count = program.flag_count if flag_count is None else flag_count
    return dataclasses.replace(rewritten(program, rewrite), flag_count=count)


def respanned(command: Command, of: Callable[[Span], Span]) -> Command:
    """The same command on other spans."""
    match command:
        case Copy(dst, src):
            return Copy(of(dst), of(src))
        case Broadcast(dsts, src):
            return dataclasses.replace(command, dsts=tuple(map(of, dsts)), src=of(src))  # type: ignore[arg-type]
        case Swap(a, b):
            return Swap(of(a), of(b))
        case Reduce(dst, srcs, reduction):
            return Reduce(of(dst), tuple(map(of, srcs)), reduction)
    return command


def revalued(program: Program, flag: Flag, of: Callable[[Signal | Wait], Value]) -> Program:
    """Other values in every use of one flag."""

    def rewrite(command: Command) -> Sequence[Command]:
        if isinstance(command, Signal | Wait) and command.flag == flag:
            return (dataclasses.replace(command, value=of(command)),)
        return (command,)

    return rewritten(program, rewrite)


def without_flag(program: Program, place: Place) -> Program:
    """Leave out a wait and every signal of its flag: a whole handshake."""
    wait = at(program, place)
    assert isinstance(wait, Wait)
    return rewritten(program, lambda c: () if isinstance(c, Signal | Wait) and c.flag == wait.flag else (c,))


def cut(span: Span, start: int, end: int) -> Span:
    """Bytes ``[start, end)`` of a span."""
    return dataclasses.replace(span, offset=span.offset + start, nbytes=end - start)


def begins_own_part(program: Program, place: Place) -> bool:
    """True for the mark that a rank's own part waits for: it could begin at any time."""
    q, c = place
    queue = program.queues[q]
    return queue.engine.kind is EngineKind.LOCAL and c == 0 and all(isinstance(c, Copy) for c in queue.commands[1:])


def perturbed(span: Span, world_size: int) -> Iterator[Span]:
    """Spans next to a right one: shifted, on another rank, in another buffer."""
    for offset in (-4, -1, 1, 4):
        yield dataclasses.replace(span, offset=span.offset + offset)
    if world_size > 1:
        yield dataclasses.replace(span, rank=(span.rank + 1) % world_size)
    for buffer in Buffer:
        if buffer is not span.buffer:
            yield dataclasses.replace(span, buffer=buffer)


def perturbed_copies(program: Program) -> Iterator[Program]:
    """Every program that differs in one span of one copy, or that moves one byte less."""
    for place in places(program, Copy):
        command = at(program, place)
        assert isinstance(command, Copy)
        for src in perturbed(command.src, program.world_size):
            yield replaced(program, place, dataclasses.replace(command, src=src))
        for dst in perturbed(command.dst, program.world_size):
            yield replaced(program, place, dataclasses.replace(command, dst=dst))
        short = [dataclasses.replace(span, nbytes=span.nbytes - 1) for span in (command.dst, command.src)]
        yield replaced(program, place, Copy(*short))

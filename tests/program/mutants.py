"""Small mistakes put into right programs, one at a time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Comparison, Copy, EngineKind, Program, Queue, Reduce, Signal, Value, Wait

Place = tuple[int, int]
"""Index of a queue, index of a command in it."""


def edited(program: Program, queue: int, commands: list[Command] | tuple[Command, ...]) -> Program:
    queues = list(program.queues)
    queues[queue] = dataclasses.replace(queues[queue], commands=tuple(commands))
    return dataclasses.replace(program, queues=tuple(queues))


def places(program: Program, *kinds: type) -> Iterator[Place]:
    """Every command of the given kinds."""
    for q, queue in enumerate(program.queues):
        for c, command in enumerate(queue.commands):
            if isinstance(command, kinds):
                yield q, c


def begins_own_part(program: Program, place: Place) -> bool:
    """True for the mark that a rank's own part waits for: it could begin at any time."""
    q, c = place
    queue = program.queues[q]
    return queue.engine.kind is EngineKind.LOCAL and c == 0 and all(isinstance(c, Copy) for c in queue.commands[1:])


def deleted(program: Program, place: Place) -> Program:
    """Leave out one command."""
    q, c = place
    commands = program.queues[q].commands
    return edited(program, q, commands[:c] + commands[c + 1 :])


def replaced(program: Program, place: Place, command: Command) -> Program:
    """Put another command in the place of one."""
    q, c = place
    commands = program.queues[q].commands
    return edited(program, q, (*commands[:c], command, *commands[c + 1 :]))


def without_flag(program: Program, place: Place) -> Program:
    """Leave out a wait and every signal of its flag: a whole handshake."""
    q, c = place
    flag = program.queues[q].commands[c].flag
    queues = tuple(
        dataclasses.replace(
            queue,
            commands=tuple(c for c in queue.commands if not (isinstance(c, Signal | Wait) and c.flag == flag)),
        )
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


def perturbed(span: Span, world_size: int) -> Iterator[Span]:
    """Spans next to a right one: shifted, shorter, on another rank, in another buffer."""
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
        command = program.queues[place[0]].commands[place[1]]
        for src in perturbed(command.src, program.world_size):
            yield replaced(program, place, dataclasses.replace(command, src=src))
        for dst in perturbed(command.dst, program.world_size):
            yield replaced(program, place, dataclasses.replace(command, dst=dst))
        short = [dataclasses.replace(span, nbytes=span.nbytes - 1) for span in (command.dst, command.src)]
        yield replaced(program, place, Copy(*short))


def mutant(program: Program, rng: random.Random) -> tuple[str, Program]:
    """One random mistake: its name, and the program (equal to the right one where the mistake happens to be none)."""
    while True:
        name = rng.choice(list(_MISTAKES))
        queues = [q for q, queue in enumerate(program.queues) if queue.commands]
        q = rng.choice(queues)
        result = _MISTAKES[name](program, (q, rng.randrange(len(program.queues[q].commands))), rng)
        if result is not None:
            return name, result


def _delete(program: Program, place: Place, rng: random.Random) -> Program:
    return deleted(program, place)


def _move(program: Program, place: Place, rng: random.Random) -> Program:
    commands = list(program.queues[place[0]].commands)
    command = commands.pop(place[1])
    commands.insert(rng.randint(0, len(commands)), command)
    return edited(program, place[0], commands)


def _handshake(program: Program, place: Place, rng: random.Random) -> Program | None:
    q, c = place
    return without_flag(program, place) if isinstance(program.queues[q].commands[c], Wait) else None


def _span(program: Program, place: Place, rng: random.Random) -> Program | None:
    command = program.queues[place[0]].commands[place[1]]
    if isinstance(command, Copy):
        side = rng.choice(("src", "dst"))
        span = rng.choice(list(perturbed(getattr(command, side), program.world_size)))
        return replaced(program, place, dataclasses.replace(command, **{side: span}))
    if isinstance(command, Reduce):
        srcs = list(command.srcs)
        srcs[rng.randrange(len(srcs))] = rng.choice(srcs)
        return replaced(program, place, dataclasses.replace(command, srcs=tuple(srcs)))
    return None


def _flag(program: Program, place: Place, rng: random.Random) -> Program | None:
    command = program.queues[place[0]].commands[place[1]]
    if not isinstance(command, Signal | Wait):
        return None
    flag = dataclasses.replace(command.flag, index=rng.randrange(program.flag_count))
    return replaced(program, place, dataclasses.replace(command, flag=flag))


def _value(program: Program, place: Place, rng: random.Random) -> Program | None:
    command = program.queues[place[0]].commands[place[1]]
    if not isinstance(command, Signal | Wait):
        return None
    value = rng.choice((Value(0), Value(1), Value(2), Value(-1, 1), Value(1, 1)))
    return replaced(program, place, dataclasses.replace(command, value=value))


def _comparison(program: Program, place: Place, rng: random.Random) -> Program | None:
    command = program.queues[place[0]].commands[place[1]]
    if not isinstance(command, Wait):
        return None
    other = Comparison.EQ if command.comparison is Comparison.GE else Comparison.GE
    return replaced(program, place, dataclasses.replace(command, comparison=other))


def _split(program: Program, place: Place, rng: random.Random) -> Program:
    """Give the rest of a queue to another engine."""
    q, c = place
    queue = program.queues[q]
    first = edited(program, q, queue.commands[:c])
    rest = Queue(queue.rank, dataclasses.replace(queue.engine, index=99), queue.commands[c:])
    return dataclasses.replace(first, queues=(*first.queues, rest))


def _merge(program: Program, place: Place, rng: random.Random) -> Program | None:
    """Run a queue on the engine of another one, behind it."""
    q = place[0]
    queue = program.queues[q]
    others = [
        k
        for k, other in enumerate(program.queues)
        if k != q and (other.rank, other.engine.kind) == (queue.rank, queue.engine.kind)
    ]
    if not others:
        return None
    k = rng.choice(others)
    merged = edited(program, q, queue.commands + program.queues[k].commands)
    return dataclasses.replace(merged, queues=merged.queues[:k] + merged.queues[k + 1 :])


_MISTAKES: dict[str, Callable[[Program, Place, random.Random], Program | None]] = {
    "delete": _delete,
    "move": _move,
    "handshake": _handshake,
    "span": _span,
    "flag": _flag,
    "value": _value,
    "comparison": _comparison,
    "split": _split,
    "merge": _merge,
}

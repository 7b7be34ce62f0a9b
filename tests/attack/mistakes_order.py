"""Mistakes in what stands where: commands, queues, triggers."""

from __future__ import annotations

import dataclasses
import random

from attack.edits import Place, at, deleted, edited, places, without_flag
from sidelane.program.ir import MOVES, Engine, EngineKind, Program, Queue, Reduce, Signal, Wait


def delete(program: Program, rng: random.Random) -> Program:
    """Leave out a command."""
    return deleted(program, _place(program, rng))


def move(program: Program, rng: random.Random) -> Program:
    """Put a command elsewhere in its queue."""
    q, c = _place(program, rng)
    commands = list(program.queues[q].commands)
    command = commands.pop(c)
    commands.insert(rng.randint(0, len(commands)), command)
    return edited(program, q, commands)


def twice(program: Program, rng: random.Random) -> Program:
    """Do a command once more, somewhere in its queue."""
    q, c = _place(program, rng)
    commands = list(program.queues[q].commands)
    commands.insert(rng.randint(0, len(commands)), commands[c])
    return edited(program, q, commands)


def elsewhere(program: Program, rng: random.Random) -> Program | None:
    """Put a command into another queue of its rank."""
    q, c = _place(program, rng)
    others = [k for k, queue in enumerate(program.queues) if k != q and queue.rank == program.queues[q].rank]
    if not others:
        return None
    k = rng.choice(others)
    commands = list(program.queues[k].commands)
    commands.insert(rng.randint(0, len(commands)), at(program, (q, c)))
    return edited(deleted(program, (q, c)), k, commands)


def hasty(program: Program, rng: random.Random) -> Program | None:
    """A signal comes before what it tells of, or a move before what it waits for."""
    pairs = [(q, c) for q, c in places(program, Signal, *MOVES, Reduce) if c and _hurries(program.queues[q], c)]
    if not pairs:
        return None
    q, c = rng.choice(pairs)
    commands = list(program.queues[q].commands)
    commands[c - 1], commands[c] = commands[c], commands[c - 1]
    return edited(program, q, commands)


def handshake(program: Program, rng: random.Random) -> Program | None:
    """Leave out a wait and all its signals."""
    waits = list(places(program, Wait))
    return without_flag(program, rng.choice(waits)) if waits else None


def split(program: Program, rng: random.Random) -> Program:
    """Give the rest of a queue to another engine."""
    q, c = _place(program, rng)
    queue = program.queues[q]
    first = edited(program, q, queue.commands[:c])
    taken = [other.engine.index for other in program.queues if other.rank == queue.rank]
    engine = dataclasses.replace(queue.engine, index=1 + max(taken))
    return dataclasses.replace(first, queues=(*first.queues, Queue(queue.rank, engine, queue.commands[c:])))


def merge(program: Program, rng: random.Random) -> Program | None:
    """Run a queue on the engine of another one: before it, behind it, or in turns."""
    q = _place(program, rng)[0]
    queue = program.queues[q]
    alike = {EngineKind.DMA, EngineKind.LOCAL}
    others = [
        k
        for k, other in enumerate(program.queues)
        if k != q
        and other.rank == queue.rank
        and (other.engine.kind is queue.engine.kind or {other.engine.kind, queue.engine.kind} == alike)
    ]
    if not others:
        return None
    k = rng.choice(others)
    waiting = [list(queue.commands), list(program.queues[k].commands)]
    commands = []
    style = rng.random()
    while any(waiting):
        some = [part for part in waiting if part]
        commands.append((some[0] if style < 0.5 else rng.choice(some)).pop(0))
    merged = edited(program, q, commands)
    return dataclasses.replace(merged, queues=merged.queues[:k] + merged.queues[k + 1 :])


def trigger(program: Program, rng: random.Random) -> Program | None:
    """A queue that was handed over ahead has no trigger."""
    if not program.prelaunched:
        return None
    held = [q for q, queue in enumerate(program.queues) if queue.engine.kind is not EngineKind.CALLER]
    waits = [(q, 0) for q in held if program.queues[q].commands and isinstance(at(program, (q, 0)), Wait)]
    if not waits:
        return None
    place = rng.choice(waits)
    return deleted(program, place) if rng.random() < 0.3 else without_flag(program, place)


def handed_over(program: Program, rng: random.Random) -> Program:
    """A program is handed over ahead that has no triggers; or it has some, and is not."""
    return dataclasses.replace(program, prelaunched=not program.prelaunched)


def engine(program: Program, rng: random.Random) -> Program:
    """A queue runs on another kind of engine."""
    q = rng.randrange(len(program.queues))
    queues = list(program.queues)
    kind = rng.choice(list(EngineKind))
    queues[q] = dataclasses.replace(queues[q], engine=Engine(kind, 7))
    return dataclasses.replace(program, queues=tuple(queues))


def _hurries(queue: Queue, c: int) -> bool:
    before, command = queue.commands[c - 1], queue.commands[c]
    return isinstance(before, Wait) if not isinstance(command, Signal) else not isinstance(before, Signal)


def _place(program: Program, rng: random.Random) -> Place:
    return rng.choice(list(places(program, object)))

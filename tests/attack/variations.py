"""Changes that leave a program right, whatever it does: ``verify`` must accept what it accepted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from attack.edits import cut, reflagged, respanned, rewritten
from sidelane.program.ir import MOVES, Command, Flag, Program, Reduce, Signal, Value, Wait, spans

SLOPES = (2, 3, 10, 16)
"""Steps in which flags may count instead of 1."""


def variation(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """Apply one or two changes, to all programs of a sequence."""
    distinct = list({id(program): program for program in programs}.values())
    changed = list(distinct)
    for change in rng.sample((_cut, _steps, _flags, _queues), rng.choice((1, 1, 2))):
        changed = change(changed, rng)
    new = {id(old): made for old, made in zip(distinct, changed, strict=True)}
    return tuple(new[id(program)] for program in programs)


def _cut(programs: list[Program], rng: random.Random) -> list[Program]:
    """Some moves in two parts, cut anywhere, and some reductions, cut between elements."""

    def rewrite(command: Command) -> Sequence[Command]:
        if not isinstance(command, (*MOVES, Reduce)) or rng.random() < 0.5:
            return (command,)
        size = next(spans(command)).nbytes
        unit = command.reduction.element_bytes if isinstance(command, Reduce) else 1
        if size <= unit:
            return (command,)
        middle = rng.randrange(unit, size, unit)
        parts = (respanned(command, lambda s: cut(s, 0, middle)), respanned(command, lambda s: cut(s, middle, size)))
        return rng.sample(parts, 2)

    return [rewritten(program, rewrite) for program in programs]


def _steps(programs: list[Program], rng: random.Random) -> list[Program]:
    """Flags that follow epochs count in larger steps, and their waits are content with any value of the right call."""
    step = rng.choice(SLOPES)
    base, less = rng.randint(0, 3), rng.randint(0, step - 1)

    def rewrite(command: Command) -> Sequence[Command]:
        if not isinstance(command, Signal | Wait) or command.value.per_epoch != 1:
            return (command,)
        value = Value(command.value.base + base - (less if isinstance(command, Wait) else 0), step)
        return (dataclasses.replace(command, value=value),)

    return [rewritten(program, rewrite) for program in programs]


def _flags(programs: list[Program], rng: random.Random) -> list[Program]:
    """Other numbers for the flags of each rank."""
    count = max(program.flag_count for program in programs) + rng.randint(0, 3)
    numbers = [rng.sample(range(count), count) for _ in range(programs[0].world_size)]
    return [reflagged(program, lambda f: Flag(f.rank, numbers[f.rank][f.index]), count) for program in programs]


def _queues(programs: list[Program], rng: random.Random) -> list[Program]:
    """Queues in another order."""
    return [dataclasses.replace(p, queues=tuple(rng.sample(p.queues, len(p.queues)))) for p in programs]

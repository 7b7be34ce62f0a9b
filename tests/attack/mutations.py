"""Mistakes put into right programs at random: one, or several at once."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Sequence
from types import ModuleType

from attack import mistakes_bytes, mistakes_flags, mistakes_order
from attack.edits import places, reflagged, respanned, rewritten
from sidelane.program.collective import SLOT_ALIGNMENT, Buffer, Span
from sidelane.program.ir import Flag, Program, Signal, Wait, spans
from sidelane.program.transform import freeze

Mistake = Callable[[Program, random.Random], Program | None]
"""Gives a program with the mistake (by chance the right one), or None where there is no place for it."""


def _named(module: ModuleType) -> dict[str, Mistake]:
    """The public functions that a module defines."""
    return {
        name.replace("_", " "): function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }


MISTAKES: dict[str, Mistake] = _named(mistakes_order) | _named(mistakes_flags) | _named(mistakes_bytes)
"""Every mistake in a program by name."""


def mutant(program: Program, rng: random.Random) -> tuple[str, Program]:
    """One random mistake in a program with commands: its name, and the program with it."""
    while True:
        name = rng.choice(list(MISTAKES))
        result = MISTAKES[name](program, rng)
        if result is not None:
            return name, result


def mutants(programs: Sequence[Program], rng: random.Random) -> tuple[tuple[str, ...], tuple[Program, ...]]:
    """Up to three mistakes in one program of a sequence, or one in the sequence itself; their names first.

    A program that stands there more than once has them everywhere.
    """
    if len(programs) > 1 and rng.random() < 0.25:
        name = rng.choice(list(DISORDERS))
        return (name,), DISORDERS[name](tuple(programs), rng)
    chosen = rng.choice([program for program in programs if next(places(program, object), None)])
    program, names = chosen, []
    for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3))):
        if next(places(program, object), None):
            name, program = mutant(program, rng)
            names.append(name)
    return tuple(names), tuple(program if other is chosen else other for other in programs)


def _order(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """In another order."""
    return tuple(rng.sample(programs, len(programs)))


def _left_out(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """One is missing."""
    gone = rng.randrange(len(programs))
    return (*programs[:gone], *programs[gone + 1 :])


def _once_more(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """One comes again."""
    place = rng.randint(0, len(programs))
    return (*programs[:place], rng.choice(programs), *programs[place:])


def _flags_of_another(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """The flags of one lie a few further up, or down."""
    chosen = rng.choice(programs)
    lowest = min((c.flag.index for q in chosen.queues for c in q.commands if isinstance(c, Signal | Wait)), default=0)
    distance = rng.choice((-lowest, 1, 1, 2, chosen.world_size, max(1, chosen.flag_count // 2)))
    other = reflagged(chosen, lambda f: Flag(f.rank, f.index + distance), chosen.flag_count + max(0, distance))
    return tuple(other if program is chosen else program for program in programs)


def _staging_of_another(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """The staging of one lies a slot further up, or at the beginning."""
    chosen = rng.choice(programs)
    used = [s for q in chosen.queues for c in q.commands for s in spans(c) if s.buffer is Buffer.STAGING]
    lowest = min((s.offset for s in used), default=0)
    distance = rng.choice((-lowest, 1, SLOT_ALIGNMENT, 64))

    def moved(s: Span) -> Span:
        return dataclasses.replace(s, offset=s.offset + distance) if s.buffer is Buffer.STAGING else s

    other = rewritten(chosen, lambda c: (respanned(c, moved),))
    other = dataclasses.replace(other, staging_bytes=tuple(n + max(0, distance) for n in chosen.staging_bytes))
    return tuple(other if program is chosen else program for program in programs)


def _frozen(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """One is frozen among others with epochs, or one of the others is not."""
    chosen = rng.choice(programs)
    try:
        other = freeze(chosen)
    except ValueError:
        return _order(programs, rng)
    return tuple(other if program is chosen else program for program in programs)


DISORDERS: dict[str, Callable[[Sequence[Program], random.Random], tuple[Program, ...]]] = {
    "order of programs": _order,
    "program left out": _left_out,
    "program once more": _once_more,
    "flags of another": _flags_of_another,
    "staging of another": _staging_of_another,
    "frozen among others": _frozen,
}
"""Every mistake in a sequence by name."""

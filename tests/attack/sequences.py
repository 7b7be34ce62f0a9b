"""Calls of one communicator in the orders that it makes; their programs share flags and staging, or take turns."""

from __future__ import annotations

import dataclasses
import random

from alternating import Alternation, alternation, flags_of, staging_of

from attack.contracts import own
from attack.edits import reflagged, respanned, rewritten
from attack.programs import WORLDS, collective, formed, program
from sidelane.program.collective import REDUCING, SLOT_ALIGNMENT, Buffer, Kind, Span
from sidelane.program.ir import Flag, Program

SLOT_BYTES = 256
"""Of a program that takes turns: what a rank sends at most."""

MOVING = tuple(kind for kind in Kind if kind not in REDUCING)


def sequence(rng: random.Random) -> tuple[Program, ...]:
    """One round of programs, each an invocation: alone, or up to eight."""
    ranks = rng.choice(WORLDS)
    style = rng.choice(("one",) * 5 + ("own",) + ("eager", "eager", "frozen", "turns", "graph", "mixed"))
    if style == "one":
        return (program(rng, ranks),)
    if style == "own":
        return (formed(own(rng, ranks), rng),)
    ranks = min(ranks, 5)
    if style == "eager":
        return tuple(_eager(rng, ranks) for _ in range(rng.choice((2, 2, 3, 4))))
    if style == "frozen":
        return tuple(program(rng, ranks, "frozen") for _ in range(rng.choice((2, 2, 3))))
    if style == "turns":
        return _turns(rng, ranks, rng.choice((2, 2, 4)), frozen=rng.random() < 0.5)
    if style == "graph":
        return _graph(rng, ranks)
    return _mixed(rng, ranks)


def behind(given: Program, flags: int, staging: int) -> Program:
    """The same program with flags and staging that others do not have."""

    def span(s: Span) -> Span:
        return dataclasses.replace(s, offset=s.offset + staging) if s.buffer is Buffer.STAGING else s

    moved = rewritten(given, lambda c: (respanned(c, span),))
    sizes = tuple(size + staging for size in given.staging_bytes)
    moved = dataclasses.replace(moved, staging_bytes=sizes)
    return reflagged(moved, lambda f: Flag(f.rank, f.index + flags), given.flag_count + flags)


def _eager(rng: random.Random, ranks: int) -> Program:
    return program(rng, ranks, rng.choice(("plain", "plain", "stamped", "prelaunched")))


def _alternation(rng: random.Random, ranks: int, *, frozen: bool) -> Alternation:
    largest = SLOT_BYTES // ranks
    given = collective(rng, rng.choice(MOVING), ranks, rng.choice((min(9, largest), largest)))
    return alternation(given, frozen=frozen, slot_bytes=SLOT_BYTES)


def _turns(rng: random.Random, ranks: int, calls: int, *, frozen: bool) -> tuple[Program, ...]:
    """Calls in turns 0, 1, 0, 1 ..., each of another collective, or two of the same."""
    made = [_alternation(rng, ranks, frozen=frozen) for _ in range(calls)]
    if rng.random() < 0.3:
        made = made[:1] * calls
    return tuple(each.turns[number % 2] for number, each in enumerate(made))


def _graph(rng: random.Random, ranks: int) -> tuple[Program, ...]:
    """An opening, then turns 1, 0, 1 ...; graphs are replayed in any order, each as it is."""
    calls: list[Program] = []
    for _ in range(rng.choice((1, 1, 2))):
        for number in range(rng.choice((1, 2, 3))):
            made = _alternation(rng, ranks, frozen=True)
            opening = made.opening
            assert opening is not None
            calls.append(made.turns[number % 2] if number else opening)
    return tuple(calls)


def _mixed(rng: random.Random, ranks: int) -> tuple[Program, ...]:
    """Eager calls, captured ones with flags of their own, turns and graphs with flags and slots of their own."""
    eager = [_eager(rng, ranks) for _ in range(rng.choice((1, 2)))]
    captured = [program(rng, ranks, "frozen") for _ in range(rng.choice((0, 1, 1)))]
    turns = _turns(rng, ranks, rng.choice((0, 2, 2)), frozen=False)
    graph = _graph(rng, ranks) if rng.random() < 0.3 else ()
    flags = max(p.flag_count for p in (*eager, *captured))
    staging = -(-max(max(p.staging_bytes) for p in (*eager, *captured)) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    turn_flags, slots = flags_of(ranks), staging_of(SLOT_BYTES)
    rows = [
        eager,
        [behind(p, flags, 0) for p in captured],
        [behind(p, 2 * flags, staging) for p in turns],
        [behind(p, 2 * flags + turn_flags, staging + slots) for p in graph],
    ]
    # Each row in its own order, the rows in any.
    order = [k for k, row in enumerate(rows) for _ in row]
    rng.shuffle(order)
    waiting = [iter(row) for row in rows]
    return tuple(next(waiting[k]) for k in order)

"""How the next step is chosen: beside random speeds, schedules that look for trouble.

Everybody who can step has a key, and the smallest one goes next. A *style* gives a function that says what key an actor
gets when it has stepped, or when a signal has woken it. So one loop runs them all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from sidelane.program.ir import Engine


class Event(IntEnum):
    """What an actor has done."""

    BLOCKED = 0
    STEPPED = 1
    MOVED_PIECE = 2
    SIGNALLED = 3
    WOKEN = 4
    ENDED = 5


class Actor(NamedTuple):
    """Who steps: the queue of an engine in all invocations of a program, or (without an engine) a rank's caller."""

    rank: int
    engine: Engine | None = None


Key = Callable[[int, float, int], float]
"""From the number of an actor, the key with which it stepped and what it has done (or WOKEN) to its next key."""

Style = Callable[[Sequence[Actor], random.Random, int], Key]
"""From all actors and about how many steps there will be to a way of choosing."""

_LATE = 1e12
"""More than any key becomes: who has it steps when nobody else can."""


def speeds(actors: Sequence[Actor], rng: random.Random, length: int) -> Key:
    """Random speeds: of ranks, and of everybody."""
    return _paced(_paces(actors, rng), rng)


def starved(actors: Sequence[Actor], rng: random.Random, length: int) -> Key:
    """A rank, or a few actors, step only if nobody else can."""
    victims, key = _some(actors, rng), speeds(actors, rng, length)
    return lambda actor, now, event: key(actor, now % _LATE, event) + (_LATE if actor in victims else 0)


def ahead(actors: Sequence[Actor], rng: random.Random, length: int) -> Key:
    """A rank, or a few actors, run ahead as far as they can."""
    winners, key = _some(actors, rng), speeds(actors, rng, length)
    return lambda actor, now, event: key(actor, now % _LATE, event) + (0 if actor in winners else _LATE)


def asleep(actors: Sequence[Actor], rng: random.Random, length: int) -> Key:
    """Random speeds, and at a few points whoever steps falls asleep until nobody else can step."""
    key, points, steps = speeds(actors, rng, length), _points(rng, length), 0

    def chosen(actor: int, now: float, event: int) -> float:
        nonlocal steps
        steps += 1
        return key(actor, now % _LATE, event) + (_LATE if steps in points else 0)

    return chosen


def priorities(actors: Sequence[Actor], rng: random.Random, length: int) -> Key:
    """Random priorities; at a few points whoever steps gets the lowest one.

    "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (ASPLOS 2010): with d points, a mistake that
    takes d + 1 steps in one order is found with a probability that does not depend on how long everything else takes.
    """
    order = [float(place) for place in range(len(actors))]
    rng.shuffle(order)
    points, steps, lowest = _points(rng, length), 0, float(len(actors))

    def chosen(actor: int, now: float, event: int) -> float:
        nonlocal steps, lowest
        steps += 1
        if steps in points:
            lowest += 1
            order[actor] = lowest
        return order[actor]

    return chosen


def depth_first(actors: Sequence[Actor], rng: random.Random, length: int) -> Key:
    """Who steps mostly goes on until it has signalled or moved a piece; then who was woken last, or somebody, steps."""
    clock, draw = 0.0, rng.random
    eager, hasty = draw(), 0.3 * draw()

    def chosen(actor: int, now: float, event: int) -> float:
        nonlocal clock
        clock += 1
        if event == Event.STEPPED and draw() > hasty:
            return now - 1e-9
        if event == Event.WOKEN and draw() < eager:
            return -clock
        return clock * draw() if draw() < 0.5 else clock + 9 * draw()

    return chosen


STYLES: dict[str, tuple[Style, int]] = {
    "speeds": (speeds, 3),
    "starved": (starved, 2),
    "ahead": (ahead, 2),
    "asleep": (asleep, 3),
    "priorities": (priorities, 4),
    "depth_first": (depth_first, 2),
}
"""All styles, with how often each is taken."""

_NAMES = [name for name, (_, weight) in STYLES.items() for _ in range(weight)]


def drawn(rng: random.Random) -> str:
    """The name of a style."""
    return _NAMES[int(rng.random() * len(_NAMES))]


def _paces(actors: Sequence[Actor], rng: random.Random) -> list[float]:
    spread = rng.random() * 4
    of_rank = [10 ** (spread * rng.random()) for _ in range(1 + max(actor.rank for actor in actors))]
    return [of_rank[actor.rank] * 10 ** (spread * rng.random()) for actor in actors]


def _paced(paces: list[float], rng: random.Random) -> Key:
    draw = rng.random
    return lambda actor, now, event: now + paces[actor] * draw()


def _some(actors: Sequence[Actor], rng: random.Random) -> frozenset[int]:
    one = rng.randrange(len(actors))
    if rng.random() < 0.5:
        return frozenset(number for number, actor in enumerate(actors) if actor.rank == actors[one].rank)
    return frozenset([one, *rng.sample(range(len(actors)), rng.randrange(min(3, len(actors))))])


def _points(rng: random.Random, length: int) -> frozenset[int]:
    return frozenset(int(rng.random() * length) for _ in range(rng.choice((1, 1, 2, 2, 3, 5))))

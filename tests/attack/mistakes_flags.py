"""Mistakes in signals and waits: values, comparisons, counters, resets, flags that mean two things.

Some are none: a flag may count in steps of three, and be reset by who waits for it. ``verify`` has to tell.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from attack.edits import Place, at, changed, edited, places, reflagged, revalued, rewritten
from sidelane.program.ir import Command, Comparison, Flag, Program, Signal, SignalOp, Value, Wait

SLOPES = (1, 1, 2, 3, 10, 16, 33, 64)
LARGE = (2**31 - 1, 2**31 - 2, 2**31, 2**30, -1, -(2**31), 2**32 - 1, 2**32)


def value(program: Program, rng: random.Random) -> Program | None:
    """One use has another value."""
    place = _use(program, rng)
    choices = (Value(0), Value(1), Value(2), Value(-1, 1), Value(1, 1), Value(0, 2), Value(-1, 2), Value(1, 0))
    return place and changed(program, place, value=rng.choice(choices))


def slope(program: Program, rng: random.Random) -> Program | None:
    """Signals and waits of a flag count in larger steps: the same ones, or not."""
    flag = _flag(program, rng)
    if flag is None:
        return None
    step, base = rng.choice(SLOPES), rng.choice((0, 0, 0, 1, 2, 5, -1, -2))
    signals = Value(base, step)
    other = step if rng.random() < 0.7 else rng.choice(SLOPES) + rng.choice((0, 0, 1))
    waits = Value(base + rng.choice((0, 0, 1 - step, -step, -1, 1, rng.randint(-4, 4))), other)
    return revalued(program, flag, lambda use: signals if isinstance(use, Signal) else waits)


def base(program: Program, rng: random.Random) -> Program | None:
    """All signals or all waits of a flag have a base that is a little off, or all uses one far off."""
    flag, kind = _flag(program, rng), rng.choice((Signal, Wait))
    if flag is None:
        return None
    distance = rng.choice((-2, -1, 1, 2, 7)) if rng.random() < 0.7 else rng.choice((*LARGE, 2**31 - 5, 2**31 - 9, -20))
    everywhere = abs(distance) > 7 or rng.random() < 0.2

    def shifted(use: Signal | Wait) -> Value:
        given = use.value
        return Value(given.base + distance, given.per_epoch) if everywhere or isinstance(use, kind) else given

    return revalued(program, flag, shifted)


def large(program: Program, rng: random.Random) -> Program | None:
    """A constant near 2**31, or a slope: in all uses of a flag that are not 0, or in one."""
    given = Value(rng.choice(LARGE), rng.choice((0, 0, 0, 1, 2**30, 2**31 - 1, 2**31 + 1)))
    if rng.random() < 0.4:
        place = _use(program, rng)
        return place and changed(program, place, value=given)
    flag = _flag(program, rng)
    if flag is None:
        return None
    return revalued(program, flag, lambda use: use.value if use.value == Value(0) else given)


def asks_for_less(program: Program, rng: random.Random) -> Program | None:
    """A wait is content with less than it was."""
    place = _use(program, rng, Wait)
    if place is None:
        return None
    wait = at(program, place)
    assert isinstance(wait, Wait)
    less = Value(wait.value.base - rng.choice((1, 1, 2, 3)), wait.value.per_epoch)
    return changed(program, place, value=less, comparison=Comparison.GE)


def comparison(program: Program, rng: random.Random) -> Program | None:
    """A wait for equality where it was for at least, or the other way round."""
    place = _use(program, rng, Wait)
    if place is None:
        return None
    wait = at(program, place)
    assert isinstance(wait, Wait)
    return changed(program, place, comparison=_other(wait.comparison))


def add(program: Program, rng: random.Random) -> Program | None:
    """One signal adds where it was to set, or the other way round; or all signals of its flag but resets."""
    place = _use(program, rng, Signal)
    if place is None:
        return None
    signal = at(program, place)
    assert isinstance(signal, Signal)
    op = SignalOp.SET if signal.op is SignalOp.ADD else SignalOp.ADD
    if rng.random() < 0.4:
        return changed(program, place, op=op)

    def rewrite(command: Command) -> Sequence[Command]:
        if isinstance(command, Signal) and command.flag == signal.flag and command.value != Value(0):
            return (dataclasses.replace(command, op=op),)
        return (command,)

    return rewritten(program, rewrite)


def counter(program: Program, rng: random.Random) -> Program | None:
    """Two flags that a queue waits for become one to which their signals add; it may be reset, and asked for less."""
    queues = [q for q, queue in enumerate(program.queues) if len(_waited(queue.commands)) > 1]
    if not queues:
        return None
    q = rng.choice(queues)
    first, second = rng.sample(_waited(program.queues[q].commands), 2)
    weights = {first: rng.choice((1, 1, 2, 3)), second: rng.choice((1, 1, 2))}
    total = sum(weights.values()) - (0 if rng.random() < 0.7 else rng.choice((1, 2, -1)))
    wait = Wait(first, Value(total), rng.choice((Comparison.GE, Comparison.EQ)))
    reset = [] if rng.random() < 0.15 else [Signal(first, Value(0))]

    def merged(command: Command) -> Sequence[Command]:
        if not isinstance(command, Signal | Wait) or command.flag not in weights:
            return (command,)
        if isinstance(command, Signal):
            is_reset = command.value == Value(0)
            return () if is_reset else (Signal(first, Value(weights[command.flag]), SignalOp.ADD),)
        return (wait, *reset) if command.flag == second else ()

    return rewritten(program, merged)


def raised(program: Program, rng: random.Random) -> Program | None:
    """A flag that followed epochs is set to a constant and reset by who waits for it: at once, later, or never."""
    flag = _flag(program, rng)
    if flag is None:
        return None
    up = Value(rng.choice((1, 1, 1, 2, 2**31 - 1)))
    wait = Wait(flag, up, rng.choice((Comparison.EQ, Comparison.GE)))

    def rewrite(command: Command) -> Sequence[Command]:
        if not isinstance(command, Signal | Wait) or command.flag != flag:
            return (command,)
        if isinstance(command, Wait):
            return (wait,)
        return () if command.value == Value(0) else (dataclasses.replace(command, value=up),)

    result = rewritten(program, rewrite)
    waits = [place for place in places(result, Wait) if at(result, place) == wait]
    if not waits or rng.random() < 0.1:
        return result
    q, c = waits[-1]
    commands = list(result.queues[q].commands)
    commands.insert(c + 1 if rng.random() < 0.7 else rng.randint(c + 1, len(commands)), Signal(flag, Value(0)))
    return edited(result, q, commands)


def reset(program: Program, rng: random.Random) -> Program | None:
    """A reset is left out, comes later or earlier or twice, or sets to something else."""
    resets = [place for place in places(program, Signal) if getattr(at(program, place), "value", None) == Value(0)]
    if not resets:
        return None
    q, c = rng.choice(resets)
    change = rng.choice(("leave out", "move", "twice", "value"))
    if change == "value":
        return changed(program, (q, c), value=Value(rng.choice((1, 2, -1))))
    commands = list(program.queues[q].commands)
    signal = commands[c] if change == "twice" else commands.pop(c)
    if change != "leave out":
        commands.insert(rng.randint(0, len(commands)), signal)
    return edited(program, q, commands)


def flag(program: Program, rng: random.Random) -> Program | None:
    """One use is of another flag."""
    place = _use(program, rng)
    if place is None or not program.flag_count:
        return None
    use = at(program, place)
    assert isinstance(use, Signal | Wait)
    return changed(program, place, flag=Flag(use.flag.rank, rng.randrange(program.flag_count)))


def shared(program: Program, rng: random.Random) -> Program | None:
    """Two flags of a rank are one: of two phases, two peers, or two engines."""
    one = _flag(program, rng)
    others = [f for f in _flags(program) if one and f.rank == one.rank and f != one]
    if not others:
        return None
    other = rng.choice(others)
    return reflagged(program, lambda f: one if one and f == other else f)


def rank(program: Program, rng: random.Random) -> Program | None:
    """A signal goes to another rank."""
    place = _use(program, rng, Signal)
    if place is None:
        return None
    signal = at(program, place)
    assert isinstance(signal, Signal)
    return changed(program, place, flag=Flag(rng.randrange(program.world_size), signal.flag.index))


def _other(given: Comparison) -> Comparison:
    return Comparison.EQ if given is Comparison.GE else Comparison.GE


def _use(program: Program, rng: random.Random, *kinds: type) -> Place | None:
    found = list(places(program, *(kinds or (Signal, Wait))))
    return rng.choice(found) if found else None


def _flags(program: Program) -> list[Flag]:
    uses = (at(program, place) for place in places(program, Signal, Wait))
    return list(dict.fromkeys(use.flag for use in uses if isinstance(use, Signal | Wait)))


def _flag(program: Program, rng: random.Random) -> Flag | None:
    found = _flags(program)
    return rng.choice(found) if found else None


def _waited(commands: Sequence[Command]) -> list[Flag]:
    return list(dict.fromkeys(command.flag for command in commands if isinstance(command, Wait)))

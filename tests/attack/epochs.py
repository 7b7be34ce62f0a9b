"""Which epochs the calls of a run have, and what the flags hold before the first one.

Epochs grow by any step, since other calls of the communicator come between. But no flag that is used is older than
``RENEWAL_CALLS``: before, a communicator renews its flags.
"""

from __future__ import annotations

import random

from attack.machine import Machine
from sidelane.program.ir import RENEWAL_CALLS

MASK = 0xFFFFFFFF


def drawn(machine: Machine, rng: random.Random) -> tuple[list[int], list[int]]:
    """Draw the epoch of each invocation and the value of each flag at the start."""
    flags = [0] * len(machine.flags)
    style = rng.random()
    if style < 0.4 or not machine.slopes:
        return _growing(1, machine, rng), flags
    if style < 0.55:
        return _growing(_far(machine, rng), machine, rng), flags
    if style < 0.7:
        return _growing(1, machine, rng, far=True), flags
    # A value passes 2**31 or 2**32 in one of the calls, or shortly before or behind them.
    slope = rng.choice(sorted(machine.slopes))
    turn = (1 << 31) * rng.choice((1, 2))
    first = turn // slope - rng.randint(-2, 2 * len(machine.programs))
    before = first - (rng.choice((1, 1, 2)) if rng.random() < 0.8 else _far(machine, rng))
    for flag, signals in machine.signals.items():
        base, slope = rng.choice(sorted(signals))
        flags[flag] = (base + slope * before) & MASK
    return _growing(first, machine, rng), flags


def _growing(first: int, machine: Machine, rng: random.Random, *, far: bool = False) -> list[int]:
    """Epochs in steps of 1 and 2; now and then of many, if ``far``, but once at most until every program has run."""
    leap = rng.randint(1, machine.period) if far else -1
    epochs = [first]
    for number in range(1, len(machine.programs)):
        leaps = far and number % machine.period == leap % machine.period
        epochs.append(epochs[-1] + (_far(machine, rng) if leaps else 2 if rng.random() < 0.3 else 1))
    return epochs


def _far(machine: Machine, rng: random.Random) -> int:
    """Any number of calls, but so few that the oldest flag may be used after the calls of a period, too."""
    most = RENEWAL_CALLS - 2 * machine.period - 2
    return most if rng.random() < 0.3 else int(most ** rng.random())

"""Which launches of a pair are worth all rounds: a strategy may have many calls, of which it needs the fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from sidelane.c3.strategy import Strategy

WORTH = 1.15
"""A call whose best round of the look took longer than that many times the best of its strategy goes. Rounds of one
launch differ by some percent, and by half where a kernel runs beside a GEMM or in turns with it."""


class Labelled(Protocol):
    """A way to call the collective of a pair."""

    @property
    def label(self) -> str: ...


C = TypeVar("C", bound=Labelled)

Launches = dict[str, tuple[C, Callable[[], None]]]
"""Calls, and what launches them with the GEMM or alone, by names."""

Planned = Mapping[str, tuple[Strategy, C, int]]
"""A strategy, a call and units taken from the GEMM, by names."""


class Looks(Protocol):
    """What measures in few rounds (``c3.run.Instruments``)."""

    def look(self, runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Sequence[float]]: ...


def aliases_of(planned: Planned[C]) -> dict[str, str]:
    """Names of launches that are the same as another one: of strategies that would take units, and take none.

    Returns:
        The name of that other one, by name.
    """
    plain = {
        (dataclasses.replace(strategy, name="", recipe="", preference=0), run.label): label
        for label, (strategy, run, _) in planned.items()
        if strategy.partition is None
    }
    found = {}
    for label, (strategy, run, units) in planned.items():
        if strategy.partition is not None and not units:
            twin = dataclasses.replace(strategy, name="", recipe="", preference=0, partition=None)
            if (twin, run.label) in plain:
                found[label] = plain[twin, run.label]
    return found


def narrowed(planned: Planned[C], launches: Launches[C], instruments: Looks) -> Launches[C]:
    """What is left of launches after a look at those that have rivals. Collective.

    Args:
        planned: what each of them is.
        launches: that are right.
        instruments: that look.
    """
    rivals: dict[tuple[str, int], list[str]] = {}
    for label in launches:
        strategy, _, units = planned[label]
        rivals.setdefault((strategy.name, units), []).append(label)
    asked = [label for labels in rivals.values() if len(labels) > 1 for label in labels]
    if not asked:
        return launches
    looked = instruments.look({label: launches[label][1] for label in asked})
    gone = set(asked) - lasting(rivals.values(), looked)
    return {label: launch for label, launch in launches.items() if label not in gone}


def lasting(rivals: Iterable[Sequence[str]], looked: Mapping[str, Sequence[float]]) -> set[str]:
    """Those of several groups of names that are as fast as the fastest of their group, or nearly.

    >>> sorted(lasting([("a", "b", "c")], {"a": [100.0, 180.0], "b": [110.0, 105.0], "c": [120.0, 116.0]}))
    ['a', 'b']
    """
    best_us = {label: min(times) for label, times in looked.items()}
    timed = [[label for label in labels if label in best_us] for labels in rivals]
    return {
        label
        for labels in timed
        for label in labels
        if best_us[label] <= WORTH * min(best_us[other] for other in labels)
    }

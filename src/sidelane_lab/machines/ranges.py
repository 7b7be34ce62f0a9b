"""Ranges of predictions: one number of a description at a time at each end of its plausible values, and squares add.

Every range of the laboratory is made this way: of claims, of curves in pictures, of tables. Of most numbers that are
changed a prediction does not take notice: it is :func:`remembered` by the sections that it depends on.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from sidelane_lab.machines.spec import Machine

Name = TypeVar("Name")
P = ParamSpec("P")
T = TypeVar("T")
Curves = Mapping[Name, Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Variation:
    """A machine with the number at ``path`` at one end of its range: the greatest plausible value, or the least."""

    path: str
    value: float
    high: bool
    machine: Machine


def variations(machine: Machine, numbers: Iterable[str] | None = None) -> Iterator[Variation]:
    """Yield the machine with one uncertain number at one end of its range, all in turn.

    Args:
        machine: described.
        numbers: sections, or single numbers (``dma.copy_us``), that count; None: all.
    """
    wanted = None if numbers is None else frozenset(numbers)
    for path, quantity in machine.quantities().items():
        if wanted is None or path in wanted or path.partition(".")[0] in wanted:
            for value in (quantity.low, quantity.high):
                if value is not None:
                    yield Variation(path, value, value == quantity.high, machine.with_value(path, value))


def ends(centre: float, varied: Iterable[float]) -> tuple[float, float]:
    """Return the ends of a range around a prediction, from its values with one number changed at a time.

    >>> ends(10.0, [13.0, 14.0, 9.0])
    (9.0, 15.0)
    """
    deviations = [value - centre for value in varied]
    below, above = (math.sqrt(sum(by * by for by in deviations if by * side > 0)) for side in (-1, 1))
    return centre - below, centre + above


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A curve, and the ends of its plausible values, point by point."""

    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def bands(
    machine: Machine, predict: Callable[[Machine], Curves[Name]], numbers: Iterable[str] | None = ()
) -> dict[Name, Band]:
    """Return the band of every curve.

    Args:
        machine: described.
        predict: every curve of a description, by name.
        numbers: that the curves depend on, as in :func:`variations`; none: bands without width.
    """
    varied = [predict(variation.machine) for variation in variations(machine, numbers)]
    found = {}
    for name, values in predict(machine).items():
        points = zip(values, *(other[name] for other in varied), strict=True)
        low, high = zip(*(ends(value, others) for value, *others in points), strict=True)
        found[name] = Band(tuple(map(float, values)), low, high)
    return found


class _Part:
    """A machine, equal to others that do not differ in some sections."""

    def __init__(self, machine: Machine, sections: tuple[str, ...]) -> None:
        self.machine = machine
        self.key = (machine.gpus, machine.nodes, *(getattr(machine, name) for name in sections))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Part) and self.key == other.key


def remembered(
    *sections: str, maxsize: int = 256
) -> Callable[[Callable[Concatenate[Machine, P], T]], Callable[Concatenate[Machine, P], T]]:
    """Remember what a function of a machine has returned, for all machines that are alike in what it depends on.

    Args:
        sections: of a description; the numbers of GPUs and nodes count besides.
        maxsize: results that are kept.
    """

    def decorate(function: Callable[Concatenate[Machine, P], T]) -> Callable[Concatenate[Machine, P], T]:
        @functools.lru_cache(maxsize=maxsize)
        def once(part: _Part, args: Any, named: Any) -> T:
            return function(part.machine, *args, **dict(named))

        @functools.wraps(function)
        def call(machine: Machine, *args: P.args, **named: P.kwargs) -> T:
            return once(_Part(machine, sections), args, tuple(named.items()))

        return typing.cast("Callable[Concatenate[Machine, P], T]", call)

    return decorate

"""How far predictions go with the plausible values of a description's numbers, one at a time; squares add."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from sidelane_lab.machines.spec import Machine

Name = TypeVar("Name")
Curves = Mapping[Name, Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A curve, and the ends of its plausible values, point by point."""

    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def bands(machine: Machine, predict: Callable[[Machine], Curves[Name]], numbers: Sequence[str]) -> dict[Name, Band]:
    """The band of every curve.

    Args:
        machine: described.
        predict: every curve of a description, by name.
        numbers: that the curves depend on: sections of the description, or single numbers (``dma.copy_us``).
    """
    centre = {name: np.asarray(values, dtype=float) for name, values in predict(machine).items()}
    below = {name: np.zeros_like(values) for name, values in centre.items()}
    above = {name: np.zeros_like(values) for name, values in centre.items()}
    for changed in variations(machine, numbers):
        for name, values in predict(changed).items():
            by = np.asarray(values, dtype=float) - centre[name]
            below[name] += np.where(by < 0, by, 0) ** 2
            above[name] += np.where(by > 0, by, 0) ** 2
    return {
        name: Band(tuple(values), tuple(values - np.sqrt(below[name])), tuple(values + np.sqrt(above[name])))
        for name, values in centre.items()
    }


def variations(machine: Machine, numbers: Sequence[str]) -> Iterator[Machine]:
    """The machine with one of some uncertain numbers, or of sections, at an end of its range, all in turn."""
    for path, quantity in machine.quantities().items():
        if path in numbers or path.partition(".")[0] in numbers:
            for value in (quantity.low, quantity.high):
                if value is not None:
                    yield machine.with_value(path, value)

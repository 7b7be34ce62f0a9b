"""Ranges of predictions: one number of a description at a time at each end of its plausible values, and squares add.

Every range of the laboratory is made this way: of claims, of curves in pictures, of tables. Of most numbers that are
changed a prediction does not take notice: it is :func:`remembered` by the sections that it depends on. The many
predictions of a range do not depend on each other, so that processes share them (:func:`predict_each`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import operator
import os
import signal
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from sidelane_lab.machines.spec import Machine

Name = TypeVar("Name")
P = ParamSpec("P")
T = TypeVar("T")
Curves = Mapping[Name, Sequence[float]]

MOST_PROCESSES = 8
"""Processes at the most that share the predictions of a range; each has a copy of what the others remember."""


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


def predict_each(
    varied: Iterable[Variation], predict: Callable[[Variation], T], progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Variation, T]]:
    """Yield each variation and its prediction, in order. Copies of this process predict, one a processor.

    Args:
        varied: variations.
        predict: returns what can be pickled, and the same in every process.
        progress: is called with the number and the name of each variation.

    Raises:
        RuntimeError: a copy ended before it had predicted its share.
    """
    every = list(varied)
    count = min(MOST_PROCESSES, len(every), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with contextlib.ExitStack() as stack:
        is_alone = count < 2 or multiprocessing.current_process().daemon  # which may have no children
        shares = [] if is_alone else [stack.enter_context(_share(every[n::count], predict)) for n in range(count)]
        for number, variation in enumerate(every):
            progress(f"{number + 1} of {len(every)}: {variation.path} = {variation.value:g}")
            yield variation, predict(variation) if is_alone else _received(shares[number % count])


@contextlib.contextmanager
def _share(some: Sequence[Variation], predict: Callable[[Variation], Any]) -> Iterator[Connection]:
    """Let a copy of this process predict, and return the end of a pipe that its predictions come out of."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    copy = multiprocessing.get_context("fork").Process(
        target=_predict_share, args=(some, predict, receiver, sender), daemon=True
    )
    with warnings.catch_warnings():  # threads that draw progress do not matter to a copy that draws nothing
        warnings.simplefilter("ignore", DeprecationWarning)
        copy.start()
    sender.close()
    try:
        yield receiver
    finally:
        receiver.close()
        copy.terminate()
        copy.join()


def _predict_share(
    some: Sequence[Variation], predict: Callable[[Variation], Any], receiver: Connection, sender: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits ends this one
    receiver.close()  # so that sending fails once that process is gone
    with contextlib.suppress(BrokenPipeError):
        for variation in some:
            try:
                sender.send((predict(variation), None))
            except Exception as problem:
                sender.send((None, problem))


def _received(share: Connection) -> Any:
    try:
        prediction, problem = share.recv()
    except EOFError:
        raise RuntimeError("predict_each: a process that predicts has ended early (killed for memory?)") from None
    if problem is not None:
        raise problem
    return prediction


def ends(centre: float, varied: Iterable[float]) -> tuple[float, float]:
    """Return the ends of a range around a prediction, from its values with one number changed at a time.

    >>> ends(10.0, [13.0, 14.0, 9.0])
    (9.0, 15.0)
    """
    deviations = [value - centre for value in varied]
    below, above = (math.sqrt(sum(by * by for by in deviations if by * side > 0)) for side in (-1, 1))
    return centre - below, centre + above


NEAR = 0.05
"""Share of a time within which it is one of two that were predicted."""


def nearest(measured: float, found: Sequence[float]) -> float:
    """Return which of several predictions a measured time is nearer to."""
    return found[0] if len(found) == 1 else min(found, key=lambda end: abs(end / measured - 1))


def in_between(measured: float, found: Sequence[float]) -> bool:
    """True if a measured time lies between both ends of a prediction, and near neither."""
    return min(found) < measured < max(found) and abs(nearest(measured, found) / measured - 1) > NEAR


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
    centre = predict(machine)  # first, for what it remembers
    varied = [found for _, found in predict_each(variations(machine, numbers), lambda one: predict(one.machine))]
    found = {}
    for name, values in centre.items():
        points = zip(values, *(other[name] for other in varied), strict=True)
        low, high = zip(*(ends(value, others) for value, *others in points), strict=True)
        found[name] = Band(tuple(map(float, values)), low, high)
    return found


class _Part:
    """A machine, equal to others that do not differ in some sections."""

    def __init__(self, machine: Machine, sections: tuple[str, ...]) -> None:
        self.machine = machine
        self.key = (machine.gpus, machine.nodes, operator.attrgetter(*sections)(machine))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Part) and self.key == other.key


def remembered(
    *sections: str, maxsize: int = 256
) -> Callable[[Callable[Concatenate[Machine, P], T]], Callable[Concatenate[Machine, P], T]]:
    """Remember what a function of a machine has returned, for all machines that are alike in what it depends on.

    Args:
        sections: of a description, or single numbers (``dma.copy_us``); those of GPUs and nodes count besides.
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

"""Ways to do one thing: what they are, their times, and what is wrong with them. ``measure.Meter`` compares ways.

This module does not load PyTorch, so that a study declares its ways beside its options.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The work of a sample.

    Attributes:
        run: does the work, or queues it on the current stream.
        repeats: times that a sample calls ``run``.
        calls: operations in all of them (a graph may hold several); the time is divided by it.
        ahead: times that a sample calls ``run`` and waits for it before all else. What ran last has the host's caches:
            without, every implementation would pay in its first calls for the one before it.
        hide_launch_us: hold the device back that long, so that the host has queued everything before the clock
            starts. 0: what the host takes is part of the time, as it is in an eager program.
        before: called ahead of all that, uncounted: what switches over from another job.
    """

    run: Callable[[], object]
    repeats: int = 1
    calls: int = 1
    ahead: int = 0
    hide_launch_us: float = 0.0
    before: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rounds:
    """Times of one job, one a round, in microseconds a call; the slowest rank's.

    Attributes:
        times_us: in the order of the rounds.
        late: rounds in which some rank's host had not queued everything when the clock started.
        apart_us: by how much the ends of the ranks lie apart, each counted from the barrier that lines them up.
    """

    times_us: tuple[float, ...]
    late: int = 0
    apart_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def skew_us(self) -> float | None:
        """Median of ``apart_us``."""
        return statistics.median(self.apart_us) if self.apart_us else None

    @property
    def p10_us(self) -> float:
        return _percentile(self.times_us, 10)

    @property
    def p90_us(self) -> float:
        return _percentile(self.times_us, 90)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Why something has no time. ``wrong``: it ran, and its output was wrong."""

    text: str
    wrong: bool = False


def outcome(rounds: Rounds | None, problem: Problem | None, said: str = "") -> dict[str, Any]:
    """Columns of a row: its times, unless there is a problem; whether it is right; and a note.

    Args:
        rounds: the times; None where there are none.
        problem: what is wrong; None: nothing.
        said: the note where nothing is.
    """
    usable = None if problem is not None else rounds
    return {
        "time_us": None if usable is None else usable.median_us,
        "p10_us": None if usable is None else usable.p10_us,
        "p90_us": None if usable is None else usable.p90_us,
        "correct": True if problem is None else False if problem.wrong else None,
        "note": said if problem is None else problem.text,
    }


class Way:
    """One way to do what others do, too. A study has a class of it for each kind.

    It writes ``fill``, ``run`` and ``error``; the other methods do nothing where a way has nothing to do for them.

    Attributes:
        label: name in errors.
        as_graph: it runs once, and is captured then, before it is checked.
        graphs: CUDA graphs that it has captured.
    """

    label = ""
    as_graph = False
    graphs: tuple[Any, ...] = ()

    def fill(self, seed: int) -> None:
        """Put in fresh inputs, which are the same for the same seed, and poison the outputs."""
        raise NotImplementedError

    def run(self) -> None:
        """Do it once."""
        raise NotImplementedError

    def run_again(self) -> None:
        """Do it for the last check: as often as shows what a first run does not."""
        self.run()

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the outputs of a run; None if nothing is."""
        raise NotImplementedError

    def capture(self) -> None:
        """Go over to a graph."""

    def settle(self) -> None:
        """Note what the library chose for the last call, after a right run; for a graph, while that was its capture."""

    def close(self) -> None:
        """Release what it holds. All ranks alike."""
        self.drop()

    def drop(self) -> None:
        """Release its graphs on this rank alone, whoever has them: jobs, and frames of an error."""
        for graph in self.graphs:
            graph.reset()
        self.graphs = ()


K = TypeVar("K", bound=Hashable)
W = TypeVar("W", bound=Way)


@dataclasses.dataclass(frozen=True, slots=True)
class WayOutcome(Generic[K, W]):
    """The outcome of one way.

    Attributes:
        key: what the study calls it by.
        way: the way; None where it could not be made.
        rounds: its times; None where it was not timed.
        problem: what is wrong with it; None: nothing.
    """

    key: K
    way: W | None
    rounds: Rounds | None
    problem: Problem | None


def _percentile(values: Sequence[float], percent: int) -> float:
    import numpy as np  # takes a while, and options do without

    return float(np.percentile(values, percent))

"""Watts of GPUs while something runs: power readings and the energy counter, side by side, from a thread."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sidelane.errors import SidelaneError
from sidelane_lab.studies.power.rows import SETTLE_S
from sidelane_lab.studies.power.sensors import PowerSensor

if TYPE_CHECKING:
    from sidelane_lab.harness.measure import Meter

INTERVAL_S = 0.005
"""Seconds between looks at the counters. The energy counter moves every 20 to 100 ms: its steps are known to 5 ms."""

SPREAD_PERCENT = 10.0
"""Percent by which rounds may differ without a note."""

MIN_TICKS = 3
"""Steps of the energy counter, at least, from which a rate is taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment; ``energy_mj`` is None where there is no such counter."""

    time_s: float
    watts: float
    energy_mj: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class MeanPower:
    """Mean power over a window.

    Attributes:
        counted_w: by the energy counter; None where there is none, or it hardly moved.
        sampled_w: mean of the power readings.
    """

    counted_w: float | None
    sampled_w: float


def draw_of(readings: Sequence[Reading], begin_s: float, end_s: float) -> MeanPower:
    """Mean power between two moments.

    The energy counter moves in steps: taken at arbitrary moments, a difference over half a second can be wrong by a
    fifth. So the rate is taken from the first step in the window to the last one.

    Raises:
        ValueError: no reading lies in the window.
    """
    inside = [reading for reading in readings if begin_s <= reading.time_s <= end_s]
    if not inside:
        raise ValueError(f"draw_of: no reading in the window (value={begin_s:.3f}..{end_s:.3f} s)")
    steps = [
        (after.time_s, after.energy_mj)
        for before, after in itertools.pairwise(inside)
        if after.energy_mj is not None and after.energy_mj != before.energy_mj
    ]
    counted = None
    if len(steps) >= MIN_TICKS:
        (first_s, first_mj), (last_s, last_mj) = steps[0], steps[-1]
        counted = (last_mj - first_mj) / 1e3 / (last_s - first_s)
    return MeanPower(counted, sum(reading.watts for reading in inside) / len(inside))


class Recorder:
    """Reads the counters all the time, from a thread, until it is closed.

    Args:
        sensor: of this rank's GPU.
        interval_s: between looks.
        clock: in seconds.
    """

    def __init__(
        self, sensor: PowerSensor, *, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sensor, self._interval_s, self._clock = sensor, interval_s, clock
        self._readings: list[Reading] = []
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sidelane-power", daemon=True)
        self._thread.start()

    def draw(self, begin_s: float, end_s: float) -> MeanPower:
        """Mean power between two moments of the clock; what was read before is forgotten.

        Raises:
            SidelaneError: the sensor has failed.
            ValueError: nothing was read in that time.
        """
        if self._error is not None:
            raise SidelaneError(f"power: reading the counters failed: {self._error}") from self._error
        found = draw_of(list(self._readings), begin_s, end_s)
        del self._readings[: max(0, len(self._readings) - 2)]
        return found

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                energy, watts = self._sensor.energy_mj(), self._sensor.watts()
            except Exception as problem:
                self._error = problem
                return
            self._readings.append(Reading(self._clock(), watts, energy))


@dataclasses.dataclass(frozen=True, slots=True)
class PowerRound:
    """One implementation in one round.

    Attributes:
        time_us: the slowest rank's time of a call.
        counted_w: watts by each rank's energy counter; None where it has none.
        sampled_w: watts by each rank's power readings.
    """

    time_us: float
    counted_w: tuple[float | None, ...]
    sampled_w: tuple[float, ...]

    @property
    def watts(self) -> tuple[float, ...]:
        """Watts of each rank: those that were counted, or else those that were read."""
        pairs = zip(self.counted_w, self.sampled_w, strict=True)
        return tuple(sampled if counted is None else counted for counted, sampled in pairs)

    @property
    def energy_mj(self) -> float:
        """Energy of all GPUs for one call: a GPU that waits for the slowest one draws power, too."""
        return sum(self.watts) * self.time_us / 1e3


def power_of(meter: Meter, recorder: Recorder, work: Callable[[], float]) -> PowerRound:
    """Do something on all ranks at once, and read the counters meanwhile. Collective.

    Args:
        meter: of this rank.
        recorder: of this rank's GPU.
        work: takes a while, and returns the microseconds of one call on this rank.
    """
    meter.agree(None)  # the ranks begin together, to a fraction of a millisecond
    begin = time.perf_counter()
    time_us = work()
    end = time.perf_counter()
    draw = recorder.draw(begin + min(SETTLE_S, (end - begin) / 4), end)
    counted = math.nan if draw.counted_w is None else draw.counted_w
    times, counts, samples = zip(*meter.of_all_ranks([time_us, counted, draw.sampled_w]), strict=True)
    return PowerRound(max(times), tuple(None if math.isnan(watt) else watt for watt in counts), tuple(samples))


class PairPower:
    """Measures on one rank, together with the others. All ranks make the same calls.

    Args:
        meter: how the ranks agree.
        recorder: of this rank's GPU; :meth:`close` closes it.
        seconds: for which each strategy runs.

    Attributes:
        found: mean watts of a GPU, and energy of all GPUs for one run of the pair in mJ, by strategy, of the pair that
            was measured last.
    """

    def __init__(self, meter: Meter, recorder: Recorder, seconds: float) -> None:
        self._meter, self._recorder, self._seconds = meter, recorder, seconds
        self.found: dict[str, tuple[float, float]] = {}

    def measure(self, strategy: str, launch: Callable[[], None], time_us: float) -> None:
        """Run a pair for the time that was asked for, and read the counters. Collective.

        Args:
            strategy: its name.
            launch: function that launches the pair on this rank.
            time_us: time of the pair, about, from which the number of runs follows.
        """
        runs = max(2, math.ceil(self._seconds * 1e6 / time_us))
        self._meter.finish("the pair before")

        def work() -> float:
            begin = time.perf_counter()
            for _ in range(runs):
                launch()
            self._meter.finish(f"{strategy}, again and again")
            return (time.perf_counter() - begin) * 1e6 / runs

        point = power_of(self._meter, self._recorder, work)
        self.found[strategy] = sum(point.watts) / len(point.watts), point.energy_mj

    def close(self) -> None:
        """End the thread that reads the counters."""
        self._recorder.close()


def figures_of(points: Sequence[PowerRound], idle_w: Sequence[float]) -> dict[str, Any]:
    """Return the columns of a row, means over rounds and ranks.

    Args:
        points: at least one; a round each.
        idle_w: watts of each rank's idle GPU.
    """
    energies = [point.energy_mj for point in points]
    idle_mj = [sum(idle_w) * point.time_us / 1e3 for point in points]
    watts = statistics.fmean(statistics.fmean(point.watts) for point in points)
    sampled = statistics.fmean(statistics.fmean(point.sampled_w) for point in points)
    counted = all(watt is not None for point in points for watt in point.counted_w)
    notes = [] if counted else ["not every GPU's energy counter moved: its power readings stand in"]
    spread = 100.0 * (max(energies) / min(energies) - 1.0) if min(energies) > 0 else 0.0
    if spread > SPREAD_PERCENT:
        notes.append(f"energy differs by {spread:.0f}% between rounds")
    return {
        "time_us": statistics.fmean(point.time_us for point in points),
        "watts": watts,
        "watts_sampled": sampled,
        "energy_mj": statistics.fmean(energies),
        "energy_above_idle_mj": statistics.fmean(e - i for e, i in zip(energies, idle_mj, strict=True)),
        "counters_agree_percent": 100.0 * sampled / watts if counted and watts > 0 else None,
        "note": "; ".join(notes),
    }

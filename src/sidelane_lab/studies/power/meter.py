"""Watts of one GPU while something runs: power readings and the energy counter, side by side, from a thread."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from sidelane.errors import SidelaneError
from sidelane.machine.power_sensor import PowerSensor

INTERVAL_S = 0.005
"""Between looks at the counters. The energy counter moves every 20 to 100 ms: its steps are known to 5 ms."""

MIN_TICKS = 3
"""Steps of the energy counter, at least, from which a rate is taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment; ``energy_mj`` is None where there is no such counter."""

    time_s: float
    watts: float
    energy_mj: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """Mean power over a window.

    Attributes:
        counted_w: by the energy counter; None where there is none, or it hardly moved.
        sampled_w: mean of the power readings.
    """

    counted_w: float | None
    sampled_w: float


def draw_of(readings: Sequence[Reading], begin_s: float, end_s: float) -> Draw:
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
    return Draw(counted, sum(reading.watts for reading in inside) / len(inside))


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

    def draw(self, begin_s: float, end_s: float) -> Draw:
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

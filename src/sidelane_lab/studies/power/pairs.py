"""Watts and energy of a GEMM next to a collective: the pair runs again and again under one strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sidelane_lab.cli.collectives import SETTLE_S
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.power.meter import PowerRound, Recorder


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
        self._meter.agree(None)  # the ranks begin together, to a fraction of a millisecond
        begin = time.perf_counter()
        for _ in range(runs):
            launch()
        self._meter.finish(f"{strategy}, again and again")
        end = time.perf_counter()
        draw = self._recorder.draw(begin + min(SETTLE_S, (end - begin) / 4), end)
        counted = math.nan if draw.counted_w is None else draw.counted_w
        everyone = self._meter.of_all_ranks([(end - begin) * 1e6 / runs, counted, draw.sampled_w])
        times, counts, samples = zip(*everyone, strict=True)
        point = PowerRound(max(times), tuple(None if math.isnan(watt) else watt for watt in counts), tuple(samples))
        self.found[strategy] = sum(point.watts) / len(point.watts), point.energy_mj

    def close(self) -> None:
        """End the thread that reads the counters."""
        self._recorder.close()

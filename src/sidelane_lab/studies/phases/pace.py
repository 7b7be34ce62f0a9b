"""Single calls on ranks that begin together, at moments that they have agreed on.

All processes of a machine share one monotonic clock, so nothing has to be exchanged around a call and no barrier runs
on the devices: what is timed is a call on an idle machine.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.phases.rig import TimedCall
from sidelane_lab.studies.phases.split import FIELDS

LATE_US = {"cpu": 500.0, "gpu": 5.0}
"""A call that begins this much too late on some rank does not count."""
SPARE_US = {"cpu": 3_000.0, "gpu": 250.0}
"""Between two calls, beyond what the slowest took."""
_LEAD_NS = 5_000_000
_SPIN_NS = 300_000


class Pacer:
    """Runs calls one at a time, taking turns, on all ranks alike.

    Args:
        meter: carries what the ranks tell each other.
    """

    def __init__(self, meter: Meter) -> None:
        self._kind = "cpu" if meter.device.type == "cpu" else "gpu"
        self._meter = meter

    def run(
        self,
        calls: Sequence[TimedCall | None],
        next_epoch: Callable[[], int],
        *,
        warmup: int,
        repeats: int,
        gap_us: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Time every call ``repeats`` times. Collective.

        Args:
            calls: the same number on every rank, in the same order; None where a rank has no part.
            next_epoch: number of the next call, the same on every rank.
            warmup: rounds before the measured ones, which also tell how far apart the calls have to be.
            repeats: measured rounds.
            gap_us: between calls in the warm-up.

        Returns:
            ``[ranks, calls, repeats, fields of Sample]`` with NaN where a rank had no part, and ``[calls, repeats]``,
            true where every rank began in time.
        """
        with _without_collections():
            first, _ = self._rounds(calls, next_epoch, warmup, [gap_us] * len(calls))
            totals = first[:, :, 1] if warmup else np.full((len(calls), 1), gap_us)
            worst = self._of_all_ranks(np.nan_to_num(np.median(totals, axis=1))).max(axis=0)
            gaps = [1.3 * float(us) + SPARE_US[self._kind] for us in worst]
            values, late = self._rounds(calls, next_epoch, repeats, gaps)
        return self._of_all_ranks(values), self._of_all_ranks(late).max(axis=0) == 0

    def _rounds(
        self, calls: Sequence[TimedCall | None], next_epoch: Callable[[], int], count: int, gaps: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        values = np.full((len(calls), count, FIELDS), np.nan)
        late = np.zeros((len(calls), count), dtype=bool)
        at = int(self._of_all_ranks(np.array([time.perf_counter_ns() + _LEAD_NS], dtype=np.float64)).max())
        for number in range(count):
            for index, call in enumerate(calls):
                epoch = next_epoch()
                if call is not None:
                    call.arm(epoch)
                    _wait_until(at)
                    begin = time.perf_counter_ns()
                    call.begin(epoch)
                    returned = time.perf_counter_ns()
                    call.finish()
                    known = time.perf_counter_ns()
                    values[index, number] = call.sample(begin, returned, known).values()
                    late[index, number] = begin - at > 1e3 * LATE_US[self._kind]
                at += int(1e3 * gaps[index])
        return values, late

    def _of_all_ranks(self, mine: np.ndarray) -> np.ndarray:
        """Return every rank's array, by rank."""
        return np.array(self._meter.of_all_ranks(mine.ravel().tolist())).reshape(-1, *mine.shape)


def _wait_until(at_ns: int) -> None:
    while (left := at_ns - time.perf_counter_ns()) > 0:
        if left > _SPIN_NS:
            time.sleep((left - _SPIN_NS) / 1e9)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collecting garbage takes longer than what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

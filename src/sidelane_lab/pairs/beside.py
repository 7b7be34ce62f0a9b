"""Ways to run a collective, each alone and next to one GEMM that the collective is released ahead of."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sidelane.c3.partitions import PairStreams
from sidelane.c3.strategies import named
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Job, Rounds, WayOutcome
from sidelane_lab.pairs.pair import HIDE_LAUNCH_US, GemmRun, Pair, PairLaunch, Workers
from sidelane_lab.pairs.workload import Gemm, ideal_speedup, percent_of_ideal, possible_percent, speedup

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTimes:
    """Times of a pair, microseconds, one a round: the GEMM and the fastest collective alone, its own, and both."""

    gemm: Sequence[float]
    best: Sequence[float]
    alone: Sequence[float]
    together: Sequence[float]

    def columns(self) -> dict[str, Any]:
        """Return what a row has of them: ratios in each round first, then medians; of percents also the ends."""
        rounds = zip(self.gemm, self.best, self.together, strict=True)
        percents = self._percents()
        return {
            "gemm_us": statistics.median(self.gemm),
            "comm_us": statistics.median(self.alone),
            "best_comm_us": statistics.median(self.best),
            "speedup": statistics.median(speedup(*times) for times in rounds),
            "ideal": statistics.median(map(ideal_speedup, self.gemm, self.best)),
            "percent_of_ideal": possible_percent(self.percent_of_ideal()),
            "percent_least": min(percents, default=None),
            "percent_most": max(percents, default=None),
        }

    def percent_of_ideal(self) -> float | None:
        """Return the median percent of ideal, where most rounds have one."""
        defined = self._percents()
        return statistics.median(defined) if 2 * len(defined) > len(self.together) else None

    def _percents(self) -> list[float]:
        found = [percent_of_ideal(*times) for times in zip(self.gemm, self.best, self.together, strict=True)]
        return [percent for percent in found if percent is not None]


class BesideGemm(PairLaunch):
    """A collective next to a GEMM.

    Args:
        call: the collective; ``start`` begins it.
        gemm: the GEMM, whose inputs are there.
        pair: what launches both.
    """

    def __init__(self, call: Any, gemm: GemmRun, pair: Pair) -> None:
        super().__init__(f"{call.label}, next to a GEMM", pair.launch(named("conccl"), call), call, (gemm,))
        self.call: Any = call

    def settle(self) -> None:
        self.call.settle()

    def close(self) -> None:
        self.call.close()


def compare_beside(
    meter: Meter,
    makers: Mapping[K, Callable[[], Any]],
    gemm: Gemm,
    streams: PairStreams | None,
    seeds: Iterator[int],
    options: Any,
    alike: Callable[[K], object] = lambda key: None,
) -> list[tuple[WayOutcome[K, BesideGemm], dict[str, Any]]]:
    """Compare ways to run a collective, each alone and next to a GEMM, under the strategy ``conccl``. Collective.

    Args:
        meter: of this rank.
        makers: functions that make the ways, with ``start`` to begin one.
        gemm: the GEMM.
        streams: of both, on an accelerator.
        seeds: gives seeds, the same on every rank.
        options: of the study: ``warmup`` and ``repeats``.
        alike: what ways have in common that do the same; the fastest of these alone is the ideal's collective.

    Returns:
        Each way with its times next to the GEMM, and the columns of the pair, which are empty where it has no times.
    """
    times: dict[Any, Rounds] = {}
    with meter.on_stream(), Workers() as workers:
        product = GemmRun(gemm, meter.device)
        product.fill(next(seeds))
        pair = Pair(product, streams, workers)

        def paired(make: Callable[[], Any]) -> BesideGemm:
            return BesideGemm(make(), product, pair)

        def timed(ready: dict[K, BesideGemm]) -> dict[K, Rounds]:
            job = functools.partial(Job, hide_launch_us=0.0 if meter.device.type == "cpu" else HIDE_LAUNCH_US)
            jobs: dict[Any, Job] = {"gemm": job(product.run)} if ready else {}
            for key, way in ready.items():
                jobs |= {(key, "alone"): job(way.call.run), (key, "both"): job(way.run)}
            times.update(meter.in_turns(jobs, options))
            return {key: times[key, "both"] for key in ready}

        found = meter.compare({key: functools.partial(paired, make) for key, make in makers.items()}, seeds, timed)
    alone = {one.key: times[one.key, "alone"].times_us for one in found if one.problem is None}
    measured = []
    for one in found:
        columns: dict[str, Any] = {}
        if one.rounds is not None and one.problem is None:
            same = [us for key, us in alone.items() if alike(key) == alike(one.key)]
            best = min(same, key=statistics.median)
            columns = RoundTimes(times["gemm"].times_us, best, alone[one.key], one.rounds.times_us).columns()
        measured.append((one, columns))
    return measured

"""The papers' studies on a described machine, and their averages."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

from sidelane.c3.strategies import named
from sidelane.program.collective import Kind
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import PUBLISHED_VARIANTS, dma_run, library_us
from sidelane_lab.model.strategies import Prediction, partitions, predict, predictable
from sidelane_lab.pairs.workload import C3Class, Workload, ideal_speedup, parse_gemm

# Table II of the ConCCL paper, with the class that the paper measured.
TABLE_II: dict[str, C3Class] = {
    **dict.fromkeys(
        ("mb1_896M", "mb2_3.25G", "mb1_4G", "mb1_6G", "cb3_512M", "cb4_512M", "cb5_1.63G", "cb4_1G"), C3Class.G_LONG
    ),
    **dict.fromkeys(("mb1_13G", "cb2_3.25G", "cb4_2.5G", "cb1_896M", "cb5_20G"), C3Class.C_LONG),
    **dict.fromkeys(("mb2_26.5G", "cb5_13G"), C3Class.GC_EQUAL),
}
COLLECTIVES = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
SIZES = tuple(1 << power for power in range(10, 33))
"""1 KB to 4 GB, as the DMA collectives paper studies."""


@dataclasses.dataclass(frozen=True, slots=True)
class C3Study:
    """Every pair of Table II with both collectives under every strategy."""

    rows: tuple[Prediction, ...]

    def select(
        self, strategy: str, collective: Kind | None = None, c3_class: C3Class | None = None
    ) -> list[Prediction]:
        """Return rows of a strategy, of one collective and one class of Table II if asked for."""
        return [
            row
            for row in self.rows
            if row.strategy == strategy
            and collective in (None, row.workload.collective)
            and c3_class in (None, TABLE_II[pair_name(row)])
        ]

    def percent(self, strategy: str, collective: Kind | None = None, c3_class: C3Class | None = None) -> float:
        """Return the percent of the papers' ideal of a group, by mean speedups: the paper's 21% are of 1.13 and 1.6."""
        rows = self.select(strategy, collective, c3_class)
        return percent_of_means(row.speedup for row in rows) / percent_of_means(row.ideal for row in rows) * 100

    def percent_of_fastest(self, strategy: str) -> float:
        """Return the percent of ideal of all pairs from their mean speedups: by the fastest collective, not RCCL's."""
        rows = self.select(strategy)
        reached = percent_of_means((row.gemm_us + row.best_comm_us) / row.time_us for row in rows)
        return reached / percent_of_means(ideal_speedup(row.gemm_us, row.best_comm_us) for row in rows) * 100

    def best_percent(self, strategies: Sequence[str]) -> float:
        """Return the same for the best of several strategies in each scenario."""
        by_strategy = [self.select(strategy) for strategy in strategies]
        best = [max(rows, key=lambda row: row.speedup) for rows in zip(*by_strategy, strict=True)]
        return percent_of_means(r.speedup for r in best) / percent_of_means(r.ideal for r in best) * 100


def percent_of_means(speedups: Iterable[float]) -> float:
    """Return the gain of the mean speedup."""
    return statistics.fmean(speedups) - 1.0


def pair_name(row: Prediction) -> str:
    """Return the name of a row's pair in Table II."""
    return next(name for name in TABLE_II if table_ii_workload(name, row.workload.collective) == row.workload)


def c3_study(
    machine: Machine,
    strategies: Sequence[str] | None = None,
    *,
    version: str = "000",
    progress: Callable[[str], None] | None = None,
) -> C3Study:
    """Predict the study of the ConCCL paper: 15 pairs, 2 collectives.

    Figure 8 has a bar for each collective and class, and of the partitions that were swept it plots "the best
    performing one" (V-B): here the partition with the highest mean speedup of the bar's pairs. ``predict`` takes the
    best for a single pair.

    Args:
        machine: where.
        strategies: names; None takes all that the model speaks to.
        version: of the paper, where its two versions disagree: ``000``, or ``002`` (caches are written back before
            DMA).
        progress: told the name of each pair before it is simulated.

    Raises:
        ValueError: no such version.
    """
    if version not in ("000", "002"):
        raise ValueError(f"c3_study: version (value={version!r}, allowed=000, 002)")
    write_back = version == "002"
    chosen = predictable() if strategies is None else tuple(map(named, strategies))
    rows = []
    swept: dict[tuple[str, Kind, C3Class], dict[int, list[Prediction]]] = {}
    for name in TABLE_II:
        for kind in COLLECTIVES:
            if progress is not None:
                progress(f"{name} {kind}")
            workload = table_ii_workload(name, kind)
            for strategy in chosen:
                if strategy.partition is None:
                    rows.append(predict(machine, workload, strategy, write_back=write_back))
                    continue
                bar = swept.setdefault((strategy.name, kind, TABLE_II[name]), {})
                for units in partitions(machine):
                    bar.setdefault(units, []).append(predict(machine, workload, strategy, units=units))
    for bar in swept.values():
        rows += max(bar.values(), key=lambda alike: percent_of_means(row.speedup for row in alike))
    places = {
        (table_ii_workload(name, kind), strategy.name): place
        for place, (name, kind, strategy) in enumerate(itertools.product(TABLE_II, COLLECTIVES, chosen))
    }
    return C3Study(tuple(sorted(rows, key=lambda row: places[row.workload, row.strategy])))


def table_ii_workload(name: str, kind: Kind) -> Workload:
    """Return a pair of Table II. Its sizes are rounded (1.63G), so bytes are rounded to whole kilobytes."""
    gemm, _, size = name.partition("_")
    unit = {"M": 1 << 20, "G": 1 << 30}[size[-1]]
    return Workload(parse_gemm(gemm), kind, round(float(size[:-1]) * unit / 1024) * 1024)


@dataclasses.dataclass(frozen=True, slots=True)
class DmaStudy:
    """Times of the DMA collectives paper's variants and the library, by (collective, variant, prelaunched, bytes)."""

    dma_us: dict[tuple[Kind, str, bool, int], float]
    library_us: dict[tuple[Kind, int], float]

    def best(self, kind: Kind, nbytes: int, tie: float = 0.02) -> tuple[str, bool]:
        """Return the variant to take: the fastest, but without prelaunch where that loses less than ``tie``."""
        options = {(v, p): us for (k, v, p, n), us in self.dma_us.items() if k is kind and n == nbytes}
        variant, prelaunched = min(options, key=lambda key: options[key])
        plain = options[variant, False] <= options[variant, prelaunched] * (1 + tie)
        return variant, prelaunched and not plain

    def best_us(self, kind: Kind, nbytes: int) -> float:
        """Return the time of the fastest variant."""
        return min(us for (k, _, _, n), us in self.dma_us.items() if k is kind and n == nbytes)


def dma_study(machine: Machine, sizes: Sequence[int] = SIZES) -> DmaStudy:
    """Predict the study of the DMA collectives paper: every variant, with and without prelaunch, by size."""
    times = {(kind, n): library_us(machine, kind, n) for kind in COLLECTIVES for n in sizes}
    return DmaStudy(_dma_times(machine, tuple(sizes)), times)


@remembered("gpu", "links", "dma", maxsize=128)
def _dma_times(machine: Machine, sizes: tuple[int, ...]) -> dict[tuple[Kind, str, bool, int], float]:
    return {
        (kind, variant, prelaunched, nbytes): dma_run(machine, kind, nbytes, variant, prelaunched).time_us
        for kind in COLLECTIVES
        for variant in PUBLISHED_VARIANTS[kind]
        for prelaunched in (False, True)
        for nbytes in sizes
    }

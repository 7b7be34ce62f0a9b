"""The papers' studies on a described machine, and their averages."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from sidelane.c3.strategies import named
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import PUBLISHED_VARIANTS, dma_run, library_us
from sidelane_lab.model.strategies import Prediction, partitions, predict, predictable
from sidelane_lab.pairs.workload import C3Class, Workload, parse_gemm

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


def percent_of_means(speedups: Iterable[float]) -> float:
    """Return the gain of the mean speedup."""
    return statistics.fmean(speedups) - 1.0


def c3_study(machine: Machine, strategies: Sequence[str] = (), *, version: str = "000") -> list[Prediction]:
    """Predict the study of the ConCCL paper: 15 pairs, 2 collectives.

    Figure 8 has a bar for each collective and class, and of the partitions that were swept it plots "the best
    performing one" (V-B): here the partition with the highest mean speedup of the bar's pairs. ``predict`` takes the
    best for a single pair.

    Args:
        machine: where.
        strategies: names; empty takes all that the model speaks to.
        version: of the paper, where its two versions disagree: ``000``, or ``002`` (caches are written back before
            DMA).

    Raises:
        ValueError: no such version.
    """
    if version not in ("000", "002"):
        raise ValueError(f"c3_study: version (value={version!r}, allowed=000, 002)")
    write_back = version == "002"
    chosen = tuple(map(named, strategies)) or predictable()
    rows = []
    swept: dict[tuple[str, Kind, C3Class], dict[int, list[Prediction]]] = {}
    for name in TABLE_II:
        for kind in COLLECTIVES:
            workload = table_ii_workload(name, kind)
            for strategy in chosen:
                if strategy.partition is None:
                    rows.append(predict(machine, workload, strategy, write_back=write_back))
                    continue
                bar = swept.setdefault((strategy.code, kind, TABLE_II[name]), {})
                for units in partitions(machine):
                    bar.setdefault(units, []).append(predict(machine, workload, strategy, units=units))
    for bar in swept.values():
        rows += max(bar.values(), key=lambda alike: percent_of_means(row.speedup for row in alike))
    places = {
        (table_ii_workload(name, kind), strategy.code): place
        for place, (name, kind, strategy) in enumerate(itertools.product(TABLE_II, COLLECTIVES, chosen))
    }
    return sorted(rows, key=lambda row: places[row.workload, row.strategy])


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


def dma_study(machine: Machine, sizes: Sequence[int] = SIZES) -> DmaStudy:
    """Predict the study of the DMA collectives paper: every variant, with and without prelaunch, by size."""
    engines = {
        (kind, variant, prelaunched, nbytes): dma_run(machine, kind, nbytes, variant, prelaunched).time_us
        for kind in COLLECTIVES
        for variant in PUBLISHED_VARIANTS[kind]
        for prelaunched in (False, True)
        for nbytes in sizes
    }
    return DmaStudy(engines, {(kind, n): library_us(machine, kind, n) for kind in COLLECTIVES for n in sizes})

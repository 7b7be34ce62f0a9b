"""Panels of what was measured, in the form of the papers' figures: a function a figure, of the rows of one file."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.study import AS_GOOD, PRELAUNCHED
from sidelane_lab.model.operators import ORDERS
from sidelane_lab.model.panels import Panel, PublishedValue
from sidelane_lab.model.study import COLLECTIVES, TABLE_II
from sidelane_lab.pairs.workload import TABLE_I, Bound, C3Class, parse_gemm
from sidelane_lab.papers.conccl import BOUNDS, MB, SHADES, slowdown_mark, units_axes
from sidelane_lab.papers.dma import (
    POWER_STYLES,
    all_variants,
    producer_mark,
)
from sidelane_lab.papers.files import ResultFile
from sidelane_lab.papers.fused import FUSED_WORDS, NORMALISED, lower_marks
from sidelane_lab.papers.measurements import (
    FIFTH,
    ChainReadings,
    CollectiveReadings,
    FusedReadings,
    PairReadings,
    PowerReadings,
    UnitReadings,
    normalised_between_nodes,
    pair_name,
    table_i_times,
)
from sidelane_lab.papers.rows import aligned, exact, size_places

PROGRAMS = 16
"""Programs on a compute unit that count as full occupancy: the most that are measured."""


def by_size(curves: Mapping[str, Mapping[int, float]], **fields: Any) -> list[Panel]:
    """Return a panel of curves over bytes; none where there is no point."""
    sizes, bands = aligned(curves)
    if not sizes:
        return []
    return [Panel(curves=bands, **{**size_places(sizes), "xlabel": "bytes"}, **fields)]


def compute_units(file: ResultFile) -> list[Panel]:
    """Figure 5 of the ConCCL paper."""
    readings = UnitReadings(file)
    curves: dict[str, dict[str, dict[int, float]]] = {name: {} for name in (*BOUNDS, *map(str, COLLECTIVES))}
    for tag, curve in readings.gemms.items():
        curves[BOUNDS[tag in MB]][tag] = readings.slowdown(curve)
    for kind, curve in readings.collectives.items():
        curves[kind][f"NCCL, {format_bytes(readings.nbytes)}"] = readings.slowdown(curve)
    panels = []
    for name, found in curves.items():
        units, bands = aligned(found)
        if units:
            share = [round(lost / 304 * readings.units) for lost in (32, 64)]
            marks = [slowdown_mark(share)] if name == BOUNDS[False] else []
            panels.append(Panel(curves=bands, marks=marks, **units_axes(name, units)))
    return panels


def ideal(file: ResultFile) -> list[Panel]:
    """Figure 7 of the ConCCL paper."""
    pairs = PairReadings.of(file)
    curves = {str(kind): {pair_name(pair): pairs.ideal(pair) for pair in pairs.pairs(kind)} for kind in COLLECTIVES}
    others = [name for points in curves.values() for name in points if name not in TABLE_II]
    names, bands = aligned(curves, [*TABLE_II, *dict.fromkeys(others)])
    if not names:
        return []
    words = "GEMM and bytes of the collective"
    return [Panel(curves=bands, x=names, level=1, high=2.3, xlabel=words, ylabel="speedup over serial")]


def grouped(strategies: Sequence[str]) -> Callable[[ResultFile], list[Panel]]:
    """Figures 8 and 10 of the ConCCL paper: mean speedups by collective and measured class."""

    def panels(file: ResultFile) -> list[Panel]:
        pairs = PairReadings.of(file)
        groups = {
            f"{kind}\n{c3_class}": pairs.part(kind, c3_class)
            for kind in COLLECTIVES
            for c3_class in sorted(pairs.classes(kind))
        }
        return _speedup_bars({**groups, "all": pairs}, strategies)

    return panels


def grouped_by_bound(strategies: Sequence[str]) -> Callable[[ResultFile], list[Panel]]:
    """Figures 8 and 10 of the ConCCL paper with pairs of every class: by the limit of the GEMM and by class."""

    def panels(file: ResultFile) -> list[Panel]:
        pairs = PairReadings.of(file)
        groups = {f"{bound}\n{c3_class}": pairs.part(None, c3_class, bound) for bound in Bound for c3_class in C3Class}
        found = _speedup_bars({**groups, "all": pairs}, strategies)
        return [dataclasses.replace(panel, title=f"{file.where}, all classes") for panel in found]

    return panels


def _speedup_bars(groups: Mapping[str, PairReadings], strategies: Sequence[str]) -> list[Panel]:
    """Return a panel of mean speedups of groups of pairs; none without pairs."""
    known = {f"{name}\n({len(part.rows)})": part for name, part in groups.items() if part.rows}
    if not known:
        return []
    curves = {
        strategy: exact(
            [part.mean_speedup(strategy) if part.pairs(strategy=strategy) else math.nan for part in known.values()]
        )
        for strategy in strategies
        if any(part.pairs(strategy=strategy) for part in known.values())
    }
    ideals = tuple(statistics.fmean(map(part.ideal, part.rows)) for part in known.values())
    return [
        Panel(
            curves=curves,
            x=list(known),
            styles={strategy: (SHADES[strategy], 0) for strategy in strategies},
            marks=[PublishedValue("ideal", ideals, tuple(range(len(known))), line="", point="_")],
            level=1,
            high=2.25,
            xlabel="collective, or what limits the GEMM; which of the two takes longer; number of such pairs",
            ylabel="mean speedup over serial",
            legend={"ncols": len(strategies) + 1},
        )
    ]


def isolated(file: ResultFile) -> list[Panel]:
    """Figure 9 of the ConCCL paper: the library's time over that of ``pcpy``, both in graphs."""
    readings = CollectiveReadings(file)
    curves = {
        str(kind): {n: 1 / readings.behind(kind, ("pcpy",), [n]) for n in readings.sizes(kind, 1 << 20)}
        for kind in COLLECTIVES
    }
    return by_size(curves, level=1, low=0, ylabel="speedup over the library")


def power(file: ResultFile) -> list[Panel]:
    """Figure 15 of the DMA collectives paper."""
    return by_size(PowerReadings(file).watts, styles=POWER_STYLES, low=0, ylabel="W a GPU")


def producer(file: ResultFile) -> list[Panel]:
    """Figure 16 of the DMA collectives paper."""
    ratios = ChainReadings(file).ratios
    curves = {"GEMM, all-gather, GEMM in one graph": ratios}
    return by_size(curves, marks=[producer_mark(max(ratios, default=0))], level=1, ylabel="library / DMA")


def bars(op: str, words: str, mean_claim: str, best_claim: str) -> Callable[[ResultFile], list[Panel]]:
    """Figures 8 to 10 of the fused operators paper."""

    def panels(file: ResultFile) -> list[Panel]:
        found = {_short(shape): ratio for shape, ratio in FusedReadings(file).normalised(op).items()}
        return _normalised(found, words, mean_claim, best_claim)

    return panels


def _short(shape: str) -> str:
    r"""Return the numbers of a shape, below each other.

    >>> _short("batch 256, 64 tables a rank, pooling 70, dim 256"), _short("8192x4096, 16 tokens")
    ('256\n64\n70', '8192\n4096\n16')
    """
    cleaned = shape.partition(", dim")[0].partition(" a rank, rows")[0]
    numbers = [part for part in cleaned.replace("x", " ").replace(",", " ").split() if part.isdigit()]
    return "\n".join(numbers)


def _normalised(found: Mapping[str, float], words: str, mean_claim: str, best_claim: str) -> list[Panel]:
    marks = lower_marks(mean_claim, best_claim)
    curves = {FUSED_WORDS: exact(list(found.values()))}
    fields = {**NORMALISED, "high": max(1.35, 1.2 * max(found.values(), default=1))}
    return [Panel(curves=curves, x=list(found), marks=marks, xlabel=words, **fields)] if found else []


def between_nodes(file: ResultFile) -> list[Panel]:
    """Figure 12 of the fused operators paper: two GPUs as two nodes, over sockets."""
    found = {shape.replace(", ", "\n"): ratio for shape, ratio in normalised_between_nodes(file).items()}
    return _normalised(found, "batch, tables a GPU, pooling", "FU-EMB-03", "FU-EMB-04")


def occupancy(file: ResultFile) -> list[Panel]:
    """Figure 13 of the fused operators paper: programs on a compute unit stand in for workgroups."""
    times = FusedReadings(file).by_programs()
    usual = round(0.75 * PROGRAMS)
    if usual not in times:
        return []
    curve = {count / PROGRAMS: us / times[usual] for count, us in times.items()}
    shares, bands = aligned({"measured": curve})
    words = f"share of {PROGRAMS} programs on a compute unit"
    return [Panel(curves=bands, x=shares, log=False, low=0, xlabel=words, ylabel="time over that at 75%")]


def skew(file: ResultFile) -> list[Panel]:
    """Figure 14 of the fused operators paper, inside a node."""
    readings = FusedReadings(file)
    found = {order: readings.skew_percent(order) for order in ORDERS}
    if not all(found.values()):
        return []
    curves = {f"measured, mean of {len(found[ORDERS[0]])} shapes": exact([statistics.fmean(v) for v in found.values()])}
    return [Panel(curves=curves, x=ORDERS, xlabel="order of the work", ylabel="ends of ranks apart, %")]


def gemm_words(file: ResultFile) -> dict[str, str]:
    """Table I of the ConCCL paper: each GEMM alone, and how much a fifth of the units matters to it."""
    return {tag: alone_words(us, slower) for tag, (us, slower) in table_i_times(file).items()}


def alone_words(us: float, slower_percent: float) -> str:
    """Return a time alone, and by how much it is longer with a fifth of the compute units less, in words."""
    return f"{us / 1e3:.2f} ms; {slower_percent:+.0f}% with {100 * FIFTH:.0f}% of the units less"


def class_words(file: ResultFile) -> dict[str, str]:
    """Table II of the ConCCL paper: the class of each pair by its own times."""
    return PairReadings.of(file).class_words()


def best_words(kind: Kind) -> Callable[[ResultFile], dict[str, str]]:
    """Tables 1 and 2 of the DMA collectives paper: the fastest variant of each size, and how many are as good."""

    def words(file: ResultFile) -> dict[str, str]:
        readings = CollectiveReadings(file)
        variants = all_variants(kind)
        found = {}
        for nbytes in readings.sizes(kind):
            best, *others = readings.as_good(kind, variants, nbytes)
            rest = f" ({len(others)} more within {100 * AS_GOOD - 100:.0f}%)" if others else ""
            found[format_bytes(nbytes)] = best.replace(PRELAUNCHED, ", prelaunch") + rest
        return found

    return words


def gemm_sizes() -> dict[str, str]:
    """Return Table I of the ConCCL paper as published: size and bound."""
    bound = {"c": "compute-bound", "m": "memory-bound"}
    gemms = ((tag, parse_gemm(tag)) for tag in TABLE_I)
    return {tag: f"{one.m} x {one.n} x {one.k}, {bound[tag[0]]}" for tag, one in gemms}

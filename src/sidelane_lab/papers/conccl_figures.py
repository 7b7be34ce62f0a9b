"""Figures 5 to 10 and Tables I and II of the ConCCL paper: published, predicted and measured.

Figures 7, 8 and 10 are curves over rows of pairs, which the model fills as a measurement does. The others have a
reading for each: the model's collectives on copy engines go through AMD's runtime (figure 9), and ``tune --study c3``,
whose files have partitions (figure 5, Table I), is not predicted.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import BLUE, GREY, ORANGE, PURPLE, SKY, VERMILLION
from sidelane_lab.machines.load import named
from sidelane_lab.machines.ranges import Band, Curves, bands
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.kernels import dma_gangs, dma_us, library_gang
from sidelane_lab.model.panels import Panel, PublishedValue, over_sizes
from sidelane_lab.model.strategies import library_strategies, partitions
from sidelane_lab.model.study import COLLECTIVES, SIZES, TABLE_II
from sidelane_lab.pairs.isolated import COUNTERS
from sidelane_lab.pairs.workload import TABLE_I, Bound, C3Class, parse_gemm
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.conccl import LARGE, MB, MI300X, C3Context, gemm_gbps, pair_rows
from sidelane_lab.papers.figures import declared
from sidelane_lab.papers.files import ResultFile
from sidelane_lab.papers.measurements import (
    FIFTH,
    CollectiveReadings,
    PairReadings,
    UnitReadings,
    pair_name,
    table_i_times,
)
from sidelane_lab.papers.rows import RowFigure, aligned, by_size

SHADES = {"c3_base": GREY, "c3_sp": ORANGE, "c3_rp": VERMILLION, "c3_sp_rp": PURPLE, "conccl": SKY, "conccl_rp": BLUE}
PERCENTS = {
    "c3_base": "C3-BASE-02",
    "c3_sp": "C3-SP-01",
    "c3_rp": "C3-RP-01",
    "conccl": "CC-03",
    "conccl_rp": "CC-05",
}
"""Claims on the mean percent of ideal over all pairs."""
GIVEN_BYTES = (1 << 24, 1 << 27, LARGE)
"""Bytes of collectives that have some of the units."""


def _units_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    """Show the slowdown of GEMMs that lose compute units, and of collectives that have only some."""
    options = partitions(machine)

    def slower(changed: Machine) -> Curves[tuple[str, str]]:
        found: dict[tuple[str, str], list[float]] = {}
        for gemm in map(parse_gemm, TABLE_I):
            alone, units = gemm_us(changed, gemm), int(changed.gpu.units)
            slower_by = [gemm_us(changed, gemm, units - lost) / alone for lost in options]
            found[BOUNDS[gemm.tag in MB], gemm.tag] = slower_by
        for kind in COLLECTIVES:
            for nbytes in GIVEN_BYTES:
                alone = library_gang(changed, kind, nbytes).alone_us
                times = [library_gang(changed, kind, nbytes, units=units).alone_us for units in options]
                found[str(kind), format_bytes(nbytes)] = [us / alone for us in times]
        return found

    found = bands(machine, slower, ("matmul", "library") if ranges else ())
    marks = {BOUNDS[False]: [slowdown_mark()]} if machine.name == MI300X else {}
    return [
        Panel(
            curves={name[1]: band for name, band in found.items() if name[0] == panel},
            marks=marks.get(panel, ()),
            **units_axes(panel, options),
        )
        for panel in (*BOUNDS, *map(str, COLLECTIVES))
    ]


BOUNDS = ("compute-bound GEMM", "memory-bound GEMM")
"""Panels of GEMMs."""


def units_axes(panel: str, units: Sequence[int]) -> dict[str, Any]:
    """Return the axes of a panel of times by compute units (figure 5): of GEMMs, or of a collective."""
    return {
        "x": units,
        "ticks": {float(count): str(count) for count in units},
        "title": panel,
        "xlabel": "compute units lost" if panel in BOUNDS else "compute units given",
        "ylabel": "time over that with all of them",
    }


def slowdown_mark(units: Sequence[int] = (32, 64)) -> PublishedValue:
    """Return the mark of how much slower compute-bound GEMMs are at most, without so many compute units."""
    slow = tuple(1 + percent / 100 for percent in published()["C3-CU-07"]["value"])
    return PublishedValue("published, up to", slow, tuple(map(float, units)), line="")


def _bandwidth_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    """Memory bandwidth that each kernel uses alone, relative to the peak."""
    names = [*TABLE_I, *(f"{kind}\n{mover}" for kind in COLLECTIVES for mover in ("kernel", "DMA"))]

    def percents(changed: Machine) -> Curves[str]:
        moved = [gemm_gbps(changed, tag) for tag in TABLE_I]
        for kind in COLLECTIVES:
            moved += [library_gang(changed, kind, LARGE).memory_gbps, dma_gangs(changed, kind, LARGE)[0].memory_gbps]
        return {"predicted": [100 * gbps / changed.gpu.memory_gbps for gbps in moved]}

    curves = bands(machine, percents, ("matmul", "library", "dma", "links") if ranges else ())
    gather, exchange = (names.index(f"{kind}\nkernel") for kind in COLLECTIVES)
    less = (1 - published()["C3-BW-01"]["value"] / 100) * curves["predicted"].values[exchange]
    marks = (
        [PublishedValue("published: below all-to-all", (less,), (gather,), line="")] if machine.name == MI300X else []
    )
    words = "GEMM, or collective of 1 GB and who runs it"
    return [Panel(curves=curves, x=names, marks=marks, xlabel=words, ylabel="percent of the peak")]


def counted_bandwidth(file: ResultFile) -> list[Panel]:
    """Figure 6 of the ConCCL paper: bytes that counters saw, of GEMMs alone; nothing of a file without them."""
    counted = [row for row in file.rows if row["what"] == COUNTERS and row.get("moved_bytes")]
    if not counted:
        return []
    peak_gbps = float(named(file.machine).gpu.memory_gbps)
    names, curves = aligned({"counted": {row["gemm"]: 100 * row["gbps"] / peak_gbps for row in counted}})
    return [Panel(curves=curves, x=names, xlabel="GEMM alone, by counters", ylabel="percent of the peak")]


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


def _ideals(file: ResultFile) -> dict[str, dict[str, float]]:
    pairs = PairReadings.of(file)
    return {str(kind): {pair_name(pair): pairs.ideal(pair) for pair in pairs.pairs(kind)} for kind in COLLECTIVES}


def _ideal_panel(found: Mapping[str, Band], names: Sequence[str], marked: bool) -> Panel:
    values = {claim: published()[claim]["value"] for claim in ("C3-ID-01", "C3-ID-02")}
    marks = [
        PublishedValue("published: least and most", tuple(values["C3-ID-02"])),
        PublishedValue("published: mean", (values["C3-ID-01"],), line="--"),
    ]
    return Panel(
        curves=found,
        x=names,
        marks=marks if marked else [],
        level=1,
        high=2.3,
        xlabel="GEMM and bytes of the collective",
        ylabel="speedup over serial",
        legend={"ncols": 4, "loc": "upper left"},
    )


IDEAL = RowFigure(pair_rows, _ideals, _ideal_panel, MI300X, ("matmul", "library", "links"), tuple(TABLE_II))
"""Figure 7."""
GROUPED = "collective, and which of the two takes longer; number of such pairs"
BOUNDED = "what limits the GEMM, and which of the two takes longer; number of such pairs"


def _mean_speedups(groups: Mapping[str, PairReadings], strategies: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return mean speedups by group, of the ideal and of each strategy; groups without pairs are left out."""
    known = {f"{name}\n({len(part.rows)})": part for name, part in groups.items() if part.rows}
    ideal = {name: statistics.fmean(map(part.ideal, part.rows)) for name, part in known.items()}
    return {"ideal": ideal} | {
        strategy: {name: part.mean_speedup(strategy) for name, part in known.items() if part.pairs(strategy=strategy)}
        for strategy in strategies
    }


def _speedup_panel(
    found: Mapping[str, Band], names: Sequence[str], marked: bool, strategies: Sequence[str], words: str = GROUPED
) -> Panel:
    """Make a panel of bars. Published percents of ideal stand at the last group, of all pairs."""
    bars = dict(found)
    ideal = bars.pop("ideal").values
    marks = [PublishedValue("ideal", ideal, tuple(range(len(names))), line="", point="_")]
    if marked:
        width, known = 0.8 / len(bars), [name for name in bars if name in PERCENTS]
        places = [len(names) - 1 + (list(bars).index(name) - (len(bars) - 1) / 2) * width for name in known]
        shares = [published()[PERCENTS[name]]["value"] / 100 for name in known]
        heights = tuple(1 + share * (ideal[-1] - 1) for share in shares)
        marks.append(PublishedValue("published (% of ideal)", heights, tuple(places), line=""))
    return Panel(
        curves=bars,
        x=names,
        styles={strategy: (SHADES[strategy], 0) for strategy in strategies},
        marks=marks,
        level=1,
        high=2.25,
        xlabel=words,
        ylabel="mean speedup over serial",
        legend={"ncols": len(strategies) + 2},
    )


def _speedups(strategies: Sequence[str]) -> RowFigure:
    """Figures 8 and 10: by collective and class."""

    def curves(file: ResultFile) -> dict[str, dict[str, float]]:
        pairs = PairReadings.of(file)
        groups = {
            f"{kind}\n{c3_class}": pairs.part(kind, c3_class)
            for kind in COLLECTIVES
            for c3_class in sorted(pairs.classes(kind))
        }
        return _mean_speedups({**groups, "all": pairs}, strategies)

    return RowFigure(pair_rows, curves, functools.partial(_speedup_panel, strategies=strategies), MI300X, None)


ON_UNITS = _speedups(library_strategies())
"""Figure 8."""
ON_ENGINES = _speedups(("c3_base", "conccl", "conccl_rp"))
"""Figure 10."""


def _by_bound(strategies: Sequence[str]) -> Callable[[ResultFile], list[Panel]]:
    """Figures 8 and 10 with pairs of every class: by the limit of the GEMM and by class."""

    def panels(file: ResultFile) -> list[Panel]:
        pairs = PairReadings.of(file)
        groups = {f"{bound}\n{c3_class}": pairs.part(None, c3_class, bound) for bound in Bound for c3_class in C3Class}
        names, found = aligned(_mean_speedups({**groups, "all": pairs}, strategies))
        panel = _speedup_panel(found, names, False, strategies, BOUNDED) if names else None
        return [] if panel is None else [dataclasses.replace(panel, title=f"{file.where}, all classes")]

    return panels


def _isolated_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    """Collectives on DMA engines over the library's, alone."""
    sizes = [n for n in SIZES if n >= 1 << 20]

    def gains(changed: Machine) -> Curves[str]:
        return {
            str(kind): [library_gang(changed, kind, n).alone_us / dma_us(changed, kind, n) for n in sizes]
            for kind in COLLECTIVES
        }

    large = (float(64 << 20), float(sizes[-1]))
    marks = [PublishedValue("published: all-gather, large sizes", (published()["CC-02"]["value"],), large)]
    curves = bands(machine, gains, ("dma", "library", "links") if ranges else ())
    here = marks if machine.name == MI300X else []
    return [Panel(curves=curves, marks=here, level=1, low=0, ylabel="speedup over the library", **over_sizes(sizes))]


def isolated(file: ResultFile) -> list[Panel]:
    """Figure 9 of the ConCCL paper: the library's time over that of ``pcpy``, both in graphs."""
    readings = CollectiveReadings(file)
    curves = {
        str(kind): {n: 1 / readings.behind(kind, ("pcpy",), [n]) for n in readings.sizes(kind, 1 << 20)}
        for kind in COLLECTIVES
    }
    return by_size(curves, level=1, low=0, ylabel="speedup over the library")


def gemm_words(file: ResultFile) -> dict[str, str]:
    """Table I of the ConCCL paper: each GEMM alone, and how much a fifth of the units matters to it."""
    return {tag: alone_words(us, slower) for tag, (us, slower) in table_i_times(file).items()}


def predicted_gemm_words(machine: Machine, ranges: bool, version: str) -> dict[str, str]:
    """Return the same of a machine that is described."""
    context, lost = C3Context(machine), round(FIFTH * float(machine.gpu.units))
    return {tag: alone_words(gemm_us(machine, parse_gemm(tag)), context.slowdown(tag, lost)) for tag in TABLE_I}


def alone_words(us: float, slower_percent: float) -> str:
    """Return a time alone, and by how much it is longer with a fifth of the compute units less, in words."""
    return f"{us / 1e3:.2f} ms; {slower_percent:+.0f}% with {100 * FIFTH:.0f}% of the units less"


def class_words(file: ResultFile) -> dict[str, str]:
    """Table II of the ConCCL paper: the class of each pair by its own times."""
    return PairReadings.of(file).class_words()


def gemm_sizes() -> dict[str, str]:
    """Return Table I of the ConCCL paper as published: size and bound."""
    bound = {"c": "compute-bound", "m": "memory-bound"}
    gemms = ((tag, parse_gemm(tag)) for tag in TABLE_I)
    return {tag: f"{one.m} x {one.n} x {one.k}, {bound[tag[0]]}" for tag, one in gemms}


FIGURES = (
    declared("000/T1", predict=predicted_gemm_words, measure=gemm_words, lines=gemm_sizes),
    declared(
        "000/T2",
        predict=lambda machine, ranges, version: class_words(pair_rows(machine, version)),
        measure=class_words,
        lines=lambda: {name: str(c3_class) for name, c3_class in TABLE_II.items()},
    ),
    declared("000/5", predict=_units_panels, measure=compute_units),
    declared("000/6", predict=_bandwidth_panels, measure=counted_bandwidth),
    declared("000/7", predict=IDEAL.predicted, measure=IDEAL.measured),
    declared(
        "000/8",
        predict=ON_UNITS.predicted,
        measure=ON_UNITS.measured,
        measure_further=_by_bound(("c3_base", "c3_sp", "c3_rp")),
    ),
    declared("000/9", predict=_isolated_panels, measure=isolated),
    declared(
        "000/10",
        predict=ON_ENGINES.predicted,
        measure=ON_ENGINES.measured,
        measure_further=_by_bound(("c3_base", "conccl", "conccl_rp")),
    ),
)

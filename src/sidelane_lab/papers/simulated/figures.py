"""Predictions as pictures, in the spirit of the papers' figures: each a PNG and an SVG.

Bars of predicted averages carry the range over the plausible values of the machine's fitted and assumed numbers.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane.c3.strategy import ideal_speedup
from sidelane.c3.workload import TABLE_I, C3Class, parse_gemm
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness import drawing
from sidelane_lab.harness.drawing import BLACK, BLUE, GREY, ORANGE, PURPLE, RC, SKY, VERMILLION
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import published
from sidelane_lab.model.gemm import gemm_kernel, gemm_us
from sidelane_lab.model.kernels import dma_gangs, dma_us, library_gang
from sidelane_lab.model.strategies import library_strategies, partitions
from sidelane_lab.model.study import COLLECTIVES, SIZES, C3Study, c3_study, pair_name
from sidelane_lab.papers.simulated.bands import Curves, bands
from sidelane_lab.papers.simulated.curves import BANDS, COLOURS, curve, one, over_sizes, whiskers
from sidelane_lab.papers.simulated.marks import FROM, PUBLISHED_OF, PUBLISHED_PERCENTS, draw_published_at, mark_cut
from sidelane_lab.sim import Interval

SHADES = {"c3_base": GREY, "c3_sp": ORANGE, "c3_rp": VERMILLION, "c3_sp_rp": PURPLE, "conccl": SKY, "conccl_rp": BLUE}
LARGE = 1 << 30
UNITS = "on compute units (number of workgroups)"
GIVEN = (1 << 24, 1 << 27, LARGE)
"""Bytes of collectives that have some of the units."""


def draw_c3(study: C3Study, machine: Machine, folder: Path, *, ranges: bool = False) -> list[Path]:
    """Figures 5 to 10 of the ConCCL paper.

    Args:
        study: to draw.
        machine: that it is of.
        folder: made if need be.
        ranges: simulate over the plausible values of the machine's numbers, and draw how far they go.
    """
    spread = _spread(machine) if ranges else {}
    figures = (
        ("c3-strategies", library_strategies(), "C3 with kernel collectives"),
        ("c3-conccl", ("c3_base", "conccl", "conccl_rp"), "C3 with DMA collectives"),
    )
    with mpl.rc_context(RC):
        drawn = [draw(machine, folder, ranges) for draw in (_units, _bandwidth, _against_library)]
        drawn.append(_ideal(study, machine, folder, ranges))
        for name, strategies, title in figures:
            drawn.append(
                _groups(study, machine, strategies, f"{title}: {machine.title}, predicted", folder, name, spread)
            )
    return drawn


def draw_timeline(intervals: Sequence[Interval], title: str, folder: Path, name: str) -> Path:
    """One lane for each queue, engine or kernel, over time."""
    intervals = _joined(intervals)
    lanes = list(dict.fromkeys((interval.group, interval.lane) for interval in intervals))
    kinds = list(dict.fromkeys(_kind_of(interval) for interval in intervals))
    end = max((interval.end_us for interval in intervals), default=1.0)
    scale, unit = (1e3, "ms") if end > 10_000 else (1.0, "us")
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 1.2 + 0.24 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        for index, kind in enumerate(kinds):
            for place, lane in enumerate(lanes):
                bars = [
                    (i.start_us / scale, (i.end_us - i.start_us) / scale)
                    for i in intervals
                    if (i.group, i.lane) == lane and _kind_of(i) == kind
                ]
                if bars:
                    axes.broken_barh(bars, (place - 0.4, 0.8), color=COLOURS[index % len(COLOURS)], linewidth=0)
            axes.plot([], [], color=COLOURS[index % len(COLOURS)], linewidth=6, label=kind)
        for i in intervals:
            if _kind_of(i) == UNITS and i.end_us - i.start_us > 0.04 * end:
                middle = (i.start_us + i.end_us) / 2 / scale
                place = lanes.index((i.group, i.lane))
                axes.text(middle, place, i.label.split()[0], color="white", fontsize=7, ha="center", va="center")
        names = [lane if group in ("links", "GPU") else f"{group} {lane}" for group, lane in lanes]
        axes.set_yticks(range(len(lanes)), names)
        axes.invert_yaxis()
        axes.set_xlabel(f"time, {unit}")
        axes.set_ylabel("who is at work")
        axes.set_title(title)
        axes.legend(ncols=len(kinds), fontsize=7, loc="lower right", bbox_to_anchor=(1, 1.0), borderaxespad=0.1)
        return drawing.save_both(figure, name, folder)


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Neighbours of one lane that say the same, as one: rates change more often than what runs."""
    joined: list[Interval] = []
    last: dict[tuple[str, str], int] = {}
    for interval in intervals:
        place = last.get((interval.group, interval.lane))
        before = None if place is None else joined[place]
        if place is not None and before is not None and _continues(before, interval):
            joined[place] = dataclasses.replace(before, end_us=interval.end_us)
        else:
            last[interval.group, interval.lane] = len(joined)
            joined.append(interval)
    return joined


def _continues(before: Interval, interval: Interval) -> bool:
    on_units = _kind_of(interval) == UNITS
    return on_units and before.label == interval.label and abs(before.end_us - interval.start_us) < 1e-6


def _kind_of(interval: Interval) -> str:
    """What decides the colour: the kind of command, or for a kernel whether it holds compute units."""
    words = interval.label.split()
    return UNITS if words[-1] == "workgroups" else interval.label if words[0] == "on" else words[0]


def _units(machine: Machine, folder: Path, ranges: bool) -> Path:
    """Slowdown of GEMMs that lose compute units, and of collectives that have only some."""
    options = partitions(machine)

    def slower(changed: Machine) -> Curves[tuple[str, str]]:
        found = {}
        for gemm in map(parse_gemm, TABLE_I):
            alone, units = gemm_us(changed, gemm), int(changed.gpu.units)
            found["gemm", gemm.tag] = [gemm_us(changed, gemm, units - lost) / alone for lost in options]
        for kind in COLLECTIVES:
            for nbytes in GIVEN:
                alone = library_gang(changed, kind, nbytes).alone_us
                given = [library_gang(changed, kind, nbytes, units=units).alone_us for units in options]
                found[str(kind), format_bytes(nbytes)] = [us / alone for us in given]
        return found

    found = bands(machine, slower, ("matmul", "library") if ranges else ())
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = {"gemm": "GEMM, compute units lost", **{str(k): f"{k}, compute units given" for k in COLLECTIVES}}
    for axes, (panel, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        names = [name for name in found if name[0] == panel]
        for index, name in enumerate(names):
            curve(axes, options, found[name], name[1], COLOURS[index], index)
        if panel == "gemm" and machine.name == PUBLISHED_OF:
            slow = [1 + percent / 100 for percent in published()["C3-CU-07"]["value"]]
            axes.plot((32, 64), slow, "D", color=BLACK, markersize=5, label="published, compute-bound, up to")
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(options, [str(units) for units in options])
        axes.set_xlabel("compute units")
        axes.set_ylabel("time over that with all of them")
        mark_cut(axes)
        axes.legend(fontsize=7)
    figure.suptitle(f"Compute needs: {machine.title}, predicted ({BANDS})", x=0.01, ha="left", fontweight="bold")
    return drawing.save_both(figure, "c3-compute-units", folder)


def _ideal(study: C3Study, machine: Machine, folder: Path, ranges: bool) -> Path:
    rows = study.select("serial", COLLECTIVES[0])
    pairs = [row.workload for row in rows]

    def ideals(changed: Machine) -> Curves[str]:
        alone = [(gemm_us(changed, p.gemm), library_gang(changed, p.collective, p.nbytes).alone_us) for p in pairs]
        return {"ideal": [ideal_speedup(*both) for both in alone]}

    band = bands(machine, ideals, ("matmul", "library", "links") if ranges else ())["ideal"]
    figure, axes = one(f"Ideal speedup: {machine.title}, predicted (lines: plausible numbers)")
    axes.bar(range(len(rows)), band.values, color=BLUE)
    whiskers(axes, band)
    axes.set_xticks(range(len(rows)), [pair_name(row) for row in rows], rotation=45, ha="right")
    axes.set_ylim(0, 2.2)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    if machine.name == PUBLISHED_OF:
        claims = (("C3-ID-02", "published: least and most", ":"), ("C3-ID-01", "published: mean", "--"))
        for claim, words, line in claims:
            value = published()[claim]["value"]
            for place, height in enumerate(value if isinstance(value, list) else [value]):
                axes.axhline(height, color=BLACK, linewidth=1, linestyle=line, label="_" if place else words)
        axes.legend(fontsize=7, ncols=2, loc="upper left")
    axes.set_xlabel("GEMM and bytes of an all-gather")
    axes.set_ylabel("speedup over serial")
    return drawing.save_both(figure, "c3-ideal", folder)


def _against_library(machine: Machine, folder: Path, ranges: bool) -> Path:
    sizes = [n for n in SIZES if n >= 1 << 20]

    def gains(changed: Machine) -> Curves[str]:
        return {
            str(kind): [library_gang(changed, kind, n).alone_us / dma_us(changed, kind, n) for n in sizes]
            for kind in COLLECTIVES
        }

    found = bands(machine, gains, ("dma", "library", "links") if ranges else ())
    figure, axes = one(f"Collective on DMA engines over the library: {machine.title}, predicted")
    for index, kind in enumerate(map(str, COLLECTIVES)):
        curve(axes, sizes, found[kind], kind, COLOURS[index], index)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    if machine.name == PUBLISHED_OF:
        draw_published_at(axes, (FROM, sizes[-1]), published()["CC-02"]["value"], "published: all-gather, large sizes")
    axes.set_ylabel("speedup over the library")
    axes.set_ylim(bottom=0)
    return over_sizes(figure, axes, folder, "c3-isolated")


Group = tuple[Kind | None, C3Class | None]
GROUPS: dict[str, Group] = {
    **{f"{kind}\n{c3_class}": (kind, c3_class) for kind in COLLECTIVES for c3_class in C3Class},
    "all": (None, None),
}


def _groups(
    study: C3Study,
    machine: Machine,
    strategies: Sequence[str],
    title: str,
    folder: Path,
    name: str,
    spread: dict[str, dict[str, list[float]]],
) -> Path:
    """Mean speedups by collective and class, with the ideal."""
    figure, axes = one(title)
    width = 0.8 / len(strategies)
    for index, strategy in enumerate(strategies):
        means = [_mean(study, strategy, group) for group in GROUPS.values()]
        places = [place + (index - (len(strategies) - 1) / 2) * width for place in range(len(GROUPS))]
        axes.bar(places, means, width, color=SHADES[strategy], label=strategy)
        if spread:
            ends = [spread[strategy][group] for group in GROUPS]
            low = [max(0.0, mean - min([mean, *values])) for mean, values in zip(means, ends, strict=True)]
            high = [max(0.0, max([mean, *values]) - mean) for mean, values in zip(means, ends, strict=True)]
            axes.errorbar(places, means, [low, high], fmt="none", ecolor=BLACK, elinewidth=0.8, capsize=2)
    ideals = [statistics.fmean(row.ideal for row in study.select("serial", *group)) for group in GROUPS.values()]
    axes.plot(range(len(GROUPS)), ideals, linestyle="none", marker="_", markersize=26, color=BLACK)
    axes.plot([], [], color=BLACK, label="ideal")  # the mark itself would cover the legend
    if machine.name == PUBLISHED_OF:
        last = len(GROUPS) - 1
        for index, strategy in enumerate(strategies):
            if strategy in PUBLISHED_PERCENTS:
                percent = published()[PUBLISHED_PERCENTS[strategy]]["value"]
                place = last + (index - (len(strategies) - 1) / 2) * width
                axes.plot(place, 1 + percent / 100 * (ideals[last] - 1), color=BLACK, marker="D", markersize=4)
        axes.plot([], [], color=BLACK, marker="D", linestyle="none", markersize=4, label="published (% of ideal)")
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(GROUPS)), list(GROUPS))
    axes.set_xlabel("collective, and which of the two takes longer")
    axes.set_ylim(0, 2.25)
    axes.set_ylabel("mean speedup over serial")
    axes.legend(ncols=len(strategies) + 2, fontsize=7)
    return drawing.save_both(figure, name, folder)


def _mean(study: C3Study, strategy: str, group: Group) -> float:
    return statistics.fmean(row.speedup for row in study.select(strategy, *group))


def _spread(machine: Machine) -> dict[str, dict[str, list[float]]]:
    """Mean speedups of every strategy and group with one uncertain number at an end of its range, all in turn."""
    found: dict[str, dict[str, list[float]]] = {strategy: {group: [] for group in GROUPS} for strategy in SHADES}
    for path, quantity in machine.quantities().items():
        for value in (quantity.low, quantity.high):
            if value is None:
                continue
            study = c3_study(machine.with_value(path, value))
            for strategy, groups in found.items():
                for name, values in groups.items():
                    values.append(_mean(study, strategy, GROUPS[name]))
    return found


def _bandwidth(machine: Machine, folder: Path, ranges: bool) -> Path:
    """Memory bandwidth that each kernel uses alone, relative to the peak."""
    names = [*TABLE_I, *(f"{kind}\n{mover}" for kind in COLLECTIVES for mover in ("kernel", "DMA"))]

    def percents(changed: Machine) -> Curves[str]:
        reach, bars = changed.gpu.memory_gbps * changed.matmul.memory_efficiency, {}
        for tag in TABLE_I:
            kernel = gemm_kernel(changed, parse_gemm(tag))
            units = min(float(changed.gpu.units), kernel.workgroups)
            bars[tag] = min(reach, units * kernel.traffic_bytes / kernel.compute_us / 1e3)
        for kind in COLLECTIVES:
            bars[f"{kind}\nkernel"] = library_gang(changed, kind, LARGE).memory_gbps
            bars[f"{kind}\nDMA"] = dma_gangs(changed, kind, LARGE)[0].memory_gbps
        return {"peak": [100 * bars[name] / changed.gpu.memory_gbps for name in names]}

    numbers = ("matmul", "library", "dma", "links") if ranges else ()
    band = bands(machine, percents, numbers)["peak"]
    figure, axes = one(f"Memory bandwidth used alone: {machine.title}, predicted (lines: plausible numbers)")
    axes.bar(range(len(names)), band.values, color=BLUE)
    whiskers(axes, band)
    if machine.name == PUBLISHED_OF:
        gather, exchange = (names.index(f"{kind}\nkernel") for kind in COLLECTIVES)
        less = 1 - published()["C3-BW-01"]["value"] / 100
        axes.plot(
            gather, less * band.values[exchange], "D", color=BLACK, markersize=5, label="published: below all-to-all"
        )
        axes.legend(fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("GEMM, or collective of 1 GB and who runs it")
    axes.set_ylabel("percent of the peak")
    return drawing.save_both(figure, "c3-bandwidth", folder)

"""Predictions as pictures, in the spirit of the papers' figures: each a PNG and an SVG.

Bars of predicted averages carry the range over the plausible values of the machine's fitted and assumed numbers.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sidelane.bench.report import drawing
from sidelane.bench.report.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RC, SKY, STYLES, VERMILLION
from sidelane.bench.simulated.marks import FROM, PUBLISHED_OF, PUBLISHED_PERCENTS, UP_TO, draw_published_at, mark_cut
from sidelane.c3.workload import TABLE_I, C3Class, parse_gemm
from sidelane.execute.sim import Interval
from sidelane.machine.spec import Machine
from sidelane.model.claims import published
from sidelane.model.claims_dma import DmaContext
from sidelane.model.claims_overlap import BLOCKS, PLATFORMS, OverlapContext
from sidelane.model.gemm import gemm_kernel, gemm_us
from sidelane.model.kernels import dma_gangs, dma_us, library_gang
from sidelane.model.power import dma_power, library_power
from sidelane.model.published import PUBLISHED_VARIANTS
from sidelane.model.strategies import library_strategies, partitions
from sidelane.model.study import COLLECTIVES, SIZES, C3Study, DmaStudy, c3_study, pair_name
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY, BLACK)
SHADES = {"c3_base": GREY, "c3_sp": ORANGE, "c3_rp": VERMILLION, "c3_sp_rp": PURPLE, "conccl": SKY, "conccl_rp": BLUE}
LARGE = 1 << 30
UNITS = "on compute units (number of workgroups)"
PUBLISHED_OVERLAP: dict[tuple[str, str], tuple[tuple[float, str], ...]] = {
    ("base", ""): ((0.3, "published: 0.3 and 1"), (1.0, "_")),
    ("reduction", "A40"): ((25.5, "published, cb-ar at most"),),
    ("overlap", ""): ((90.0, "published, at most"),),
    ("overlap", "MI250X"): (),
}
"""What the overlap paper's text says of its figures 2 to 4: (panel, platform or "" for the others) -> value, words."""


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
        drawn = [draw(machine, folder) for draw in (_units, _bandwidth, _against_library)]
        drawn.append(_ideal(study, machine, folder))
        for name, strategies, title in figures:
            drawn.append(
                _groups(study, machine, strategies, f"{title}: {machine.title}, predicted", folder, name, spread)
            )
    return drawn


def draw_dma(study: DmaStudy, machine: Machine, folder: Path) -> list[Path]:
    """Figures 6, 13, 14, 15 and 16 of the DMA collectives paper."""
    with mpl.rc_context(RC):
        drawn = [_phases(machine, folder)]
        for kind in COLLECTIVES:
            figure, axes = _one(f"DMA {kind} over the library: {machine.title}, predicted")
            for colour, variant in zip(COLOURS, PUBLISHED_VARIANTS[kind], strict=False):
                for prelaunched in (False, True):
                    gains = [study.library_us[kind, n] / study.dma_us[kind, variant, prelaunched, n] for n in SIZES]
                    name = variant + ("+prelaunch" if prelaunched else "")
                    _line(axes, SIZES, gains, name, colour, int(prelaunched))
            axes.axhline(1, color=BLACK, linewidth=0.8)
            axes.set_ylabel("speedup over the library")
            axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
            if machine.name == PUBLISHED_OF:
                gap = published()["DM-BB-05"]["value"]["allgather" if kind is Kind.ALL_GATHER else "alltoall"]
                draw_published_at(axes, (SIZES[0], UP_TO), 1 / gap, "published: best of all up to 32 MB, mean")
            drawn.append(_finish(figure, axes, folder, f"dma-{kind}", legend={"ncols": 4, "loc": "upper center"}))
        drawn.append(_producer(study, machine, folder))
        if machine.power is not None:
            drawn.append(_power(study, machine, folder))
    return drawn


def draw_overlap(context: OverlapContext, folder: Path) -> list[Path]:
    """Figures 2 to 4 of the overlap paper."""
    panels = {
        "base": "overlapped over sequential time",
        "reduction": "time saved by priority, %",
        "overlap": "overlap rate, %",
    }
    with mpl.rc_context(RC):
        return [_overlap(context, key, label, folder) for key, label in panels.items()]


def _overlap(context: OverlapContext, key: str, label: str, folder: Path) -> Path:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, platform in zip(figure.subplots(1, len(PLATFORMS), sharey=True), PLATFORMS, strict=True):
        for index, pair in enumerate(dict.fromkeys(pair for _, pair, _ in context.rows)):
            values = [context.rows[platform, pair, blocks][key] for blocks in BLOCKS]
            _line(axes, BLOCKS, values, pair, COLOURS[index], index)
        for value, words in PUBLISHED_OVERLAP.get((key, platform), PUBLISHED_OVERLAP.get((key, ""), ())):
            axes.axhline(value, color=BLACK, linewidth=0.8, linestyle=":", label=words)
        axes.set_xscale("log", base=2)
        axes.set_title(platform)
        axes.set_xlabel("thread blocks")
    for axes in (figure.axes[0], figure.axes[-1]):
        axes.legend(fontsize=7)
    if key != "reduction":
        figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel(label)
    figure.suptitle("Pipelined GEMM and collective, predicted", x=0.01, ha="left", fontweight="bold")
    return drawing.save_both(figure, f"overlap-{key}", folder)


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


def _units(machine: Machine, folder: Path) -> Path:
    """Slowdown of GEMMs that lose compute units, and of collectives that have only some."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    gemms, gathers, exchanges = figure.subplots(1, 3)
    options = partitions(machine)
    for index, (tag, gemm) in enumerate((tag, parse_gemm(tag)) for tag in TABLE_I):
        alone = gemm_us(machine, gemm)
        slow = [gemm_us(machine, gemm, int(machine.gpu.units) - lost) / alone for lost in options]
        _line(gemms, options, slow, tag, COLOURS[index % len(COLOURS)], index % len(STYLES))
    gemms.set_title("GEMM, compute units lost")
    for axes, kind in ((gathers, COLLECTIVES[0]), (exchanges, COLLECTIVES[1])):
        for index, nbytes in enumerate((1 << 24, 1 << 27, LARGE)):
            alone = library_gang(machine, kind, nbytes).alone_us
            slow = [library_gang(machine, kind, nbytes, units=units).alone_us / alone for units in options]
            _line(axes, options, slow, format_bytes(nbytes), COLOURS[index], index)
        axes.set_title(f"{kind}, compute units given")
    for axes in (gemms, gathers, exchanges):
        axes.set_xscale("log", base=2)
        axes.set_xticks(options, [str(units) for units in options])
        axes.set_xlabel("compute units")
        axes.set_ylabel("time over that with all of them")
        mark_cut(axes)
        axes.legend(fontsize=7)
    figure.suptitle(f"Compute needs: {machine.title}, predicted", x=0.01, ha="left", fontweight="bold")
    return drawing.save_both(figure, "c3-compute-units", folder)


def _ideal(study: C3Study, machine: Machine, folder: Path) -> Path:
    figure, axes = _one(f"Ideal speedup: {machine.title}, predicted")
    rows = study.select("serial", COLLECTIVES[0])
    axes.bar(range(len(rows)), [row.ideal for row in rows], color=BLUE)
    axes.set_xticks(range(len(rows)), [pair_name(row) for row in rows], rotation=45, ha="right")
    axes.set_ylim(0, 2.05)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_xlabel("GEMM and bytes of an all-gather")
    axes.set_ylabel("speedup over serial")
    return drawing.save_both(figure, "c3-ideal", folder)


def _against_library(machine: Machine, folder: Path) -> Path:
    figure, axes = _one(f"Collective on DMA engines over the library: {machine.title}, predicted")
    sizes = [n for n in SIZES if n >= 1 << 20]
    for index, kind in enumerate(COLLECTIVES):
        gains = [library_gang(machine, kind, n).alone_us / dma_us(machine, kind, n) for n in sizes]
        _line(axes, sizes, gains, str(kind), COLOURS[index], index)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_ylabel("speedup over the library")
    axes.set_ylim(bottom=0)
    return _finish(figure, axes, folder, "c3-isolated")


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
    figure, axes = _one(title)
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


def _phases(machine: Machine, folder: Path) -> Path:
    """Shares of the phases of one copy between two GPUs, by size."""
    context = DmaContext(machine)
    sizes = [4096 << step for step in range(10)]
    figure, axes = _one(f"Phases of one DMA copy: {machine.title}, predicted")
    bottom = [0.0] * len(sizes)
    for colour, phase in zip(COLOURS, ("control", "schedule", "copy", "sync"), strict=False):
        shares = [context.phases(n)[phase] for n in sizes]
        axes.bar(range(len(sizes)), shares, 0.7, bottom=bottom, color=colour, label=phase)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_xticks(range(len(sizes)), [format_bytes(n) for n in sizes])
    axes.set_xlabel("bytes")
    axes.set_ylabel("share of the time, %")
    axes.set_ylim(0, 115)
    axes.legend(ncols=4, fontsize=7)
    return drawing.save_both(figure, "dma-phases", folder)


def _producer(study: DmaStudy, machine: Machine, folder: Path) -> Path:
    """A GEMM and then an all_gather of its result: library over DMA."""
    figure, axes = _one(f"GEMM, then all_gather: time with the library over time with DMA, {machine.title}, predicted")
    relay, kind = machine.dma.signal_us + machine.dma.wait_us, Kind.ALL_GATHER
    for index, size in enumerate((1024, 4096, 8192)):
        gemm = gemm_us(machine, parse_gemm(f"{size}x{size}x{size}"))
        gains = [(gemm + study.library_us[kind, n]) / (gemm + relay + study.best_us(kind, n)) for n in SIZES]
        _line(axes, SIZES, gains, f"GEMM {size}", COLOURS[index], index)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_ylabel("library / DMA")
    mark_cut(axes)
    return _finish(figure, axes, folder, "dma-producer")


def _power(study: DmaStudy, machine: Machine, folder: Path) -> Path:
    """Watts of one GPU during an all_gather."""
    figure, axes = _one(f"Power during an all_gather: {machine.title}, predicted from assumed parts")
    kind = Kind.ALL_GATHER
    _line(axes, SIZES, [library_power(machine, kind, n).total_w for n in SIZES], "library", VERMILLION, 0)
    best = [dma_power(machine, kind, n, *study.best(kind, n)).total_w for n in SIZES]
    _line(axes, SIZES, best, "best DMA", BLUE, 1)
    if machine.name == PUBLISHED_OF:
        less = 1 - published()["DM-PW-01"]["value"] / 100
        large = [n for n in SIZES if n >= FROM]
        mean = statistics.fmean(library_power(machine, kind, n).total_w for n in large)
        draw_published_at(axes, (large[0], large[-1]), less * mean, "published: best DMA below the library from 64 MB")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("W a GPU")
    return _finish(figure, axes, folder, "dma-power")


def _bandwidth(machine: Machine, folder: Path) -> Path:
    """Memory bandwidth that each kernel uses alone, relative to the peak."""
    figure, axes = _one(f"Memory bandwidth used alone: {machine.title}, predicted")
    reach = machine.gpu.memory_gbps * machine.matmul.memory_efficiency
    bars: dict[str, float] = {}
    for tag in TABLE_I:
        kernel = gemm_kernel(machine, parse_gemm(tag))
        units = min(float(machine.gpu.units), kernel.workgroups)
        bars[tag] = min(reach, units * kernel.traffic_bytes / kernel.compute_us / 1e3)
    for kind in COLLECTIVES:
        bars[f"{kind}\nkernel"] = library_gang(machine, kind, LARGE).memory_gbps
        bars[f"{kind}\nDMA"] = dma_gangs(machine, kind, LARGE)[0].memory_gbps
    axes.bar(range(len(bars)), [100 * gbps / machine.gpu.memory_gbps for gbps in bars.values()], color=BLUE)
    axes.set_xticks(range(len(bars)), list(bars), fontsize=7)
    axes.set_xlabel("GEMM, or collective of 1 GB and who runs it")
    axes.set_ylabel("percent of the peak")
    return drawing.save_both(figure, "c3-bandwidth", folder)


def _one(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontweight="bold")
    return figure, axes


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, colour: str, style: int) -> None:
    dash, marker = STYLES[style % len(STYLES)]
    axes.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.3, label=name)


def _finish(figure: Figure, axes: Axes, folder: Path, name: str, legend: dict[str, Any] | None = None) -> Path:
    axes.set_xscale("log", base=2)
    least = min(float(np.min(np.asarray(line.get_xdata(), dtype=float))) for line in _curves(axes))
    shown = [n for n in SIZES[::4] if n >= least]
    axes.set_xticks(shown, [format_bytes(n) for n in shown])
    axes.set_xlabel("bytes")
    axes.legend(fontsize=7, **(legend or {}))
    return drawing.save_both(figure, name, folder)


def _curves(axes: Axes) -> list[Line2D]:
    """Its lines over sizes: not those that cross the whole picture."""
    return [line for line in axes.lines if line.get_transform() == axes.transData]

"""Rows of a study as pictures, each a PNG and an SVG.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; every line and bar also carries its
name or its value, so that no picture needs its colours.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sidelane.bench.results import SEPARATE, C3Row, CollectiveRow, PhaseRow, PowerRow, Results
from sidelane.bench.tables import PREDICTED, grouped, phase_title, power_title, too_few_cores, way_to_call
from sidelane.c3.workload import format_bytes

BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
BLACK, GREY = "#000000", "#666666"
COLOURS = {
    "nccl": VERMILLION,
    "gloo": VERMILLION,
    "nccl_ce": ORANGE,
    "symm_mem": PURPLE,
    "dma": BLUE,
    "sm": GREEN,
    "auto": BLACK,
    "library": VERMILLION,
    "serial": GREY,
    "c3_base": VERMILLION,
    "c3_sp": VERMILLION,
    "c3_rp": VERMILLION,
    "c3_sp_rp": VERMILLION,
    "priority": PURPLE,
    "occupancy": GREEN,
    "conccl": BLUE,
    "conccl_rp": BLUE,
}
# Lines of one implementation differ in dash and mark.
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1, 1, 1, 1, 1)), "v"), ((0, (1, 3)), "P"))
RC: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "svg.fonttype": "path",
    "svg.hashsalt": "sidelane",  # the same rows give the same file
}
PAIRS_A_PICTURE = 4
PHASES = {"control": ORANGE, "schedule": VERMILLION, "copy": BLUE, "sync": GREEN}


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture on disk: ``name`` without ending; ``text`` says what it shows, for those who cannot see it."""

    name: str
    title: str
    text: str


def draw(results: Results, directory: Path) -> list[Picture]:
    """Draw every picture of a study into ``directory``, as ``name.png`` and ``name.svg``."""
    with mpl.rc_context(RC):
        if results.study == "collectives":
            rows = [row for row in results.rows if isinstance(row, CollectiveRow) and row.time_us]
            ways = grouped(rows, way_to_call)
            return [_sizes(way, alike, results, directory) for way, alike in ways]
        if results.study == "phases":
            return draw_phases([r for r in results.rows if isinstance(r, PhaseRow)], _where(results), directory)
        if results.study == "power":
            return draw_power([r for r in results.rows if isinstance(r, PowerRow)], _where(results), directory)
        pairs = [row for row in results.rows if isinstance(row, C3Row) and row.speedup is not None]
        return [
            picture
            for collective, alike in grouped(pairs, lambda row: row.collective)
            for picture in _strategies(collective, alike, results, directory)
        ]


def _sizes(way: str, rows: Sequence[CollectiveRow], results: Results, directory: Path) -> Picture:
    """Bus bandwidth over size and time over size, one line an implementation and variant."""
    lines = grouped(rows, lambda row: (row.implementation, _line_of(row), row.prelaunch))
    lines.sort(key=lambda line: list(COLOURS).index(line[0][0]))
    styles = {name: itertools.cycle(STYLES) for name in COLOURS}
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    ends: list[tuple[float, float, str, str]] = []
    starts: list[tuple[float, float, str, str]] = []
    for (implementation, variant, prelaunch), points in lines:
        points = sorted(points, key=lambda row: row.bytes)
        style, marker = next(styles[implementation])
        colour = COLOURS[implementation]
        name = " ".join(filter(None, [implementation, variant]))
        name += "+prelaunch" if prelaunch and "prelaunch" not in name else ""
        sizes = [row.bytes for row in points]
        rates, times = [row.bus_gbps or 0.0 for row in points], [row.time_us or 0.0 for row in points]
        looks = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4, "linewidth": 1.4}
        bandwidth.plot(sizes, rates, **looks)
        time.plot(sizes, times, **looks)
        ends.append((sizes[-1], rates[-1], name, colour))
        starts.append((sizes[0], times[0], name, colour))
    time.set_yscale("log")
    for axes, title in ((bandwidth, "Bus bandwidth, GB/s (more is better)"), (time, "Time, us (less is better)")):
        _size_axis(axes, sorted({row.bytes for row in rows}))
        axes.set_title(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    bandwidth.set_ylim(bottom=0)
    _label(bandwidth, ends, side="right")
    _label(time, starts, side="left")
    title = f"{way}: {_where(results)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = f"Bus bandwidth and time over size for {way}, one line an implementation and variant."
    return _save(figure, _file_name(way), title, text, directory)


def _line_of(row: CollectiveRow) -> str:
    """The variant; one line for what auto chose, whatever that was at each size."""
    return row.variant if row.implementation != "auto" else SEPARATE if row.separate else ""


def draw_phases(rows: Sequence[PhaseRow], where: str, directory: Path) -> list[Picture]:
    """Stacked bars over size: shares of the phases, the time above each bar; a panel a launch, and one predicted."""
    pictures = []
    timed = [row for row in rows if row.total_us]
    for name, alike in grouped(timed, phase_title, ordered=False):
        panels = grouped(alike, lambda row: (row.source == PREDICTED, row.launch))
        figure = Figure(figsize=(2.2 + 4.2 * len(panels), 3.6), layout="constrained")
        for axes, ((predicted, launch), bars) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _stack(axes, sorted(bars, key=lambda row: row.bytes))
            axes.set_title(bars[0].note or PREDICTED if predicted else f"measured, {launch}", pad=20)
        figure.axes[0].set_ylabel("share of the call, %")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), ncols=len(PHASES), loc="outside lower center")
        title = f"Phases of {name}: {where}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        text = f"Shares of control, schedule, copy and sync in a call of {name} by size, with its time in microseconds."
        pictures.append(_save(figure, _file_name(f"phases {name}"), title, text, directory))
    return pictures


def _stack(axes: Axes, rows: Sequence[PhaseRow]) -> None:
    bottom = [0.0] * len(rows)
    for phase, colour in PHASES.items():
        shares = [100 * getattr(row, f"{phase}_us") / (row.total_us or 1.0) for row in rows]
        axes.bar(
            range(len(rows)), shares, 0.72, bottom=bottom, color=colour, label=phase, edgecolor="white", linewidth=0.6
        )
        for place, (low, share) in enumerate(zip(bottom, shares, strict=True)):
            if share > 9:
                axes.text(place, low + share / 2, f"{share:.0f}", ha="center", va="center", fontsize=7, color="white")
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for place, row in enumerate(rows):
        time_us = row.total_us or 0.0
        axes.text(
            place, 101, f"{time_us:.0f}" if time_us >= 10 else f"{time_us:.1f}", ha="center", va="bottom", fontsize=7
        )
    axes.text(-0.6, 107, "us:", ha="right", va="center", fontsize=7)
    axes.set_xticks(range(len(rows)), [format_bytes(row.bytes) for row in rows], fontsize=8, rotation=45)
    axes.set_ylim(0, 100)
    axes.set_xlabel("bytes")


def draw_power(rows: Sequence[PowerRow], where: str, directory: Path) -> list[Picture]:
    """Watts over size and energy of each GiB over size, one line an implementation and variant."""
    pictures = []
    for name, alike in grouped([row for row in rows if row.watts and row.energy_mj], power_title):
        lines = grouped(alike, lambda row: (row.implementation, row.variant))
        styles = {key: itertools.cycle(STYLES) for key in {row.implementation for row in alike}}
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        watts, energy = figure.subplots(1, 2)
        ends: dict[Axes, list[tuple[float, float, str, str]]] = {watts: [], energy: []}
        for (implementation, variant), points in lines:
            points = sorted(points, key=lambda row: row.bytes)
            style, marker = next(styles[implementation])
            colour, sizes = COLOURS.get(implementation, GREY), [row.bytes for row in points]
            looks = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4, "linewidth": 1.4}
            for axes, values in (
                (watts, [row.watts or 0.0 for row in points]),
                (energy, [(row.energy_mj or 0.0) * 2**30 / row.bytes for row in points]),
            ):
                axes.plot(sizes, values, **looks)
                ends[axes].append((sizes[-1], values[-1], f"{implementation} {variant}".rstrip(), colour))
        idle = next((row.idle_watts for row in alike if row.idle_watts is not None), None)
        if idle is not None:
            watts.axhline(idle, color=GREY, linewidth=0.9, linestyle="--")
            watts.annotate(
                "idle", (0.01, idle), xycoords=("axes fraction", "data"), va="bottom", fontsize=8, color=GREY
            )
        heights = [height for _, height, _, _ in ends[energy]]
        if max(heights) > 10 * min(heights):  # from small sizes on, where the handshakes are everything
            energy.set_yscale("log")
        for axes, title in ((watts, "Power of a GPU, W"), (energy, "Energy of a GiB on all GPUs, mJ")):
            _size_axis(axes, sorted({row.bytes for row in alike}))
            axes.set_title(f"{title} (less is better)")
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_ylim(bottom=None if axes.get_yscale() == "log" else 0)
            _label(axes, ends[axes], side="right")
        title = f"{name}: {where}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        text = f"Power and energy over size for {name}, one line an implementation and variant."
        pictures.append(_save(figure, _file_name(f"power {name}"), title, text, directory))
    return pictures


def _strategies(collective: str, rows: Sequence[C3Row], results: Results, directory: Path) -> list[Picture]:
    """Speedup and percent of ideal by strategy, a column of panels for each pair, with axes in common."""
    pairs = grouped(rows, lambda row: (row.gemm, row.dtype, row.bytes), ordered=False)
    pictures = []
    for number, start in enumerate(range(0, len(pairs), PAIRS_A_PICTURE)):
        shown = [alike for _, alike in pairs[start : start + PAIRS_A_PICTURE]]
        names = list(dict.fromkeys(row.strategy for alike in shown for row in alike if not row.chosen))
        size = (2.2 + 2.9 * len(shown), 1.9 + 2 * (0.5 + 0.3 * len(names)))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(2, len(shown), squeeze=False, sharex="row", sharey=True)
        limits: list[list[tuple[float, float]]] = [[], []]
        for column, alike in enumerate(shown):
            pair = alike[0]
            times = f"alone: GEMM {_time(pair.gemm_us)}, collective {_time(pair.best_comm_us)}"
            panels[0][column].set_title(f"{pair.gemm} with {format_bytes(pair.bytes)} ({pair.c3_class})", pad=26)
            panels[0][column].annotate(
                times, (0, 1), (0, 17), "axes fraction", "offset points", fontsize=8, color=GREY, annotation_clip=False
            )
            ideal = f"ideal {pair.ideal:.2f}"
            upper, lower = panels[0][column], panels[1][column]
            limits[0].append(_bars(upper, names, alike, "speedup", "{:.2f}", pair.ideal, ideal, nothing=1.0))
            limits[1].append(_bars(lower, names, alike, "percent_of_ideal", "{:.0f}%", 100.0, "100%", nothing=0.0))
        for row, unit in enumerate(("speedup", "percent of ideal")):
            low, high = zip(*limits[row], strict=True)
            panels[row][0].set_xlim(min(low), max(high))
            for axes in panels[row]:
                axes.set_xlabel(unit)
        panels[0][0].set_ylim(len(names) - 0.4, -0.6)
        panels[0][0].set_yticks(range(len(names)), names)
        title = f"GEMM with {collective}: {_where(results)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        note = too_few_cores(results)
        if note:
            figure.supxlabel(textwrap.fill(note, round(14 * size[0])), x=0.01, ha="left", fontsize=8, color=VERMILLION)
        name = _file_name(f"c3 {collective}") + (f"-{number + 1}" if len(pairs) > PAIRS_A_PICTURE else "")
        text = f"Speedup over serial execution and percent of the ideal speedup by strategy, next to {collective}."
        pictures.append(_save(figure, name, title, text, directory))
    return pictures


def _bars(
    axes: Axes,
    names: Sequence[str],
    rows: Sequence[C3Row],
    figure: str,
    pattern: str,
    mark: float | None,
    mark_name: str,
    nothing: float,
) -> tuple[float, float]:
    """Horizontal bars of a figure of ``rows``, a place a name; a dashed line at ``mark``, a solid one at ``nothing``.

    Returns:
        What the axis must show.
    """
    picked = {row.chosen for row in rows}
    drawn = [row for row in rows if not row.chosen]  # the row of auto repeats that of what it picked
    places = [names.index(row.strategy) for row in drawn]
    values = [getattr(row, figure) for row in drawn]
    numbers = [value if value is not None else nothing for value in values]
    colours = [COLOURS.get(row.strategy, GREY) for row in drawn]
    axes.barh(places, [number - nothing for number in numbers], left=nothing, color=colours, height=0.66)
    low, high = min([nothing, *numbers]), max([mark or nothing, *numbers])
    span = (high - low) or 1.0
    for place, number, value, row in zip(places, numbers, values, drawn, strict=True):
        text = "no ideal" if value is None else pattern.format(number)
        left = number < nothing
        # A white edge keeps the value readable where the dashed line runs through it.
        axes.annotate(
            f"{text} (auto)" if row.strategy in picked else text,
            (number, place),
            xytext=(-3 if left else 3, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )
    if mark is not None:
        axes.axvline(mark, color=BLACK, linestyle="--", linewidth=0.9, zorder=0)
        axes.annotate(mark_name, (mark, -0.62), ha="center", va="bottom", fontsize=8, annotation_clip=False)
    axes.axvline(nothing, color=BLACK, linewidth=0.9)
    axes.tick_params(axis="y", length=0)
    return low - (0.25 * span if low < nothing else 0.0), high + 0.35 * span


def _time(time_us: float | None) -> str:
    if time_us is None:
        return "-"
    return f"{time_us:.0f} us" if time_us < 1000 else f"{time_us / 1000:.3g} ms"


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    step = -(-len(sizes) // 8)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes[::step])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
    axes.set_xlabel("bytes")


def _label(axes: Axes, points: Sequence[tuple[float, float, str, str]], side: str) -> None:
    """Write names next to the ends of lines, moved apart so that none covers another."""
    axes.figure.canvas.draw()  # limits and scale are final only then
    box = axes.get_window_extent()
    height = 11.0 * axes.figure.dpi / 72.0
    places = sorted((axes.transData.transform((x, y))[1], x, y, name, colour) for x, y, name, colour in points)
    spots = _spread([place[0] for place in places], height)
    outside, anchor = (1.03, 0.0) if side == "right" else (-0.03, 1.0)
    # A leader begins at the end of the name that faces the line, so that none runs through another's name.
    leader = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2, "relpos": (anchor, 0.5)}
    for spot, (_, x, y, name, colour) in zip(spots, places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(outside, (spot - box.y0) / box.height),
            textcoords=("axes fraction", "axes fraction"),
            ha="left" if side == "right" else "right",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops={**leader, "color": colour},
            annotation_clip=False,
        )
    if side == "left":
        axes.yaxis.tick_right()


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places apart until each two are ``gap`` from each other, those in the middle the least.

    >>> _spread([0.0, 1.0, 2.0, 9.0], gap=2.0)
    [-1.0, 1.0, 3.0, 9.0]
    """
    clusters: list[tuple[float, int]] = []  # mean place and number of those that touch
    for place in places:
        mean, count = place, 1
        while clusters and mean - clusters[-1][0] < gap * (count + clusters[-1][1]) / 2:
            other_mean, other_count = clusters.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        clusters.append((mean, count))
    return [mean + gap * (index - (count - 1) / 2) for mean, count in clusters for index in range(count)]


def _where(results: Results) -> str:
    if results.on_cpu:
        return f"{results.ranks} processes on {results.device}"
    return f"{results.ranks} x {results.device}"


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")


def _save(figure: Figure, name: str, title: str, text: str, directory: Path) -> Picture:
    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / f"{name}.png", dpi=150)
    figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
    return Picture(name, title, text)

"""Rows of a study as pictures, each a PNG and an SVG.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; every line and bar also carries its
name or its value, so that no picture needs its colours.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sidelane.bench.results import C3Row, CollectiveRow, Results
from sidelane.bench.tables import grouped, way_to_call
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
        pairs = [row for row in results.rows if isinstance(row, C3Row) and row.speedup is not None]
        return [
            picture
            for collective, alike in grouped(pairs, lambda row: row.collective)
            for picture in _strategies(collective, alike, results, directory)
        ]


def _sizes(way: str, rows: Sequence[CollectiveRow], results: Results, directory: Path) -> Picture:
    """Bus bandwidth over size and time over size, one line an implementation and variant."""
    lines = grouped(rows, lambda row: (row.implementation, row.variant, row.prelaunch))
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


def _strategies(collective: str, rows: Sequence[C3Row], results: Results, directory: Path) -> list[Picture]:
    """Speedup and percent of ideal by strategy, a column of panels for each pair."""
    pairs = grouped(rows, lambda row: (row.gemm, row.dtype, row.bytes), ordered=False)
    pictures = []
    for number, start in enumerate(range(0, len(pairs), PAIRS_A_PICTURE)):
        shown = [alike for _, alike in pairs[start : start + PAIRS_A_PICTURE]]
        bars = max(map(len, shown))
        size = (2.2 + 2.9 * len(shown), 1.6 + 2 * (0.5 + 0.3 * bars))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(2, len(shown), squeeze=False)
        for column, alike in enumerate(shown):
            pair = alike[0]
            panels[0][column].set_title(f"{pair.gemm} with {format_bytes(pair.bytes)} ({pair.c3_class})")
            speedups = [row.speedup for row in alike]
            percents = [row.percent_of_ideal for row in alike]
            _bars(panels[0][column], alike, speedups, "{:.2f}", pair.ideal, f"ideal {pair.ideal:.2f}", "speedup", 1.0)
            _bars(panels[1][column], alike, percents, "{:.0f}%", 100.0, "100%", "percent of ideal", 0.0)
        title = f"GEMM with {collective}: {_where(results)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        name = _file_name(f"c3 {collective}") + (f"-{number + 1}" if len(pairs) > PAIRS_A_PICTURE else "")
        text = f"Speedup over serial execution and percent of the ideal speedup by strategy, next to {collective}."
        pictures.append(_save(figure, name, title, text, directory))
    return pictures


def _bars(
    axes: Axes,
    rows: Sequence[C3Row],
    values: Sequence[float | None],
    pattern: str,
    mark: float | None,
    mark_name: str,
    unit: str,
    nothing: float,
) -> None:
    """Horizontal bars with their values; a dashed line at ``mark``, a solid one where nothing is gained."""
    names = [row.strategy + (f" ({row.chosen})" if row.chosen else "") for row in rows]
    colours = [COLOURS.get(row.strategy, GREY) for row in rows]
    numbers = [value if value is not None else nothing for value in values]
    places = range(len(rows))
    axes.barh(places, [number - nothing for number in numbers], left=nothing, color=colours, height=0.66)
    low, high = min([nothing, *numbers]), max([mark or nothing, *numbers])
    span = (high - low) or 1.0
    for place, number, value in zip(places, numbers, values, strict=True):
        text = "no ideal" if value is None else pattern.format(number)
        left = number < nothing
        # A white edge keeps the value readable where the dashed line runs through it.
        axes.annotate(
            text,
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
    axes.set_xlim(low - (0.25 * span if low < nothing else 0.0), high + 0.25 * span)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)


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

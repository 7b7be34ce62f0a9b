"""Figures of papers, drawn again from predictions: a declaration says what is in the panels, one function draws them.

Curves and bars have bands of plausible values around them (``machines/ranges.py``), and marks of what is published.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.execute.timeline import Interval
from sidelane.sizes import format_bytes
from sidelane_lab.harness import drawing
from sidelane_lab.harness.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RC, SKY, STYLES, VERMILLION
from sidelane_lab.machines.ranges import Band

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY, BLACK)
BANDS = "bands: plausible numbers"
UNITS = "on compute units (number of workgroups)"
ENGINES = "on DMA engines"
KIND_COLOURS = {UNITS: VERMILLION, ENGINES: BLUE}
"""Colours of timelines, alike in all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedValue:
    """A published value.

    Attributes:
        label: in the legend; "_" leaves it out.
        y: its height, or several.
        x: from where to where, or of each height; empty: across the whole panel.
        line: dash; "" for points, as ``point`` has them.
        point: form of the points.
    """

    label: str
    y: tuple[float, ...]
    x: tuple[float, ...] = ()
    line: str = ":"
    point: str = "D"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over numbers, or bars over names.

    Attributes:
        curves: by the word of the legend.
        x: numbers for curves, names for bars.
        xlabel, ylabel, title: of the axes.
        marks: what is published.
        styles: colour, and number of dash and mark, by curve; else one after another.
        total: of bars that stand on each other: what their plausible values are drawn of. None: bars side by side.
        ticks: words at some of the numbers; None: as they come. Bytes have their own, see :func:`over_sizes`.
        log: numbers grow by factors.
        level: of a line across, as of a ratio of 1; None: none.
        low, high: of the axis of values; None: as it comes.
        legend: how it is placed.
    """

    curves: Mapping[str, Band]
    x: Sequence[float] | Sequence[str]
    xlabel: str
    ylabel: str = ""
    title: str = ""
    marks: Sequence[PublishedValue] = ()
    styles: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    total: Band | None = None
    ticks: Mapping[float, str] | None = None
    log: bool = True
    level: float | None = None
    low: float | None = None
    high: float | None = None
    legend: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def draw(self, axes: Axes) -> None:
        """Draw into axes."""
        places = range(len(self.x))
        bars = isinstance(self.x[0], str)
        width, bottom = 0.8 / len(self.curves), [0.0] * len(places)
        for number, (label, band) in enumerate(self.curves.items()):
            colour, style = self.styles.get(label, (COLOURS[number % len(COLOURS)], number))
            if not bars:
                _curve(axes, self.x, band, label, colour, style)
            elif self.total is not None:
                axes.bar(places, band.values, 0.7, bottom=bottom, color=colour, label=label)
                bottom = [low + value for low, value in zip(bottom, band.values, strict=True)]
            else:
                beside = [place + (number - (len(self.curves) - 1) / 2) * width for place in places]
                axes.bar(beside, band.values, width, color=colour, label=label)
                _whiskers(axes, beside, band)
        if self.total is not None:
            _whiskers(axes, places, self.total)
        for mark in self.marks:
            style_of: Any = {
                "linestyle": mark.line or "none",
                "marker": "" if mark.line else mark.point,
                "markersize": 5,
            }
            if mark.x:
                heights = mark.y if len(mark.y) == len(mark.x) else mark.y * len(mark.x)
                axes.plot(mark.x, heights, color=BLACK, linewidth=1.5, label=mark.label, **style_of)
                continue
            for number, height in enumerate(mark.y):
                axes.axhline(height, color=BLACK, linewidth=1, linestyle=mark.line, label="_" if number else mark.label)
        self._finish(axes, bars)

    def _finish(self, axes: Axes, bars: bool) -> None:
        if self.level is not None:
            axes.axhline(self.level, color=BLACK, linewidth=0.8)
        if bars:
            axes.set_xticks(range(len(self.x)), list(map(str, self.x)), fontsize=7)
            if len(self.x) * max(len(str(name).partition("\n")[0]) for name in self.x) > 120:
                axes.tick_params(axis="x", rotation=45)
        elif self.log:
            axes.set_xscale("log", base=2)
        if self.ticks is not None:
            axes.set_xticks(list(self.ticks), list(self.ticks.values()))
        axes.set_xlabel(self.xlabel)
        axes.set_ylabel(self.ylabel)
        axes.set_title(self.title)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(**{"fontsize": 7, **self.legend})

    def limit(self, axes: Axes) -> None:
        """Set the ends of the axis of values, once all panels that share it are drawn."""
        axes.set_ylim(self.low, self.high)
        mark_cut(axes)


def draw_panels(
    panels: Sequence[Panel],
    title: str,
    folder: Path,
    name: str,
    *,
    shared: bool = False,
    size: tuple[float, float] = (11, 3.3),
) -> Path:
    """Write a picture of panels beside each other, and return the PNG; an SVG lies next to it.

    Args:
        panels: several.
        title: of the picture.
        folder: of the files.
        name: of the files.
        shared: panels have one axis of values.
        size: of the picture, inches.
    """
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        many = figure.subplots(1, len(panels), sharey=shared, squeeze=False)[0]
        for axes, panel in zip(many, panels, strict=True):
            panel.draw(axes)
        for axes, panel in zip(many, panels, strict=True):
            panel.limit(axes)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        return drawing.save_both(figure, name, folder)


def over_sizes(sizes: Sequence[int]) -> dict[str, Any]:
    """Return how a panel over bytes names them: a tick at every fourth of some sizes."""
    ticks = {float(n): format_bytes(n) for n in sizes[::4]}
    return {"x": sizes, "ticks": ticks, "xlabel": f"bytes ({BANDS})"}


def mark_cut(axes: Axes) -> None:
    """Draw two strokes across the axis of values, if it does not begin at 0."""
    if axes.get_ylim()[0] > 0:
        for height in (0.025, 0.05):
            ends = (-0.012, 0.012), (height - 0.012, height + 0.012)
            axes.plot(*ends, transform=axes.transAxes, color=BLACK, linewidth=1.2, clip_on=False, zorder=9)


def _curve(axes: Axes, x: Sequence[Any], band: Band, name: str, colour: str, style: int) -> None:
    dash, marker = STYLES[style % len(STYLES)]
    known = [place for place, value in enumerate(band.values) if not math.isnan(value)]
    if len(known) < len(x):  # a line goes on over places that it has no value of
        x = [x[place] for place in known]
        band = Band(*(tuple(end[place] for place in known) for end in (band.values, band.low, band.high)))
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(x, band.values, color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.3, label=name)


def _whiskers(axes: Axes, places: Sequence[float], band: Band) -> None:
    if band.low == band.values == band.high:
        return
    below = [max(0.0, value - low) for value, low in zip(band.values, band.low, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(band.values, band.high, strict=True)]
    axes.errorbar(places, band.values, [below, above], fmt="none", ecolor=BLACK, elinewidth=0.8, capsize=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelinePanel:
    """One lane for each queue, engine or kernel, over time: the GEMM's first, each kind in a colour of its own.

    Attributes:
        intervals: what ran.
        title: of the panel.
        end_us: end of the axis, which pictures to be compared have in common; None ends it with the last interval.
    """

    intervals: Sequence[Interval]
    title: str = ""
    end_us: float | None = None

    @functools.cached_property
    def joined(self) -> list[Interval]:
        """The intervals, with neighbours that say the same as one."""
        return _joined(self.intervals)

    @property
    def lanes(self) -> list[tuple[str, str]]:
        """Groups and lanes, from the top."""
        lanes = dict.fromkeys((interval.group, interval.lane) for interval in self.joined)
        return sorted(lanes, key=lambda lane: lane[1] != "gemm")

    @property
    def height(self) -> float:
        """Height in inches at which lanes can be told apart."""
        return 1.2 + 0.24 * len(self.lanes)

    def draw(self, axes: Axes) -> None:
        """Draw into axes."""
        intervals, lanes = self.joined, self.lanes
        kinds = list(dict.fromkeys(_kind_of(interval) for interval in intervals))
        others = iter([colour for colour in COLOURS if colour not in KIND_COLOURS.values()] * len(kinds))
        colours = {kind: KIND_COLOURS.get(kind) or next(others) for kind in kinds}
        end = self.end_us or max((interval.end_us for interval in intervals), default=1.0)
        scale, unit = (1e3, "ms") if end > 10_000 else (1.0, "us")
        for kind, colour in colours.items():
            for place, lane in enumerate(lanes):
                mine = [i for i in intervals if (i.group, i.lane) == lane and _kind_of(i) == kind]
                bars = [(i.start_us / scale, (i.end_us - i.start_us) / scale) for i in mine]
                if bars:
                    axes.broken_barh(bars, (place - 0.4, 0.8), color=colour, linewidth=0)
            axes.plot([], [], color=colour, linewidth=6, label=kind)
        for i in intervals:
            if _kind_of(i) == UNITS and i.end_us - i.start_us > 0.04 * end:
                middle = (i.start_us + i.end_us) / 2 / scale
                place = lanes.index((i.group, i.lane))
                axes.text(middle, place, i.label.split()[0], color="white", fontsize=7, ha="center", va="center")
        names = [lane if group in ("links", "GPU") else f"{group} {lane}" for group, lane in lanes]
        axes.set_yticks(range(len(lanes)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02 * end / scale)
        axes.set_xlabel(f"time, {unit}")
        axes.set_title(self.title)
        axes.legend(ncols=len(kinds), fontsize=7, loc="lower right", bbox_to_anchor=(1, 1.0), borderaxespad=0.1)

    def limit(self, axes: Axes) -> None:
        """Change nothing: the axes end where the intervals do."""


def draw_timeline(
    intervals: Sequence[Interval], title: str, folder: Path, name: str, *, end_us: float | None = None
) -> Path:
    """Write a picture of a timeline, and return the PNG; the arguments are those of :class:`TimelinePanel`."""
    panel = TimelinePanel(intervals=intervals, title=title, end_us=end_us)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, panel.height), layout="constrained")
        panel.draw(figure.subplots())
        return drawing.save_both(figure, name, folder)


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Join neighbours of one lane that say the same: rates change more often than what runs."""
    joined: list[Interval] = []
    last: dict[tuple[str, str], int] = {}
    for interval in intervals:
        place = last.get((interval.group, interval.lane))
        before = None if place is None else joined[place]
        same = before is not None and _kind_of(interval) == UNITS and before.label == interval.label
        if place is not None and before is not None and same and abs(before.end_us - interval.start_us) < 1e-6:
            joined[place] = dataclasses.replace(before, end_us=interval.end_us)
        else:
            last[interval.group, interval.lane] = len(joined)
            joined.append(interval)
    return joined


def _kind_of(interval: Interval) -> str:
    """Return what decides the colour: the kind of command, or for a kernel whether it holds compute units."""
    words = interval.label.split()
    return UNITS if words[-1] == "workgroups" else interval.label if words[0] == "on" else words[0]

"""Collectives over size as pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane_lab.harness.drawing import (
    COLOURS,
    STYLES,
    file_name,
    label_ends,
    save,
    size_axis,
)
from sidelane_lab.harness.rows import SEPARATE
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.studies.collectives.rows import CollectiveRow
from sidelane_lab.studies.collectives.tables import way_to_call

R = TypeVar("R", bound=CollectiveRow)


def _variant(row: CollectiveRow) -> str:
    """The variant; one line for what auto chose, whatever that was at each size."""
    return row.variant if row.implementation != "auto" else SEPARATE if row.separate else ""


def draw_ways(rows: Sequence[CollectiveRow], results: Results, folder: Path) -> list[Picture]:
    """A picture for each way to call a collective."""
    return [
        draw_sizes(way, alike, results, folder) for way, alike in grouped([r for r in rows if r.time_us], way_to_call)
    ]


def draw_sizes(
    way: str, rows: Sequence[R], results: Results, directory: Path, *, line_of: Callable[[R], str] = _variant
) -> Picture:
    """Bus bandwidth over size and time over size, one line an implementation and what ``line_of`` says of a row."""
    lines = grouped(rows, lambda row: (row.implementation, line_of(row), row.prelaunch))
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
        size_axis(axes, sorted({row.bytes for row in rows}))
        axes.set_title(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    bandwidth.set_ylim(bottom=0)
    label_ends(bandwidth, ends, side="right")
    label_ends(time, starts, side="left")
    title = f"{way}: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = f"Bus bandwidth and time over size for {way}, one line an implementation and variant."
    return save(figure, file_name(way), title, text, directory)

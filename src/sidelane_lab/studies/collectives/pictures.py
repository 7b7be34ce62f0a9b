"""Collectives over size as pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane_lab.harness.report.drawing import (
    COLOURS,
    STYLES,
    Picture,
    file_name,
    label_ends,
    save,
    size_axis,
    where_from,
)
from sidelane_lab.harness.results.files import Results
from sidelane_lab.harness.results.rows.collectives import SEPARATE, CollectiveRow

R = TypeVar("R", bound=CollectiveRow)


def _variant(row: CollectiveRow) -> str:
    """The variant; one line for what auto chose, whatever that was at each size."""
    return row.variant if row.implementation != "auto" else SEPARATE if row.separate else ""


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
    title = f"{way}: {where_from(results)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = f"Bus bandwidth and time over size for {way}, one line an implementation and variant."
    return save(figure, file_name(way), title, text, directory)

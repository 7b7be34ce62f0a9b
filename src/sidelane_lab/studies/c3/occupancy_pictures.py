"""The occupancy study as pictures: times and overlap rates by blocks (overlap paper, figures 2 to 6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    STYLES,
    file_name,
    save,
)
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.studies.c3.occupancy_tables import pair_of
from sidelane_lab.studies.c3.rows import OccupancyRow

COLOURS = (BLUE, ORANGE, GREEN)
FIGURES = (("normalised", "time / sequential"), ("overlap_rate", "overlap rate, %"), ("time_us", "time, us"))
COMPARED = ("saved by priority, %", "time / that of {}")
"""With and without priority, and shape by shape, each at the same number of blocks."""


def draw_occupancy(rows: Sequence[OccupancyRow], results: Results, directory: Path) -> list[Picture]:
    """A picture for each pair: a panel a figure, a line for each shape with and without priority."""
    timed = [row for row in rows if row.time_us is not None]
    return [_draw(alike, results, directory) for _, alike in grouped(timed, pair_of, ordered=False)]


def _draw(rows: Sequence[OccupancyRow], results: Results, directory: Path) -> Picture:
    first = rows[0]
    figure = Figure(figsize=(11, 7), layout="constrained")
    above, below = figure.subplots(2, len(FIGURES))
    panels = list(above)
    shapes = list(dict.fromkeys(row.shape for row in rows))
    for panel, (name, label) in zip(panels, FIGURES, strict=True):
        for colour, shape in zip(COLOURS, shapes, strict=False):
            for priority in (False, True):
                mine = _unlimited([row for row in rows if (row.shape, row.priority) == (shape, priority)])
                dash, mark = STYLES[priority]
                style = {"linestyle": dash, "marker": mark, "markersize": 4, "color": colour}
                text = shape + (", priority" if priority else "")
                panel.plot([row.blocks for row in mine], [getattr(row, name) for row in mine], label=text, **style)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("thread blocks")
        panel.set_title(label)
        panel.set_ylim(bottom=0)
    panels[-1].legend(fontsize=7, frameon=False)
    _compared(below[0], below[1], rows, shapes)
    below[2].set_axis_off()
    pair = f"{first.gemm} with {first.collective} of {format_bytes(first.bytes)} by {first.implementation}"
    title = f"Pipelined iterations, {pair}: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = f"Normalised time, overlap rate and time of pipelined iterations by thread blocks, {pair}."
    name = file_name(f"occupancy {first.gemm} {first.collective} {format_bytes(first.bytes)} {first.implementation}")
    return save(figure, name, title, text, directory)


def _compared(saved: Axes, shaped: Axes, rows: Sequence[OccupancyRow], shapes: Sequence[str]) -> None:
    """What priority saves of each shape, and each shape against the first one."""
    times = {
        (shape, priority): {
            row.blocks: row.time_us
            for row in _unlimited([row for row in rows if (row.shape, row.priority) == (shape, priority)])
        }
        for shape in shapes
        for priority in (False, True)
    }
    for colour, shape in zip(COLOURS, shapes, strict=False):
        base, urgent = times[shape, False], times[shape, True]
        both = [blocks for blocks in base if blocks in urgent]
        gains = [100 * (1 - (urgent[blocks] or 0.0) / (base[blocks] or 1.0)) for blocks in both]
        saved.plot(both, gains, marker="o", markersize=4, color=colour, label=shape)
        for priority in (False, True):
            first, mine = times[shapes[0], priority], times[shape, priority]
            shared = [blocks for blocks in mine if blocks in first]
            if shape != shapes[0] and shared:
                ratios = [(mine[blocks] or 0.0) / (first[blocks] or 1.0) for blocks in shared]
                dash, mark = STYLES[priority]
                text = shape + (", priority" if priority else "")
                style: dict[str, Any] = {"linestyle": dash, "marker": mark, "markersize": 4, "color": colour}
                shaped.plot(shared, ratios, label=text, **style)
    for panel, title, level in ((saved, COMPARED[0], 0.0), (shaped, COMPARED[1].format(shapes[0]), 1.0)):
        panel.axhline(level, color=BLACK, linewidth=0.7)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("thread blocks")
        panel.set_title(title)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7, frameon=False)


def _unlimited(rows: Sequence[OccupancyRow]) -> list[OccupancyRow]:
    """Of each number of blocks the row whose blocks ask for no more memory than they need."""
    by_blocks = {row.blocks: row for row in sorted(rows, key=lambda row: row.resident)}
    return [by_blocks[blocks] for blocks in sorted(by_blocks)]

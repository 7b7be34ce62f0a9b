"""The occupancy study as pictures: normalised time and overlap rate by blocks (overlap paper, figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.bench.c3.occupancy_tables import pair_of
from sidelane.bench.report.drawing import BLUE, GREEN, ORANGE, STYLES, Picture, file_name, save, where_from
from sidelane.bench.report.table import grouped
from sidelane.bench.results.files import Results
from sidelane.bench.results.rows import OccupancyRow
from sidelane.sizes import format_bytes

COLOURS = (BLUE, ORANGE, GREEN)
FIGURES = (("normalised", "time / sequential"), ("overlap_rate", "overlap rate, %"), ("time_us", "time, us"))


def draw_occupancy(rows: Sequence[OccupancyRow], results: Results, directory: Path) -> list[Picture]:
    """A picture for each pair: a panel a figure, a line for each shape with and without priority."""
    timed = [row for row in rows if row.time_us is not None]
    return [_draw(alike, results, directory) for _, alike in grouped(timed, pair_of, ordered=False)]


def _draw(rows: Sequence[OccupancyRow], results: Results, directory: Path) -> Picture:
    first = rows[0]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(FIGURES))
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
    pair = f"{first.gemm} with {first.collective} of {format_bytes(first.bytes)} by {first.implementation}"
    title = f"Pipelined iterations, {pair}: {where_from(results)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = f"Normalised time, overlap rate and time of pipelined iterations by thread blocks, {pair}."
    name = file_name(f"occupancy {first.gemm} {first.collective} {format_bytes(first.bytes)} {first.implementation}")
    return save(figure, name, title, text, directory)


def _unlimited(rows: Sequence[OccupancyRow]) -> list[OccupancyRow]:
    """Of each number of blocks the row whose blocks ask for no more memory than they need."""
    by_blocks = {row.blocks: row for row in sorted(rows, key=lambda row: row.resident)}
    return [by_blocks[blocks] for blocks in sorted(by_blocks)]

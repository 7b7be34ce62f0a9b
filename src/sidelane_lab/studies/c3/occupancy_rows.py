"""Rows of the occupancy study as tables and pictures: times and overlap rates by blocks (overlap paper, 2 to 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.c3.shaping import choose, shaping_of
from sidelane.cli.table import Table, grouped, number
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
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import IMPLEMENTATIONS, Picture, Results
from sidelane_lab.studies.c3.rows import PairRow, pair_words


@dataclasses.dataclass(frozen=True, slots=True)
class OccupancyRow(PairRow):
    """Pipelined iterations of a GEMM in one shape and a collective (overlap paper).

    Attributes:
        bytes: as in :class:`CollectiveRow`.
        shape: of the GEMM's kernel: ``opt1``, ``opt2``, ``tuned``; on CPUs ``rows``.
        grid: ``persistent``: fewer blocks than tiles; or ``data-parallel``.
        blocks: of the grid.
        resident: blocks that a compute unit holds at once; 0 where nobody knows.
        shared_bytes: shared memory that a block asks for.
        priority: the collectives' stream goes before the GEMMs'.
        in_order: a GEMM waits for the one of the iteration before.
        iterations: of a pipeline.
        gemm_us, comm_us: of one, alone.
        sequential_us: of the iterations, one operation after another.
        time_us: of the iterations, overlapped.
        normalised: time over sequential, median over rounds.
        overlap_rate: percent of the collectives' time during which a GEMM ran.
        correct: the results of both were compared with a reference in this run.
        note: why there is no time.
    """

    allowed = (("implementation", IMPLEMENTATIONS),)
    figures = ("time_us", "normalised")

    implementation: str
    shape: str
    grid: str
    blocks: int
    resident: int
    shared_bytes: int
    priority: bool
    in_order: bool
    iterations: int
    gemm_us: float | None
    comm_us: float | None
    sequential_us: float | None
    time_us: float | None
    normalised: float | None
    overlap_rate: float | None
    correct: bool | None
    note: str = ""


COLUMNS: Mapping[str, Cell] = {
    "<shape": "shape",
    "<grid": "grid",
    "blocks": "blocks",
    "resident": "resident",
    "<priority": "priority",
    "GEMM\nalone us": "gemm_us",
    "sequential\nus": "sequential_us",
    "overlapped\nus": "time_us",
    "normalised": "normalised:.2f",
    "overlap\nrate %": "overlap_rate:.0f",
    "<correct": "correct",
}


def occupancy_tables(rows: Sequence[OccupancyRow]) -> list[Table]:
    """Make one table a pair and implementation; the least time is set off, and what shaping gains is a note."""
    tables = []
    for _, same in grouped(rows, pair_of, ordered=False):
        first = next((row for row in same if row.comm_us is not None), same[0])
        title = (
            f"{pair_words(first)} by {first.implementation}: {first.iterations} iterations, collective alone "
            f"{number(first.comm_us)} us" + (", GEMMs in order" if first.in_order else "")
        )
        tables.append(table_of(title, same, COLUMNS, keys=5, notes=gain(same)))
    return tables


def pair_of(row: OccupancyRow) -> tuple[object, ...]:
    """Return what rows of one table have in common."""
    return *row.pair, row.implementation, row.in_order


def gain(rows: Sequence[OccupancyRow]) -> tuple[str, ...]:
    """Say what the best shape and priority save over the fastest grid without any of it; empty without one."""
    timed = [row for row in rows if row.time_us is not None]
    try:
        return (choose([shaping_of(row, timed) for row in timed]).reason,)
    except ValueError:
        return ()


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
    """Draw what priority saves of each shape, and each shape against the first one."""
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
    """Return, of each number of blocks, the row whose blocks ask for no more memory than they need."""
    by_blocks = {row.blocks: row for row in sorted(rows, key=lambda row: row.resident)}
    return [by_blocks[blocks] for blocks in sorted(by_blocks)]

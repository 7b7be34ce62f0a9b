"""Rows of the occupancy study as tables and pictures: times and overlap rates by blocks (overlap paper, 2 to 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import BLACK, BLUE, GREEN, ORANGE, file_name, plot_line, save_titled
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import IMPLEMENTATIONS, Picture, Results
from sidelane_lab.harness.table import Table, grouped, number, verdict
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
        in_order: False: GEMMs of two iterations may run at once, each on a stream of its own.
        iterations: of a pipeline.
        gemm_us, comm_us: of one, alone.
        sequential_us: of the iterations, one operation after another.
        time_us: of the iterations, overlapped.
        normalised: time over sequential, median over rounds.
        overlap_rate: percent of the collectives' time during which a GEMM ran.
        correct: True if the results of both agreed with a reference in this run.
        note: reason why there is no time.
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
    "saved by\npriority %": lambda row, same: _saved(row, same),
    "overlap\nrate %": "overlap_rate:.0f",
    "<correct": lambda row, _: "" if row.correct is None and not row.note else verdict(row.correct),
}


def _saved(row: OccupancyRow, same: Sequence[OccupancyRow]) -> str:
    """Return the percent of the time that priority saves of the same GEMM."""
    gemm = (row.shape, row.grid, row.blocks, row.resident)
    plain = [one for one in same if (one.shape, one.grid, one.blocks, one.resident) == gemm and not one.priority]
    if not row.priority or not row.time_us or not plain or not plain[0].time_us:
        return ""
    return f"{100 * (1 - row.time_us / plain[0].time_us):.1f}"


def occupancy_tables(rows: Sequence[OccupancyRow]) -> list[Table]:
    """Make one table a pair and implementation; the least time is set off, and what shaping gains is a note."""
    tables = []
    for _, same in grouped(rows, pair_of, ordered=False):
        first = next((row for row in same if row.comm_us is not None), same[0])
        title = (
            f"{pair_words(first)} by {first.implementation}: {first.iterations} iterations, collective alone "
            f"{number(first.comm_us)} us"
        )
        tables.append(table_of(title, same, COLUMNS, keys=5, notes=gain(same)))
    return tables


def pair_of(row: OccupancyRow) -> tuple[object, ...]:
    """Return what rows of one table have in common."""
    return *row.pair, row.implementation


LEAST_SAVED = 0.01
"""Share of the time that shaping must save: below it a kernel that is slower alone is not worth it."""


def gain(rows: Sequence[OccupancyRow]) -> tuple[str, ...]:
    """Say what the best shape and priority save over the fastest grid without any of it; empty without one.

    A shape limits a GEMM where fewer of its blocks are on a unit than fit, or fewer are launched than it has tiles.
    """
    timed = [(row.time_us, row) for row in rows if row.time_us is not None]
    fitting: dict[str, int] = {}
    for _, row in timed:
        fitting[row.shape] = max(row.resident, fitting.get(row.shape, 0))
    plain = [
        (us, row)
        for us, row in timed
        if row.grid == "data-parallel" and row.resident == fitting[row.shape] and not row.priority
    ]
    if not plain:
        return ()
    (usual_us, usual), (best_us, best) = (min(some, key=lambda one: one[0]) for some in (plain, timed))
    saved = 1 - best_us / usual_us
    if saved >= LEAST_SAVED:
        than = f"{100 * saved:.1f}% less than {_words(usual)} ({usual_us:.0f} us)"
        return (f"{_words(best)}: {best_us:.0f} us, {than}",)
    less = "" if best is usual else f"; shaping and priority save {100 * saved:.1f}% ({_words(best)})"
    return (f"{_words(usual)}: {usual_us:.0f} us{less}",)


def _words(row: OccupancyRow) -> str:
    resident = f", {row.resident} resident" if row.resident else ""
    return f"{row.shape}, {row.blocks} blocks{resident}{', priority' if row.priority else ''}"


COLOURS = (BLUE, ORANGE, GREEN)
FIGURES = (("normalised", "time / sequential"), ("overlap_rate", "overlap rate, %"), ("time_us", "time, us"))


def draw_occupancy(rows: Sequence[OccupancyRow], results: Results, directory: Path) -> list[Picture]:
    """Draw a picture for each pair: a panel a figure, a line for each shape with and without priority."""
    timed = [row for row in rows if row.time_us is not None]
    return [_draw(alike, results, directory) for _, alike in grouped(timed, pair_of, ordered=False)]


def _draw(rows: Sequence[OccupancyRow], results: Results, directory: Path) -> Picture:
    first, shapes = rows[0], list(dict.fromkeys(row.shape for row in rows))
    curves = {
        (shape, priority): _unlimited([row for row in rows if (row.shape, row.priority) == (shape, priority)])
        for shape in shapes
        for priority in (False, True)
    }
    colours = dict(zip(shapes, COLOURS, strict=False))
    figure = Figure(figsize=(11, 7), layout="constrained")
    above, (saved, shaped, empty) = figure.subplots(2, len(FIGURES))
    empty.set_axis_off()

    def plot(panel: Axes, shape: str, priority: bool, points: Mapping[int, float]) -> None:
        if shape in colours:
            plot_line(panel, points, shape + (", priority" if priority else ""), colours[shape], priority)

    for panel, (name, label) in zip(above, FIGURES, strict=True):
        for way, curve in curves.items():
            plot(panel, *way, {blocks: getattr(row, name) for blocks, row in curve.items()})
        panel.set_title(label)
        panel.set_ylim(bottom=0)
    for (shape, priority), curve in curves.items():
        # What priority saves of each shape, and each shape against the first one, at the same numbers of blocks.
        if priority:
            saved_by_blocks = _ratios(curve, curves[shape, False])
            plot(saved, shape, False, {at: 100 * (1 - ratio) for at, ratio in saved_by_blocks.items()})
        if shape != shapes[0]:
            plot(shaped, shape, priority, _ratios(curve, curves[shapes[0], priority]))
    for panel, title, level in ((saved, "saved by priority, %", 0.0), (shaped, f"time / that of {shapes[0]}", 1.0)):
        panel.axhline(level, color=BLACK, linewidth=0.7)
        panel.set_title(title)
    for panel in (*above, saved, shaped):
        panel.set_xscale("log", base=2)
        panel.set_xlabel("thread blocks")
    for panel in (above[-1], saved, shaped):
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7, frameon=False)
    pair = f"{first.gemm} with {first.collective} of {format_bytes(first.bytes)} by {first.implementation}"
    text = f"Normalised time, overlap rate and time of pipelined iterations by thread blocks, {pair}."
    name = file_name(f"occupancy {first.gemm} {first.collective} {format_bytes(first.bytes)} {first.implementation}")
    return save_titled(figure, name, f"Pipelined iterations, {pair}: {results.where}", text, directory)


def _ratios(ours: Mapping[int, OccupancyRow], theirs: Mapping[int, OccupancyRow]) -> dict[int, float]:
    """Return times over others by blocks, where both have some."""
    return {at: (ours[at].time_us or 0.0) / (theirs[at].time_us or 1.0) for at in ours if at in theirs}


def _unlimited(rows: Sequence[OccupancyRow]) -> dict[int, OccupancyRow]:
    """Return, of each number of blocks, the row whose blocks ask for no more memory than they need."""
    by_blocks = {row.blocks: row for row in sorted(rows, key=lambda row: row.resident)}
    return dict(sorted(by_blocks.items()))

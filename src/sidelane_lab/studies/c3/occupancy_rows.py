"""Rows of the occupancy study as tables and pictures: times and overlap rates by blocks (overlap paper, 2 to 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import IMPLEMENTATIONS
from sidelane_lab.harness.table import Table, grouped, number, verdict
from sidelane_lab.studies.c3.rows import PairRow, pair_words


@dataclasses.dataclass(frozen=True, slots=True)
class OccupancyRow(PairRow):
    """Pipelined iterations of a GEMM in one shape and a collective (overlap paper).

    Attributes:
        bytes: as in :class:`CollectiveRow`.
        shape: shape of the GEMM's kernel: ``opt1``, ``opt2``, ``tuned``; on CPUs ``rows``.
        grid: ``persistent``: fewer blocks than tiles; or ``data-parallel``.
        blocks: blocks of the grid.
        resident: blocks that a compute unit holds at once; 0 where it is not known.
        shared_bytes: shared memory that a block asks for.
        priority: the collectives' stream goes before the GEMMs'.
        in_order: False: GEMMs of two iterations may run at once, each on a stream of its own.
        iterations: iterations of a pipeline.
        gemm_us, comm_us: time of one GEMM, and of one collective, alone.
        sequential_us: time of the iterations, one operation after another.
        time_us: time of the iterations, overlapped.
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

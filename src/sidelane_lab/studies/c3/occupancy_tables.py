"""Rows of the occupancy study as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.c3.shaping import choose, shaping_of
from sidelane.cli.table import Line, Table, grouped, notes_of, number, verdict, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.studies.c3.rows import OccupancyRow

COLUMNS: tuple[str, ...] = (
    *("<shape", "<grid", "blocks", "resident", "<priority", "GEMM\nalone us", "sequential\nus", "overlapped\nus"),
    *("normalised", "overlap\nrate %", "<correct"),
)


def occupancy_tables(rows: Sequence[OccupancyRow]) -> list[Table]:
    """One table a pair and implementation; the least time is set off, and what shaping gains is a note."""
    tables = []
    for _, same in grouped(rows, pair_of, ordered=False):
        first = next((row for row in same if row.comm_us is not None), same[0])
        least = min((row.time_us for row in same if row.time_us is not None), default=None)
        title = (
            f"{first.gemm} ({first.m}x{first.n}x{first.k} {first.dtype}) with {first.collective} of "
            f"{format_bytes(first.bytes)} by {first.implementation}: {first.iterations} iterations, collective alone "
            f"{number(first.comm_us)} us" + (", GEMMs in order" if first.in_order else "")
        )
        lines = tuple(Line(_cells(row), best=least is not None and row.time_us == least) for row in same)
        notes = (*notes_of([(" ".join(_cells(row)[:4]), row.note) for row in same]), *gain(same))
        tables.append(without_empty_columns(Table(title, COLUMNS, lines, notes, keys=5)))
    return tables


def pair_of(row: OccupancyRow) -> tuple[object, ...]:
    """What rows of one table have in common."""
    return row.gemm, row.dtype, row.collective, row.bytes, row.implementation, row.in_order


def gain(rows: Sequence[OccupancyRow]) -> tuple[str, ...]:
    """What the best shape and priority save over the fastest grid without any of it, in words; empty without one."""
    timed = [row for row in rows if row.time_us is not None]
    try:
        return (choose([shaping_of(row, timed) for row in timed]).reason,)
    except ValueError:
        return ()


def _cells(row: OccupancyRow) -> tuple[str, ...]:
    return (
        row.shape,
        row.grid,
        str(row.blocks) if row.blocks else "",
        str(row.resident) if row.resident else "",
        "yes" if row.priority else "no",
        number(row.gemm_us),
        number(row.sequential_us),
        number(row.time_us),
        "" if row.normalised is None else f"{row.normalised:.2f}",
        "" if row.overlap_rate is None else f"{row.overlap_rate:.0f}",
        verdict(row.correct),
    )

"""Phases as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped, notes_of, number, verdict, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.studies.phases.rows import PREDICTED, PhaseRow

PHASE_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<launch",
    "control\nus",
    "schedule\nus",
    "copy\nus",
    "slot\nus",
    "sync\nus",
    "total\nus",
    "no stamps\nus",
    "host\nus",
    "<correct",
)


def phase_tables(rows: Sequence[PhaseRow]) -> list[Table]:
    """One table an operation and variant: what was measured, and what is predicted, size by size."""
    tables = []
    for title, alike in grouped(rows, phase_title, ordered=False):
        sizes = grouped(alike, lambda row: row.bytes)
        rule = any(len(same) > 1 for _, same in sizes)
        lines = [Line(_phase_cells(row), rule=rule and row is same[-1]) for _, same in sizes for row in same]
        predicted = [row for row in alike if row.source == PREDICTED and row.total_us is not None]
        notes = notes_of(
            [(f"{format_bytes(row.bytes)} {row.launch}", row.note) for row in alike if row not in predicted]
        )
        notes += tuple(dict.fromkeys(row.note for row in predicted if row.note))
        tables.append(without_empty_columns(Table(title, PHASE_COLUMNS, tuple(lines), notes, keys=2)))
    return tables


def phase_title(row: PhaseRow) -> str:
    """What rows of one table and one picture have in common."""
    return f"{row.operation} {row.variant}"


def _phase_cells(row: PhaseRow) -> tuple[str, ...]:
    before, after = (row.control_us, row.schedule_us, row.copy_us), (row.sync_us, row.total_us)
    times = (*map(number, before), number(row.stage_us) if row.stage_us else "", *map(number, after))
    if row.source == PREDICTED:
        return (format_bytes(row.bytes), PREDICTED, *times, "", number(row.host_us), "")
    looked = (number(row.total_unstamped_us), number(row.host_us), verdict(row.correct))
    return (format_bytes(row.bytes), row.launch, *times, *looked)

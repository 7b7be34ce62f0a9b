"""Rows of process groups as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import (
    MISSING,
    Line,
    Table,
    grouped,
    notes_of,
    number,
    verdict,
    without_empty_columns,
)
from sidelane.sizes import format_bytes
from sidelane_lab.harness.rows import OF_LIBRARY
from sidelane_lab.studies.process_group.rows import FIRST, GroupRow

CALL_COLUMNS: tuple[str, ...] = (
    *("bytes", "<launch", "<group", "<tensors", "<variant", "time\nus", "p10-p90\nus", "host\nus"),
    *("library\nover it", "<correct"),
)
FIRST_COLUMNS: tuple[str, ...] = ("<first use", "<group", "s", "more than\nthe library", "memory\nMB")


def group_tables(rows: Sequence[GroupRow]) -> list[Table]:
    """One table an operation, the fastest of each size and launch set off; and one of first uses."""
    tables = []
    first = [row for row in rows if row.launch == FIRST]
    for operation, alike in grouped([r for r in rows if r.launch != FIRST], lambda r: r.operation, ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: (row.bytes, row.launch), ordered=False):
            best = min((row.time_us for row in same if row.time_us is not None), default=None)
            lines += [
                Line(_cells(row, same), best=best is not None and row.time_us == best, rule=row is same[-1])
                for row in same
            ]
        notes = notes_of([(" ".join(_cells(row, alike)[:4]), row.note) for row in alike])
        tables.append(without_empty_columns(Table(operation, CALL_COLUMNS, tuple(lines), notes, keys=4)))
    if first:
        lines = [Line(_first_cells(row, first)) for row in first]
        tables.append(Table("First use, seconds from begin to end", FIRST_COLUMNS, tuple(lines)))
    return tables


def _cells(row: GroupRow, same: Sequence[GroupRow]) -> tuple[str, ...]:
    library = next((one.time_us for one in same if one.implementation in OF_LIBRARY), None)
    faster = (
        "" if row.implementation in OF_LIBRARY or not library or not row.time_us else f"{library / row.time_us:.2f}"
    )
    made_by = row.variant or ("" if row.made_by in ("", row.implementation) else row.made_by)
    return (
        *(format_bytes(row.bytes or 0), row.launch, row.implementation, row.tensors, made_by, number(row.time_us)),
        "" if row.p10_us is None else f"{number(row.p10_us)}-{number(row.p90_us)}",
        *(number(row.host_us) if row.host_us is not None else "", faster, verdict(row.correct)),
    )


def _first_cells(row: GroupRow, first: Sequence[GroupRow]) -> tuple[str, ...]:
    same = [one for one in first if one.operation == row.operation]
    library = next((one.time_us for one in same if one.implementation in OF_LIBRARY), None)
    more = "" if row.implementation in OF_LIBRARY or library is None or row.time_us is None else row.time_us - library
    return (
        *(row.operation, row.implementation, MISSING if row.time_us is None else f"{row.time_us / 1e6:.2f}"),
        more if isinstance(more, str) else f"{more / 1e6:+.2f}",
        "" if row.held_mb is None else f"{row.held_mb:.0f}",
    )

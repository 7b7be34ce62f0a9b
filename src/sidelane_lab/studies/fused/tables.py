"""Rows of the study of fused operators as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped, notes_of, number, verdict, without_empty_columns
from sidelane_lab.studies.fused.rows import ALONE, FusedRow

FUSED_COLUMNS: tuple[str, ...] = (
    *("<shape", "<implementation", "<made of, schedule", "us", "bound\nus", "times the\nbest unfused"),
    *("GB/s\nread", "skew\nus", "<correct"),
)


def fused_tables(rows: Sequence[FusedRow]) -> list[Table]:
    """One table an operator and launch; each shape's fastest is set off."""
    tables = []
    for (op, launch), alike in grouped(rows, lambda row: (row.op, row.launch), ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: row.shape, ordered=False):
            whole = [row for row in same if row.implementation not in ALONE]
            best = min((row.time_us for row in whole if row.time_us is not None), default=None)
            unfused = next((row.time_us for row in same if row.implementation == "unfused_best"), None)
            shown = [row for row in same if row.implementation != "unfused_best"]
            lines += [
                Line(_cells(row, unfused), best=row in whole and row.time_us == best, rule=row is shown[-1])
                for row in shown
            ]
        notes = notes_of([(" ".join(_cells(row, None)[:3]), row.note) for row in alike])
        made = Table(f"{op}, {launch}", FUSED_COLUMNS, tuple(lines), notes, keys=3)
        tables.append(without_empty_columns(made))
    return tables


def _cells(row: FusedRow, unfused_us: float | None) -> tuple[str, ...]:
    is_whole = unfused_us is not None and row.time_us is not None and row.implementation not in ALONE
    ratio = unfused_us / row.time_us if is_whole and unfused_us and row.time_us else None
    return (
        row.shape,
        row.implementation,
        row.schedule,
        number(row.time_us),
        number(row.bound_us),
        "" if ratio is None else f"{ratio:.2f}",
        "" if row.gbps is None else number(row.gbps),
        "" if row.skew_us is None else number(row.skew_us),
        "" if row.implementation in ALONE and row.time_us is not None else verdict(row.correct),
    )

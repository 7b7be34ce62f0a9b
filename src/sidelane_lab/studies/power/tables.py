"""Power and energy as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped, notes_of, number, place_of, verdict, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.harness.rows import MODEL
from sidelane_lab.studies.power.rows import PowerRow

POWER_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<implementation",
    "<variant",
    "time\nus",
    "W",
    "read/\ncount %",
    "energy\nmJ",
    "above\nidle mJ",
    "<correct",
)


def power_tables(rows: Sequence[PowerRow]) -> list[Table]:
    """One table for each way to call a collective; the least energy of each size is set off."""
    tables = []
    for _, alike in grouped(rows, lambda row: (row.collective, row.in_place, row.launch)):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            ranked = sorted(same, key=lambda row: (row.energy_mj is None, row.energy_mj or 0.0))
            lines += [
                Line(_power_cells(row), best=place == 0 and row.energy_mj is not None, rule=row is ranked[-1])
                for place, row in enumerate(ranked)
            ]
        idle = next((f", idle {row.idle_watts:.0f} W" for row in alike if row.idle_watts is not None), "")
        notes = notes_of([(" ".join(_power_cells(row)[:3]).rstrip(), row.note) for row in alike])
        title = f"{power_title(alike[0])}: W a GPU{idle}, energy of all GPUs for one call"
        tables.append(without_empty_columns(Table(title, POWER_COLUMNS, tuple(lines), notes, keys=3)))
    return tables


def power_title(row: PowerRow) -> str:
    """What rows of one table and one picture have in common."""
    return f"{row.collective}, {place_of(row.in_place)}" + (f", {row.launch}" if row.launch != MODEL else "")


def _power_cells(row: PowerRow) -> tuple[str, ...]:
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant,
        number(row.time_us),
        number(row.watts),
        "" if row.counters_agree_percent is None else f"{row.counters_agree_percent:.0f}",
        number(row.energy_mj),
        number(row.energy_above_idle_mj),
        "" if row.launch == MODEL else verdict(row.correct),
    )

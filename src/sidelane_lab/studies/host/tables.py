"""Host times as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped, notes_of, number, verdict, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.harness.results.rows.calls import HostRow

HOST_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<implementation",
    "<variant",
    "<tensors",
    "driver\ncalls",
    "host\nus",
    "p10-p90\nus",
    "best\nus",
    "<correct",
)


def host_tables(rows: Sequence[HostRow]) -> list[Table]:
    """One table an operation, in the order of the rows; what takes the host least at each size is set off."""
    tables = []
    for operation, alike in grouped(rows, lambda row: row.operation, ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            best = min((row.host_us for row in same if row.host_us is not None), default=None)
            lines += [
                Line(_host_cells(row), best=best is not None and row.host_us == best, rule=row is same[-1])
                for row in same
            ]
        of_all = {row.note for row in alike}
        names = [" ".join(_host_cells(row)[:4]) if len(of_all) > 1 else "all" for row in alike]
        notes = notes_of(list(dict.fromkeys(zip(names, (row.note for row in alike), strict=True))))
        tables.append(
            without_empty_columns(Table(f"{operation}: host time", HOST_COLUMNS, tuple(lines), notes, keys=4))
        )
    return tables


def _host_cells(row: HostRow) -> tuple[str, ...]:
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant,
        "symmetric" if row.symmetric else "ordinary",
        "" if row.driver_calls is None else str(row.driver_calls),
        number(row.host_us),
        "" if row.p10_us is None else f"{number(row.p10_us)}-{number(row.p90_us)}",
        number(row.best_us),
        verdict(row.correct),
    )

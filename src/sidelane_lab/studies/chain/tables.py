"""Rows of the study of chains as tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sidelane.cli.table import MISSING, Line, Table, grouped, notes_of, number, verdict
from sidelane.sizes import format_bytes
from sidelane_lab.harness.results.rows.calls import PRELAUNCHED, ChainRow
from sidelane_lab.harness.results.rows.flat import OF_LIBRARY

CHAIN_COLUMNS: tuple[str, ...] = (
    *("bytes", "<implementation", "<variant", "<place", "chain\nus", "GEMMs\nalone us", "between\nus", "<correct"),
)
CHAIN_BEST_COLUMNS: tuple[str, ...] = (
    *(
        "bytes",
        "<launch",
        "<fastest of\nSidelane",
        "us",
        "auto\nus",
        "<fastest of\nthe library",
        "us",
        "ratio",
    ),
)
OWN = ("dma", "sm", "auto")


def chain_tables(rows: Sequence[ChainRow]) -> list[Table]:
    """Sidelane's best against the library's, then one table for each way to launch; each size's fastest is set off."""
    tables = [_chain_summary(rows)] if rows else []
    for launch, alike in grouped(rows, lambda row: row.launch):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            ranked = sorted(same, key=lambda row: (row.time_us is None, row.time_us))
            lines += [
                Line(_chain_cells(row), best=place == 0 and row.time_us is not None, rule=row is ranked[-1])
                for place, row in enumerate(ranked)
            ]
        notes = notes_of([(" ".join(_chain_cells(row)[:4]).rstrip(), row.note) for row in alike])
        tables.append(
            Table(f"GEMM, all_gather, GEMM, {alike[0].dtype}, {launch}", CHAIN_COLUMNS, tuple(lines), notes, keys=4)
        )
    return tables


def _chain_summary(rows: Sequence[ChainRow]) -> Table:
    """The fastest of both sides, size by size. Libraries have no prelaunched calls: there it is their eager one."""

    def fastest(nbytes: int, launch: str, names: Collection[str]) -> ChainRow | None:
        found = [row for row in rows if (row.bytes, row.launch) == (nbytes, launch) and row.implementation in names]
        return min((row for row in found if row.time_us), key=lambda row: row.time_us or 0.0, default=None)

    lines = []
    for (nbytes, launch), _ in grouped(rows, lambda row: (row.bytes, row.launch)):
        ours, auto = fastest(nbytes, launch, OWN), fastest(nbytes, launch, ("auto",))
        theirs = fastest(nbytes, "eager" if launch == PRELAUNCHED else launch, OF_LIBRARY)
        us = [number(row.time_us if row else None) for row in (ours, auto, theirs)]
        # On our side without the implementation: the variant tells it.
        names = [" ".join(filter(None, _chain_cells(row)[a:4])) if row else "" for row, a in ((ours, 2), (theirs, 1))]
        ratio = theirs.time_us / ours.time_us if theirs and theirs.time_us and ours and ours.time_us else None
        cells = (format_bytes(nbytes), launch, names[0], us[0], us[1], names[1], us[2])
        lines.append(Line((*cells, MISSING if ratio is None else f"{ratio:.3f}"), best=ratio is not None and ratio > 1))
    return Table(f"GEMM, all_gather, GEMM, {rows[0].dtype}: the fastest", CHAIN_BEST_COLUMNS, tuple(lines), keys=2)


def _chain_cells(row: ChainRow) -> tuple[str, ...]:
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant,
        "in" if row.in_place else "out",
        number(row.time_us),
        number(row.gemms_us),
        number(None if row.time_us is None else row.time_us - row.gemms_us),
        verdict(row.correct),
    )

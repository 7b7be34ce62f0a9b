"""Rows of the study of collectives as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import (
    MISSING,
    Line,
    Table,
    grouped,
    notes_of,
    number,
    place_of,
    verdict,
    without_empty_columns,
)
from sidelane.sizes import format_bytes
from sidelane_lab.harness.rows import OF_LIBRARY
from sidelane_lab.studies.collectives.rows import CollectiveRow

COLLECTIVE_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<implementation",
    "<variant",
    "time\nus",
    "p10-p90\nus",
    "bus\nGB/s",
    "energy\nmJ",
    "<correct",
)
LIST_COLUMNS: tuple[str, ...] = (
    *("bytes", "<launch", "list\nus", "separate\nus", "saves\n%", "<fastest of\nthe library", "us", "ratio"),
)


def collective_tables(rows: Sequence[CollectiveRow]) -> list[Table]:
    """One table for each way to call a collective, ordered by size as in nccl-tests; each size's fastest is set off.

    Lists of tensors have one before these that holds them against separate calls and against the library.
    """
    listed = [row for row in rows if row.tensors > 1]
    calls = grouped(listed, lambda row: (row.collective, row.dtype, row.in_place, row.tensors))
    tables = [_list_summary(alike) for _, alike in calls]
    for _, alike in grouped(rows, lambda row: (row.collective, row.dtype, row.in_place, row.launch, row.tensors)):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            ranked = sorted(same, key=lambda row: (row.time_us is None, row.time_us or 0.0))
            lines += [
                Line(_collective_cells(row), best=place == 0 and row.time_us is not None, rule=row is ranked[-1])
                for place, row in enumerate(ranked)
            ]
        notes = notes_of([(f"{' '.join(_collective_cells(row)[:3]).rstrip()}", row.note) for row in alike])
        tables.append(
            without_empty_columns(Table(way_to_call(alike[0]), COLLECTIVE_COLUMNS, tuple(lines), notes, keys=3))
        )
    return tables


def _list_summary(rows: Sequence[CollectiveRow]) -> Table:
    """What a list saves: ``auto`` with it in one call, ``auto`` in a call for each tensor, and the library's best."""
    lines = []
    for (nbytes, launch), same in grouped(rows, lambda row: (row.bytes, row.launch)):
        timed = [row for row in same if row.time_us is not None]
        auto = {row.separate: row.time_us for row in timed if row.implementation == "auto"}
        theirs = min((row for row in timed if row.implementation in OF_LIBRARY), key=_time_of, default=None)
        one, each, other = auto.get(False), auto.get(True), None if theirs is None else theirs.time_us
        saves = f"{100 * (1 - one / each):.0f}" if one and each else MISSING
        ratio = f"{other / one:.3f}" if one and other else MISSING
        name = f"{theirs.implementation} {theirs.variant}".rstrip() if theirs else ""
        cells = (format_bytes(nbytes), launch, number(one), number(each), saves, name, number(other), ratio)
        lines.append(Line(cells, best=bool(one and one <= min(each or one, other or one))))
    first = rows[0]
    title = f"{first.collective}, {first.dtype}, {place_of(first.in_place)}, lists of {first.tensors} tensors"
    note = (
        "list, separate: auto, in one call and in a call for each tensor; ratio: the library's time over that of list"
    )
    return Table(f"{title} against separate calls", LIST_COLUMNS, tuple(lines), (note,), keys=2)


def way_to_call(row: CollectiveRow) -> str:
    """What rows of one table and one picture have in common."""
    listed = f", lists of {row.tensors} tensors" if row.tensors > 1 else ""
    return f"{row.collective}, {row.dtype}, {place_of(row.in_place)}, {row.launch}{listed}"


def _collective_cells(row: CollectiveRow) -> tuple[str, ...]:
    spread = f"{number(row.p10_us)}-{number(row.p90_us)}" if row.p10_us is not None else ""
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant + ("+prelaunch" if row.prelaunch and "prelaunch" not in row.variant else ""),
        number(row.time_us),
        spread,
        number(row.bus_gbps),
        "" if row.energy_mj is None else number(row.energy_mj),
        verdict(row.correct),
    )


def _time_of(row: CollectiveRow) -> float:
    return row.time_us or 0.0

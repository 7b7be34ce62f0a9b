"""Rows of collectives by the memory that their tensors lie in, as tables and as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import draw_sizes
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.study import OF_LIBRARY, Picture, Results
from sidelane_lab.harness.table import (
    Table,
    grouped,
    place_of,
)
from sidelane_lab.studies.c3.rows import TOGETHER_COLUMNS, alone_words, lost_percent, pair_words
from sidelane_lab.studies.collectives import CollectiveRow

SYMMETRIC, LEARNED, MAPPED, STAGED = "symmetric", "learned", "mapped", "staged"
REACHES = (SYMMETRIC, LEARNED, MAPPED, STAGED, "")
CHANGES = ("repeated", "rotating", "missed", "new_address", "new_segment")
"""Tensors that change from call to call, in files of before 29 November 2026; so are ``LEARNED`` and ``MAPPED``."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrdinaryRow(CollectiveRow):
    """A collective on tensors in some kind of memory: alone, or next to a GEMM, which the row names then.

    Attributes:
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` have ordinary tensors.
        variant: variant that ``auto`` chose; for tensors that change, how they do (:data:`CHANGES`).
        time_us: time of a call, or of both together next to a GEMM, median over the rounds of the slowest rank.
        bus_gbps: bus bandwidth; null next to a GEMM.
        note: reason of the last choice (``Communicator.last_choice``), or why there is no time.
        reach: way in which peers reach the tensors: ``symmetric`` or ``staged``; empty for a library.
        gemm: GEMM that ran beside it; empty if it ran alone.
        m: rows of that GEMM; null if there is none.
        n: columns of that GEMM; null if there is none.
        k: depth of that GEMM; null if there is none.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same call, which says that a computation runs next to it, in the same rounds.
        best_comm_us: fastest isolated time of the call, of all implementations and kinds of memory.
        speedup, ideal, percent_of_ideal: as in :class:`C3Row`.
        host_us: host time of a call on tensors that change, from its begin until it returns, with an idle device and
            all hosts at once; the median over the calls of the slowest rank.
    """

    allowed = (*CollectiveRow.allowed, ("reach", REACHES))
    figures = ("time_us",)

    reach: str = ""
    gemm: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    gemm_us: float | None = None
    comm_us: float | None = None
    best_comm_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None
    host_us: float | None = None

    def __post_init__(self) -> None:
        CollectiveRow.__post_init__(self)
        if self.gemm and self.time_us is not None and self.speedup is None:
            raise ValueError("OrdinaryRow: next to a GEMM, time_us goes with a speedup (value=None)")


def _over(row: OrdinaryRow, same: Sequence[OrdinaryRow]) -> str:
    """Return the library's time over that of a row; more than 1: the row is faster."""
    theirs = [one.time_us for one in same if one.implementation in OF_LIBRARY and one.time_us is not None]
    if row.implementation in OF_LIBRARY or not theirs or not row.time_us:
        return ""
    return f"{min(theirs) / row.time_us:.3f}"


WHO: Mapping[str, Cell] = {"<implementation": "implementation", "<tensors": "reach"}
TIMES: Mapping[str, Cell] = {"time\nus": "time_us", "p10-p90\nus": spread}
LAST: Mapping[str, Cell] = {"library\nover it": _over, "<correct": "correct"}
ALONE_COLUMNS = {"bytes": "bytes", **WHO, "<variant": "variant", **TIMES, "bus\nGB/s": "bus_gbps", **LAST}
PAIR_COLUMNS = {**WHO, "<variant": "variant", "alone\nus": "comm_us", **TOGETHER_COLUMNS, "<correct": "correct"}
CHANGING_COLUMNS = {"<change": "variant", **WHO, **TIMES, "host\nus": "host_us", **LAST}


def is_changing(row: OrdinaryRow) -> bool:
    """True for rows of tensors that change."""
    return row.variant in CHANGES


def ordinary_tables(rows: Sequence[OrdinaryRow]) -> list[Table]:
    """Alone: one table a way to call. Next to a GEMM: one a pair. Changing tensors: one a size. The best is set off."""
    alone = [row for row in rows if not row.gemm and not is_changing(row)]
    pairs = [row for row in rows if row.gemm]
    changing = [row for row in rows if not row.gemm and is_changing(row)]
    tables = [
        table_of(way, alike, ALONE_COLUMNS, by=lambda row: row.bytes, keys=3, noted=_is_noted)
        for way, alike in grouped(alone, way_to_call, ordered=False)
    ]
    for _, alike in grouped(pairs, lambda row: (row.gemm, row.collective, row.bytes)):
        first = next((row for row in alike if row.gemm_us is not None), alike[0])
        title = f"{pair_words(first)}: {alone_words(first)}"
        tables.append(table_of(title, alike, PAIR_COLUMNS, keys=2, value=lost_percent, noted=_is_noted))
    for (kind, nbytes), alike in grouped(changing, lambda row: (row.collective, row.bytes)):
        title = f"{kind} of {format_bytes(nbytes)}, {alike[0].dtype}, on tensors that change from call to call"
        by: dict[str, Any] = {"by": lambda row: row.variant, "keys": 3, "noted": _is_noted}
        tables.append(table_of(title, alike, CHANGING_COLUMNS, **by))
    return tables


def way_to_call(row: OrdinaryRow) -> str:
    """Return what rows of one table and one picture have in common."""
    return f"{row.collective}, {row.dtype}, {place_of(row.in_place)}, {row.launch}"


def _is_noted(row: OrdinaryRow) -> bool:
    """Show why there is no time, and of mapped tensors how calls went; the file has the rest."""
    return row.time_us is None or row.reach in (LEARNED, MAPPED)


def draw_alone(rows: Sequence[OrdinaryRow], results: Results, folder: Path) -> list[Picture]:
    """A picture for each way to call a collective that ran alone."""
    alone = [row for row in rows if row.time_us and not row.gemm and not is_changing(row)]
    ways = grouped(alone, way_to_call)
    return [draw_sizes(way, alike, results, folder, lambda row: row.reach) for way, alike in ways]

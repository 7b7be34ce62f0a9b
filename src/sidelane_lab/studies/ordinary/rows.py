"""Rows of collectives by the memory that their tensors lie in, as tables and as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

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
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.studies.collectives.rows import CollectiveRow, draw_sizes

SYMMETRIC, LEARNED, MAPPED, STAGED = "symmetric", "learned", "mapped", "staged"
REACHES = (SYMMETRIC, LEARNED, MAPPED, STAGED, "")
REPEATED, ROTATING, MISSED, NEW_ADDRESS, NEW_SEGMENT = "repeated", "rotating", "missed", "new_address", "new_segment"
CHANGES = (REPEATED, ROTATING, MISSED, NEW_ADDRESS, NEW_SEGMENT)  # MISSED: in files of before 27 November 2026


@dataclasses.dataclass(frozen=True, slots=True)
class OrdinaryRow(CollectiveRow):
    """A collective on tensors in some kind of memory: alone, next to a GEMM, or on tensors that change from call to
    call. A row next to a GEMM names one, and one of tensors that change says how they do as its ``variant``.

    Attributes:
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` have ordinary tensors.
        variant: what ``auto`` chose. Of tensors that change, how: ``repeated``: not at all; ``rotating``: eight pairs
            of tensors in turn; ``missed``: in one call, behind such that went ahead with others; ``new_address``: at an
            address that is new in every call, in one segment; ``new_segment``: in a segment that is new in every call.
        time_us: next to a GEMM: of both together. Median over the rounds of the slowest rank; p10_us and p90_us
            likewise.
        bus_gbps: null next to a GEMM.
        note: why Sidelane ran its last call as it did (``Communicator.last_choice``), or why there is no time.
        reach: how peers get at the tensors: ``symmetric``, ``mapped`` or ``staged``; empty for a library.
        gemm, m, n, k: next to which it ran; empty and null if it ran alone.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same call, which says that a computation runs next to it, in the same rounds.
        best_comm_us: the fastest of these, of all implementations and kinds of memory.
        speedup, ideal, percent_of_ideal: as in :class:`C3Row`.
        host_us: of tensors that change: from the begin of a call until it returns, with an idle device and all hosts at
            once; the median over the calls of the slowest rank.
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


ALONE_COLUMNS: tuple[str, ...] = (
    *("bytes", "<implementation", "<tensors", "<variant", "time\nus", "p10-p90\nus", "bus\nGB/s"),
    *("library\nover it", "<correct"),
)
PAIR_COLUMNS: tuple[str, ...] = (
    *("<implementation", "<tensors", "<variant", "alone\nus", "together\nus", "speedup", "% of\nideal", "<correct"),
)
CHANGING_COLUMNS: tuple[str, ...] = (
    *("<change", "<implementation", "<tensors", "time\nus", "p10-p90\nus", "host\nus", "library\nover it", "<correct"),
)
Cells = Callable[[OrdinaryRow, Sequence[OrdinaryRow]], tuple[str, ...]]


def is_changing(row: OrdinaryRow) -> bool:
    """True for rows of tensors that change."""
    return row.variant in CHANGES


def ordinary_tables(rows: Sequence[OrdinaryRow]) -> list[Table]:
    """Alone: one table a way to call. Next to a GEMM: one a pair. Changing tensors: one a size. The best is set off."""
    alone = [row for row in rows if not row.gemm and not is_changing(row)]
    pairs = [row for row in rows if row.gemm]
    changing = [row for row in rows if not row.gemm and is_changing(row)]
    tables = [
        _table(f"{way_to_call(alike[0])}", ALONE_COLUMNS, alike, lambda row: row.bytes, _alone_cells, keys=3)
        for _, alike in grouped(alone, way_to_call, ordered=False)
    ]
    tables += [_pair_table(alike) for _, alike in grouped(pairs, lambda r: (r.gemm, r.collective, r.bytes))]
    for (kind, nbytes), alike in grouped(changing, lambda row: (row.collective, row.bytes)):
        title = f"{kind} of {format_bytes(nbytes)}, {alike[0].dtype}, on tensors that change from call to call"
        tables.append(_table(title, CHANGING_COLUMNS, alike, lambda row: row.variant, _changing_cells, keys=3))
    return tables


def way_to_call(row: OrdinaryRow) -> str:
    """What rows of one table and one picture have in common."""
    return f"{row.collective}, {row.dtype}, {place_of(row.in_place)}, {row.launch}"


def _table(
    title: str,
    columns: tuple[str, ...],
    rows: Sequence[OrdinaryRow],
    key: Callable[[OrdinaryRow], object],
    cells: Cells,
    keys: int,
) -> Table:
    lines = []
    for _, same in grouped(rows, key, ordered=False):
        best = min((row.time_us for row in same if row.time_us is not None), default=None)
        lines += [
            Line(cells(row, same), best=best is not None and row.time_us == best, rule=row is same[-1]) for row in same
        ]
    notes = _notes(rows, lambda row: cells(row, rows)[:keys])
    return without_empty_columns(Table(title, columns, tuple(lines), notes, keys=keys))


def _pair_table(rows: Sequence[OrdinaryRow]) -> Table:
    first = next((row for row in rows if row.gemm_us is not None), rows[0])
    ideal = f"ideal speedup {first.ideal:.2f}" if first.ideal is not None else "no ideal"
    title = (
        f"{first.gemm} ({first.m}x{first.n}x{first.k} {first.dtype}) with {first.collective} of "
        f"{format_bytes(first.bytes)}: GEMM alone {number(first.gemm_us)} us, best collective alone "
        f"{number(first.best_comm_us)} us, {ideal}"
    )
    best = max((row.percent_of_ideal for row in rows if row.percent_of_ideal is not None), default=None)
    lines = tuple(Line(_pair_cells(row), best=best is not None and row.percent_of_ideal == best) for row in rows)
    notes = _notes(rows, lambda row: _pair_cells(row)[:2])
    return without_empty_columns(Table(title, PAIR_COLUMNS, lines, notes, keys=2))


def _alone_cells(row: OrdinaryRow, same: Sequence[OrdinaryRow]) -> tuple[str, ...]:
    return (
        *(format_bytes(row.bytes), row.implementation, row.reach, row.variant, number(row.time_us), _spread(row)),
        *(number(row.bus_gbps), _over(row, same), verdict(row.correct)),
    )


def _pair_cells(row: OrdinaryRow) -> tuple[str, ...]:
    return (
        *(row.implementation, row.reach, row.variant, number(row.comm_us), number(row.time_us)),
        MISSING if row.speedup is None else f"{row.speedup:.2f}",
        MISSING if row.percent_of_ideal is None else f"{row.percent_of_ideal:.0f}",
        verdict(row.correct),
    )


def _changing_cells(row: OrdinaryRow, same: Sequence[OrdinaryRow]) -> tuple[str, ...]:
    return (
        *(row.variant, row.implementation, row.reach, number(row.time_us), _spread(row), number(row.host_us)),
        *(_over(row, same), verdict(row.correct)),
    )


def _spread(row: OrdinaryRow) -> str:
    return "" if row.p10_us is None else f"{number(row.p10_us)}-{number(row.p90_us)}"


def _over(row: OrdinaryRow, same: Sequence[OrdinaryRow]) -> str:
    """The library's time over that of a row; more than 1: the row is faster."""
    theirs = [one.time_us for one in same if one.implementation in OF_LIBRARY and one.time_us is not None]
    if row.implementation in OF_LIBRARY or not theirs or not row.time_us:
        return ""
    return f"{min(theirs) / row.time_us:.3f}"


def _notes(rows: Sequence[OrdinaryRow], name_of: Callable[[OrdinaryRow], Sequence[str]]) -> tuple[str, ...]:
    """Why there is no time, and of mapped tensors how calls went; the file has the rest."""
    told = [row for row in rows if row.time_us is None or row.reach in (LEARNED, MAPPED)]
    return notes_of([(" ".join(filter(None, name_of(row))), row.note) for row in told])


def draw_alone(rows: Sequence[OrdinaryRow], results: Results, folder: Path) -> list[Picture]:
    """A picture for each way to call a collective that ran alone."""
    alone = [row for row in rows if row.time_us and not row.gemm and not is_changing(row)]
    ways = grouped(alone, way_to_call)
    return [draw_sizes(way, alike, results, folder, line_of=lambda row: row.reach) for way, alike in ways]

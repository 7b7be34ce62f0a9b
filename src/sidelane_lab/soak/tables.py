"""A campaign as tables: by ending, by ranks, by kind of call, and what was not as it must be."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped
from sidelane.errors import last_line
from sidelane_lab.soak.rows import SOAKED, SoakRow
from sidelane_lab.soak.tally import shortened

COLUMNS = ("episodes", "failed", "calls", "calls/s", "refusals", "wrong", "errors", "left")
MOST_SHOWN = 100
"""Characters of what was not as it must be; a file has more of them."""


def soak_tables(rows: Sequence[SoakRow]) -> list[Table]:
    """The tables of a campaign."""
    counted = [row for row in rows if not row.note]
    by_ending = [(str(name), alike) for name, alike in grouped(counted, lambda row: row.ending)]
    by_ranks = [(str(name), alike) for name, alike in grouped(counted, lambda row: row.ranks)]
    kinds = [(name, sum(getattr(row, name) for row in counted)) for name in SOAKED]
    compared = sum(row.compared_bytes for row in counted) / 1e9
    tables = [
        _summed("By ending", "<ending", [*by_ending, ("all", counted)]),
        _summed("By number of ranks", "ranks", by_ranks),
        Table(
            "Calls by kind",
            ("<kind", "calls"),
            tuple(Line((name, f"{calls:,}")) for name, calls in kinds if calls),
            (f"{compared:.1f} GB were compared, on all ranks together",),
        ),
    ]
    told = [row for row in rows if row.note]
    if told:
        lines = [_told(row) for row in told]
        tables.append(
            Table("Not as it must be", ("seed", "episode", "<ending", "ranks", "rank", "<what"), tuple(lines), keys=2)
        )
    return tables


def _summed(title: str, first: str, groups: Sequence[tuple[str, Sequence[SoakRow]]]) -> Table:
    return Table(
        title, (first, *COLUMNS), tuple(Line((name, *_sums(rows)), best=name == "all") for name, rows in groups)
    )


def _sums(rows: Sequence[SoakRow]) -> tuple[str, ...]:
    def total(name: str) -> int:
        return int(sum(getattr(row, name) for row in rows))

    seconds = sum(row.seconds for row in rows)
    return (
        f"{total('episodes'):,}",
        str(total("failed")),
        f"{total('calls'):,}",
        f"{total('calls') / seconds:.0f}" if seconds else "-",
        f"{total('refusals'):,}",
        *(str(total(name)) for name in ("wrong", "errors", "leftovers")),
    )


def _told(row: SoakRow) -> Line:
    """Of a traceback, its last line."""
    rank = "" if row.rank is None else str(row.rank)
    what = last_line(row.note)
    return Line((str(row.seed), str(row.episode), row.ending, str(row.ranks), rank, shortened(what, MOST_SHOWN)))

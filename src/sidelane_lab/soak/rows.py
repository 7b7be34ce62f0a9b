"""Rows of campaigns of random calls, as tables: by ending, ranks and kind of call, and what was not as it must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped
from sidelane.errors import last_line
from sidelane_lab.harness.study import FlatRow
from sidelane_lab.soak.tally import shortened

SOAKED = (
    *("all_gather", "all_to_all", "uneven", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather"),
    *("barrier", "lists", "batches", "prelaunched", "replayed"),
)
"""The columns of a ``SoakRow`` that count calls by kind."""


@dataclasses.dataclass(frozen=True, slots=True)
class SoakRow(FlatRow):
    """Episodes of one ending and one number of ranks; or, with a ``note``, one thing that was not as it must be.

    Attributes:
        ending: how the episodes ended: ``good``, ``killed``, ``never comes``, ...
        ranks: of each episode's world.
        seed: of the campaign.
        episode_calls: of an episode of two ranks; part of what the seed means.
        episodes: of this kind; 0 of what was not as it must be, which counts in the row of its kind.
        failed: those of them in which anything was wrong.
        seconds: that they took.
        calls: that all ranks made and checked, the sum of the columns by kind.
        uneven: all_to_all with split sizes. ``lists`` and ``batches`` count whole calls, ``replayed`` the calls in each
            replay of a graph.
        refusals: wrong calls, and calls that differed between ranks, which all ranks refused as they must.
        allocations: of symmetric memory.
        compared_bytes: by all ranks.
        wrong: comparisons that found wrong bytes.
        errors: what else was not as it must be.
        leftovers: threads, memory, processes and files that were left behind.
        episode, rank: where it was; ``rank`` is null if it was nobody's.
        note: what it was.
    """

    ending: str
    ranks: int
    seed: int
    episode_calls: int
    episodes: int
    failed: int
    seconds: float
    calls: int
    all_gather: int
    all_to_all: int
    uneven: int
    reduce_scatter: int
    all_reduce: int
    broadcast: int
    scatter: int
    gather: int
    barrier: int
    lists: int
    batches: int
    prelaunched: int
    replayed: int
    refusals: int
    allocations: int
    compared_bytes: int
    wrong: int
    errors: int
    leftovers: int
    episode: int | None = None
    rank: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        by_kind = sum(getattr(self, name) for name in SOAKED)
        if by_kind != self.calls:
            raise ValueError(f"SoakRow: calls must be the sum of those by kind (value={self.calls}, allowed={by_kind})")
        if (self.episode is None) != (not self.note):
            raise ValueError(f"SoakRow: a note belongs to an episode (value={self.note!r}, episode={self.episode})")


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

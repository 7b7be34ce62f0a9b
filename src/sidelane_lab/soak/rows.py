"""Rows of campaigns of random calls."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import FlatRow

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

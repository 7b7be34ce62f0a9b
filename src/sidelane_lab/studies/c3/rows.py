"""Rows of a GEMM and a collective at once, and of who chose how they share."""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from sidelane.c3.strategies import Strategy, strategies
from sidelane.sizes import format_bytes
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import FlatRow, Results
from sidelane_lab.harness.table import MISSING, Line, Table, grouped, notes_of, number
from sidelane_lab.pairs.workload import possible_percent

NOT_RUN = "not run: "
"""Begins the notes of rows of pairs that were left out."""

CLASSES = ("G-long", "C-long", "GC-equal", "")


@dataclasses.dataclass(frozen=True, slots=True)
class PairRow(FlatRow):
    """A GEMM and a collective."""

    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int

    @property
    def pair(self) -> tuple[str, str, str, int]:
        """The GEMM and the collective that rows of one pair have in common."""
        return self.gemm, self.dtype, self.collective, self.bytes


@dataclasses.dataclass(frozen=True, slots=True)
class C3Row(PairRow):
    """A GEMM and a collective under one strategy. The figures are defined as in the papers.

    Attributes:
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``.
        bytes: bytes of the collective as in :class:`CollectiveRow`.
        c3_class: ``class`` in the file: G-long, C-long or GC-equal; empty when no collective could run.
        strategy: strategy that ran.
        chosen: strategy that ``auto`` chose; empty for others.
        gemm_us: isolated time of the GEMM.
        comm_us: isolated time of this strategy's own collective.
        best_comm_us: fastest isolated time of this collective over every implementation measured.
        time_us: time of both, side by side.
        speedup: (gemm + best_comm) / time.
        ideal: (gemm + best_comm) / max(gemm, best_comm).
        percent_of_ideal: 100 (speedup - 1) / (ideal - 1). None where hardly anything can be gained, and above
            ``MOST_PERCENT``: files of before December 2026 have such rows, which no mean counts.
        percent_of_ideal_nccl: percent of the papers' ideal: the same with the library's isolated time (NCCL's, Gloo's
            on CPUs) as best_comm, so that a faster collective can pass 100.
        percent_least: percent of ideal of the worst round; None in files without this key.
        percent_most: percent of ideal of the best round; None in files without this key.
        correct: True if outputs of both agreed with a reference in this run.
        note: reason why there is no time, or a remark.
        units: compute units that the GEMM did without; 0 also in files without this key.
        sweep: times of a sweep over units, as ``8 1234.5, 16 1300.2``; empty also in files without this key.
        orders: times of the pair and a third kernel by the order of their launches, as ``gemm > small gemm >
            all_gather 1234.5, ...`` (``pairs.pair``), in the first row of a pair; empty in files without this key.
        bound: what limits the GEMM: compute or memory, by the loss of units; empty in files without this key.
        watts: mean power of a GPU while the pair repeats (``--energy``); None without the option.
        energy_mj: energy of all GPUs for one run of the pair; None without the option.
    """

    renamed: ClassVar[dict[str, str]] = {"c3_class": "class"}
    allowed = (("c3_class", CLASSES), ("bound", ("compute", "memory", "")))
    figures = ("time_us", "speedup")

    c3_class: str
    strategy: str
    chosen: str
    gemm_us: float | None
    comm_us: float | None
    best_comm_us: float | None
    time_us: float | None
    speedup: float | None
    ideal: float | None
    percent_of_ideal: float | None
    percent_of_ideal_nccl: float | None
    correct: bool | None = None
    note: str = ""
    units: int = 0
    sweep: str = ""
    orders: str = ""
    bound: str = ""
    watts: float | None = None
    energy_mj: float | None = None
    percent_least: float | None = None
    percent_most: float | None = None


CONCCL = "conccl"
"""Code of the strategy on Sidelane's copy engines."""


def strategy_of(row: C3Row) -> Strategy | None:
    """Return the strategy of a row; None for ``auto``, which repeats another row, and for one that has gone since."""
    return next((strategy for strategy in strategies() if row.strategy in (strategy.name, strategy.code)), None)


def name_of(row: C3Row) -> str:
    """Return the name of a row's strategy, as callers write it."""
    return name_of_code(row.strategy)


def name_of_code(code: str) -> str:
    """Return the name of a strategy that a file names by its code, the text itself where it is none.

    >>> name_of_code("c3_sp"), name_of_code("auto")
    ('collective_first', 'auto')
    """
    return next((strategy.name for strategy in strategies() if strategy.code == code), code)


def spread_percent(row: Any, rows: object) -> str:
    """Return the percents of ideal of a row's worst and best round."""
    if row.percent_least is None or row.percent_most is None:
        return MISSING
    return f"{row.percent_least:.0f} to {row.percent_most:.0f}"


TOGETHER_COLUMNS: Mapping[str, Cell] = {
    "together\nus": "time_us",
    "speedup": "speedup:.2f",
    "% of\nideal": "percent_of_ideal:.0f",
    "by\nround": spread_percent,
}
C3_COLUMNS: Mapping[str, Cell] = {
    "units\ntaken": "units",
    "collective\nalone us": "comm_us",
    **TOGETHER_COLUMNS,
    "% of papers'\nideal": "percent_of_ideal_nccl:.0f",
    "<correct": "correct",
}
ENERGY_COLUMNS: Mapping[str, Cell] = {"W": "watts", "energy\nmJ": "energy_mj"}


def _strategy(picked: Collection[str], row: C3Row, group: Sequence[C3Row]) -> str:
    return name_of(row) + (" (auto)" if row.strategy in picked else "")


def pair_words(row: Any) -> str:
    """Return a GEMM and a collective in words."""
    return f"{row.gemm} ({row.m}x{row.n}x{row.k} {row.dtype}) with {row.collective} of {format_bytes(row.bytes)}"


def alone_words(row: Any) -> str:
    """Return what both take alone, and the ideal, in words."""
    ideal = f"ideal speedup {row.ideal:.2f}" if row.ideal is not None else "no ideal"
    gemm, best = number(row.gemm_us), number(row.best_comm_us)
    return f"GEMM alone {gemm} us, best collective alone {best} us, {ideal}"


def lost_percent(row: Any) -> float | None:
    """Return how far a row is below the ideal, by which the best of a pair is found."""
    return None if row.percent_of_ideal is None else 100 - row.percent_of_ideal


def c3_tables(rows: Sequence[C3Row]) -> list[Table]:
    """Make one table a pair; the strategy with the highest percent of ideal is set off."""
    tables = []
    for _, same in grouped(rows, lambda row: row.pair, ordered=False):
        first = next((row for row in same if row.gemm_us is not None), same[0])
        # The row of auto repeats that of the strategy that it picked, which says so.
        shown, picked = [row for row in same if not row.chosen], {row.chosen for row in same}
        columns = {"<strategy": functools.partial(_strategy, picked), **C3_COLUMNS}
        if any(row.watts is not None for row in shown):
            columns |= ENERGY_COLUMNS
        title = f"{pair_words(first)}: {first.c3_class}, {alone_words(first)}"
        notes = notes_of([(name_of(row), row.note) for row in same])
        tables.append(table_of(title, shown, columns, value=lost_percent, noted=lambda row: False, notes=notes))
    return [*tables, *_class_tables(rows)]


def _class_tables(rows: Sequence[C3Row]) -> list[Table]:
    """Make one table of the pairs of each class and bound under every strategy, if there are several such cells."""
    judged = [row for row in rows if row.bound and row.c3_class and not row.chosen]
    cells = grouped(judged, lambda row: (row.bound, row.c3_class), ordered=False)
    if len(cells) < 2:
        return []
    lines = []
    for (bound, c3_class), alike in cells:
        for strategy, same in grouped(alike, name_of, ordered=False):
            found = [percent for row in same if (percent := possible_percent(row.percent_of_ideal)) is not None]
            if not found:
                continue
            taken = ", ".join(map(str, sorted({row.units for row in same})))
            means = f"{statistics.fmean(found):.0f}", f"{min(found):.0f}"
            lines.append(Line((f"{bound}-bound, {c3_class}", strategy, f"{len(found)}", taken, *means)))
    columns = ("<GEMM and class", "<strategy", "pairs", "units\ntaken", "% of ideal\nmean", "worst")
    return [Table("pairs by what limits the GEMM, and by class", columns, tuple(lines), keys=2)]


def too_few_cores(results: Results) -> str:
    """Say that CPU processes of a study of pairs had too few cores to run both at once; empty if they had enough."""
    of_pairs = results.on_cpu and results.study in ("c3", "ordinary")
    found = re.search(r"(\d+) cores$", results.device) if of_pairs else None
    needed = 2 * results.ranks
    if found is None or int(found[1]) >= needed:
        return ""
    return (
        f"This machine has {found[1]} cores and would need {needed} (each rank computes on one and moves bytes on "
        "another), so the two take turns here, and a speedup of about 1, 0% of ideal, is the best to expect."
    )

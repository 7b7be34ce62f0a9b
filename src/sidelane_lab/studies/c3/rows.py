"""Rows of a GEMM and a collective at once, and of who chose how they share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import ClassVar

from sidelane.cli.table import MISSING, Line, Table, grouped, notes_of, number, verdict, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.harness.rows import FlatRow
from sidelane_lab.harness.study import Results

CLASSES = ("G-long", "C-long", "GC-equal", "")


@dataclasses.dataclass(frozen=True, slots=True)
class C3Row(FlatRow):
    """A GEMM and a collective under one strategy. The figures are defined as in the papers.

    Attributes:
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``.
        bytes: as in :class:`CollectiveRow`.
        c3_class: ``class`` in the file: G-long, C-long or GC-equal; empty when no collective could run.
        strategy: what was run; ``chosen`` is what the strategy ``auto`` picked, else empty.
        gemm_us: isolated time of the GEMM.
        comm_us: isolated time of this strategy's own collective.
        best_comm_us: fastest isolated time of this collective over every implementation measured.
        time_us: both, side by side.
        speedup: (gemm + best_comm) / time.
        ideal: (gemm + best_comm) / max(gemm, best_comm).
        percent_of_ideal: 100 (speedup - 1) / (ideal - 1).
        percent_of_ideal_nccl: the same with the library's isolated time (NCCL's, Gloo's on CPUs) as best_comm: "% of
            ideal (library)" of tables and of ``sidelane demo``, as papers have it.
        correct: outputs of both were compared with a reference in this run.
        note: why there is no time, or what to know about this one.
        units: compute units that the GEMM did without; 0 also in files without this key.
        sweep: times of a sweep over units, as ``8 1234.5, 16 1300.2``; empty also in files without this key.
        orders: times of the pair and a third kernel by the order of their launches, as ``gemm > small gemm >
            all_gather 1234.5, ...`` (``c3.thirds``), in the first row of a pair; empty also in files without this key.
    """

    renamed: ClassVar[dict[str, str]] = {"c3_class": "class"}
    allowed = (("c3_class", CLASSES),)
    figures = ("time_us", "speedup")

    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
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


C3_COLUMNS: tuple[str, ...] = (
    "<strategy",
    "units\ntaken",
    "collective\nalone us",
    "together\nus",
    "speedup",
    "% of\nideal",
    "% of ideal\n(library)",
    "<correct",
)


def c3_tables(rows: Sequence[C3Row]) -> list[Table]:
    """One table a pair of GEMM and collective; the strategy with the highest percent of ideal is set off."""
    tables = []
    for _, same in grouped(rows, lambda row: (row.gemm, row.dtype, row.collective, row.bytes), ordered=False):
        first = next((row for row in same if row.gemm_us is not None), same[0])
        best = max((row.percent_of_ideal for row in same if row.percent_of_ideal is not None), default=None)
        ideal = f"ideal speedup {first.ideal:.2f}" if first.ideal is not None else "no ideal"
        title = (
            f"{first.gemm} ({first.m}x{first.n}x{first.k} {first.dtype}) with {first.collective} of "
            f"{format_bytes(first.bytes)}: {first.c3_class}, GEMM alone {number(first.gemm_us)} us, best collective "
            f"alone {number(first.best_comm_us)} us, {ideal}"
        )
        picked = {row.chosen for row in same}
        lines = tuple(
            Line(_c3_cells(row, picked), best=best is not None and row.percent_of_ideal == best)
            for row in same
            if not row.chosen  # the row of auto repeats that of the strategy that it picked, which says so
        )
        notes = notes_of([(row.strategy, row.note) for row in same])
        tables.append(without_empty_columns(Table(title, C3_COLUMNS, lines, notes)))
    return tables


def too_few_cores(results: Results) -> str:
    """What readers of a study of pairs between CPU processes must know if there was nothing to run both at once on."""
    of_pairs = results.on_cpu and results.study in ("c3", "ordinary")
    found = re.search(r"(\d+) cores$", results.device) if of_pairs else None
    needed = 2 * results.ranks
    if found is None or int(found[1]) >= needed:
        return ""
    return (
        f"This machine has {found[1]} cores and would need {needed} (each rank computes on one and moves bytes on "
        "another), so the two take turns here, and a speedup of about 1, 0% of ideal, is the best to expect."
    )


def _c3_cells(row: C3Row, picked: Collection[str]) -> tuple[str, ...]:
    return (
        row.strategy + (" (auto)" if row.strategy in picked else ""),
        str(row.units) if row.units else "",
        number(row.comm_us),
        number(row.time_us),
        MISSING if row.speedup is None else f"{row.speedup:.2f}",
        MISSING if row.percent_of_ideal is None else f"{row.percent_of_ideal:.0f}",
        "" if row.percent_of_ideal_nccl is None else f"{row.percent_of_ideal_nccl:.0f}",
        verdict(row.correct),
    )

"""Rows of a GEMM and a collective at once, and of who chose how they share."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sidelane_lab.harness.rows import FlatRow

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

"""Rows of a GEMM and a collective at once, and of who chose how they share."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sidelane_lab.harness.rows import IMPLEMENTATIONS, FlatRow

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


@dataclasses.dataclass(frozen=True, slots=True)
class HeuristicRow(FlatRow):
    """What a heuristic chose for a pair, against the best of a sweep.

    Attributes:
        heuristic: ``launch_order``: who is first, by workgroups; ``launch_order_3``: of three kernels; ``partition``:
            units for the collective, by look-up tables; ``spared``: units that a GEMM beside copy engines does
            without; ``auto``: the strategy.
        gemm, bytes: as in :class:`C3Row`.
        seen: the GEMM is one that was profiled.
        chosen: by the heuristic, in words.
        best: of the sweep.
        time_us: under what was chosen.
        best_us: under what was best.
        lost_percent: by the choice.
        right: nothing is lost, but for half a percent.
        note: the reason that the heuristic gave, or why nothing could be judged.
    """

    figures = ("time_us",)

    heuristic: str
    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    seen: bool
    chosen: str
    best: str
    time_us: float | None
    best_us: float | None
    lost_percent: float | None
    right: bool | None
    note: str


@dataclasses.dataclass(frozen=True, slots=True)
class OccupancyRow(FlatRow):
    """Pipelined iterations of a GEMM in one shape and a collective (overlap paper).

    Attributes:
        bytes: as in :class:`CollectiveRow`.
        shape: of the GEMM's kernel: ``opt1``, ``opt2``, ``tuned``; on CPUs ``rows``.
        grid: ``persistent``: fewer blocks than tiles; or ``data-parallel``.
        blocks: of the grid.
        resident: blocks that a compute unit holds at once; 0 where nobody knows.
        shared_bytes: shared memory that a block asks for.
        priority: the collectives' stream goes before the GEMMs'.
        in_order: a GEMM waits for the one of the iteration before.
        iterations: of a pipeline.
        gemm_us, comm_us: of one, alone.
        sequential_us: of the iterations, one operation after another.
        time_us: of the iterations, overlapped.
        normalised: time over sequential, median over rounds.
        overlap_rate: percent of the collectives' time during which a GEMM ran.
        correct: the results of both were compared with a reference in this run.
        note: why there is no time.
    """

    allowed = (("implementation", IMPLEMENTATIONS),)
    figures = ("time_us", "normalised")

    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    implementation: str
    shape: str
    grid: str
    blocks: int
    resident: int
    shared_bytes: int
    priority: bool
    in_order: bool
    iterations: int
    gemm_us: float | None
    comm_us: float | None
    sequential_us: float | None
    time_us: float | None
    normalised: float | None
    overlap_rate: float | None
    correct: bool | None
    note: str = ""

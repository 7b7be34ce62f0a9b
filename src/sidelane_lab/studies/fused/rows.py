"""Rows of operators that are fused with their collective."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import LAUNCHES, FlatRow

FUSED_OPS = (
    *("gemv_all_reduce", "all_reduce_rms_norm", "embedding_all_to_all", "gemm_all_to_all", "all_to_all_gemm"),
    *("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
)
ALONE = ("compute", "collective")
"""Implementations of rows that are a part of an operator."""

FUSED_IMPLEMENTATIONS = ("fused", "auto", "unfused_nccl", "unfused_sidelane", "symm_mem", "unfused_best", *ALONE)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRow(FlatRow):
    """A fused operator, or the same unfused, at one shape.

    Attributes:
        op: the operator.
        shape: in words.
        implementation: ``fused``; ``unfused_nccl`` with the process group's collective (on CPUs Gloo's),
            ``unfused_sidelane`` with ours, ``symm_mem`` with that of PyTorch's symmetric memory; ``unfused_best``
            repeats the fastest of these; ``auto`` is a call with ``method="auto"``; ``compute`` and ``collective`` are
            the parts alone.
        schedule: of a fused one; what an unfused one is made of; how a part is done.
        launch: ``eager`` or ``graph``.
        time_us: median over the rounds of the slowest rank; p10_us and p90_us likewise.
        compute_us: the computation alone, the fastest there is.
        comm_us: the collective alone, likewise.
        bound_us: the larger of the two.
        max_rel_err: the largest difference from the result in float64, next to the largest element.
        correct: None when it could not run, or is a part.
        note: why there is no time; what ``auto`` has chosen, and why.
        gbps: bytes of the rows of tables, or of the weight of a GEMV, that a call reads, over the time.
        skew_us: by how much the ends of the ranks lie apart behind the last call of a sample, median over the rounds.
    """

    allowed = (("op", FUSED_OPS), ("implementation", FUSED_IMPLEMENTATIONS), ("launch", LAUNCHES))
    figures = ("time_us",)

    op: str
    shape: str
    implementation: str
    schedule: str
    launch: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    compute_us: float | None
    comm_us: float | None
    bound_us: float | None
    max_rel_err: float | None
    correct: bool | None
    note: str = ""
    gbps: float | None = None
    skew_us: float | None = None

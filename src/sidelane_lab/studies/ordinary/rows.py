"""Rows of collectives by the memory that their tensors lie in."""

from __future__ import annotations

import dataclasses

from sidelane_lab.studies.collectives.rows import CollectiveRow

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

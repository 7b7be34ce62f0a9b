"""Rows of training steps."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import FlatRow

TRAINED_BY = (
    *("nccl", "gloo", "nccl_ce", "sidelane_ag", "sidelane", "sidelane_copies"),
    *("compute_only", "compute_only_straight"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class FsdpRow(FlatRow):
    """A training step of layers that FSDP2 shards, by who communicates.

    Attributes:
        model: whose layers they are like; on CPU ranks of smaller sizes.
        seq, batch: tokens of a sequence, and sequences of a rank.
        reduce_dtype: in which gradients are added; parameters are gathered in bfloat16.
        optimizer: the step has one (AdamW).
        implementation: ``nccl``, on CPUs ``gloo``; ``nccl_ce``: gathers by NCCL on copy engines; ``sidelane_ag``:
            gathers by Sidelane; ``sidelane``: gathers and scatters; ``sidelane_copies``: the same with parameters that
            are copied out of a buffer; ``compute_only``: collectives that move nothing; ``compute_only_straight``: and
            no copy-out.
        step_ms: median over rounds of the slowest rank; p10_ms and p90_ms likewise.
        exposed_ms: more than ``compute_only`` in the same round, median.
        recovered_percent: of the library's exposed time, in the same round, median.
        loss: mean over ranks; grad_norm: of the whole gradient. Of the step that was compared.
        peak_mb: most memory of a rank in a step: parameters, what the step allocates, and what this implementation
            keeps; null on CPUs, and where nothing is moved.
        correct: loss, gradient norm and gradients are the library's but for rounding; null where nothing is moved.
        note: why there is no time, or what to know about this one.
        gemm_ms, attention_ms, collective_ms, copy_in_ms, copy_out_ms, peer_copy_ms, other_ms: kernels of one step on
            all streams of the first rank, under a profiler; null without. Copies in are casts of shards and gradients
            that are packed; peer copies those of copy engines.
        first_gather_ms: of that step, until its first GEMM begins; last_scatter_ms: after its last one has ended.
        profiled_ms: all of that step. On the stream of the computation it is first_gather_ms, gemm_ms, attention_ms,
            stream_copy_in_ms, stream_copy_out_ms, stream_other_ms, waits_ms (for whatever comes from elsewhere) and
            last_scatter_ms.
        gemm_beside_ms: by how much GEMMs that run next to transfers take longer than the same ones of
            ``compute_only_straight``; gemm_apart_ms: the other GEMMs.
    """

    allowed = (("implementation", TRAINED_BY),)
    figures = ("step_ms",)

    model: str
    layers: int
    seq: int
    batch: int
    reduce_dtype: str
    optimizer: bool
    implementation: str
    step_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    exposed_ms: float | None
    recovered_percent: float | None
    loss: float | None
    grad_norm: float | None
    peak_mb: float | None
    correct: bool | None
    note: str = ""
    gemm_ms: float | None = None
    attention_ms: float | None = None
    collective_ms: float | None = None
    copy_in_ms: float | None = None
    copy_out_ms: float | None = None
    peer_copy_ms: float | None = None
    other_ms: float | None = None
    first_gather_ms: float | None = None
    last_scatter_ms: float | None = None
    profiled_ms: float | None = None
    stream_copy_in_ms: float | None = None
    stream_copy_out_ms: float | None = None
    stream_other_ms: float | None = None
    waits_ms: float | None = None
    gemm_beside_ms: float | None = None
    gemm_apart_ms: float | None = None

"""Rows of programs that call ``torch.distributed``, by the process group that they have."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import FlatRow

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
FIRST_CALLS, FIRST_STEP = "first_calls", "first_fsdp_step"
EAGER, ASYNC, GRAPH, FIRST = "eager", "async", "graph", "first"
ORDINARY, LEARNED, POOLED = "ordinary", "learned", "pooled"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRow(FlatRow):
    """A call of ``torch.distributed``, or what the first use costs, by the process group.

    Attributes:
        operation: as ``torch.distributed`` calls it. ``first_calls``: from making the group to the end of one call of
            each operation at each size; ``first_fsdp_step``: from a sharded model to the end of its first step, for
            Sidelane with ``fsdp.enable``.
        bytes: gathered bytes of an all-gather, the whole buffer of the others; null of first uses.
        implementation: whose group: ``sidelane``, or the library: ``nccl``, on CPUs ``gloo``.
        tensors: ``ordinary``; ``learned``: ordinary ones with ``Config.map_memory="learn"``; ``pooled``: made in a
            ``sidelane.pool`` of the group's communicator.
        launch: ``eager``; ``async``: with ``async_op=True``, waited for at once; ``graph``: calls of one CUDA graph;
            ``first``.
        time_us: of a call; median over rounds of the slowest rank; p10_us and p90_us likewise. On GPUs the device's
            alone, and on CPUs until the call is done. Of first uses, of the slowest rank, from begin to end.
        host_us: on GPUs, until a repeated call has returned (asynchronous ones: and was waited for), median of the
            slowest rank; null in graphs, on CPUs and of first uses.
        made_by: what made the call, as ``sidelane.report()`` says: ``sidelane``, or the library behind it.
        variant: that Sidelane took.
        held_mb: of first uses, symmetric memory that Sidelane says it holds, in one call.
        correct: results are right, before the rounds and after them.
        note: why there is no time, or what to know about this one.
    """

    allowed = (
        ("operation", (*OPERATIONS, FIRST_CALLS, FIRST_STEP)),
        ("implementation", ("nccl", "gloo", "sidelane")),
        ("tensors", (ORDINARY, LEARNED, POOLED)),
        ("launch", (EAGER, ASYNC, GRAPH, FIRST)),
    )
    figures = ("time_us",)

    operation: str
    bytes: int | None
    dtype: str
    implementation: str
    tensors: str
    launch: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    host_us: float | None
    made_by: str
    variant: str
    held_mb: float | None
    correct: bool | None
    note: str = ""

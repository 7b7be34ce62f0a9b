"""Operators of PyTorch that only the pass puts into graphs. They have no gradients."""

from __future__ import annotations

from torch import Tensor

from sidelane import ops
from sidelane.ops.library import communicator, operator, result_lock
from sidelane.ops.operands import in_rows, in_rows_or_columns


@operator(
    lambda comm, x, weight: tuple(
        x.new_empty(x.shape[0] * communicator(comm).world_size, columns) for columns in (weight.shape[0], x.shape[1])
    )
)
def all_gather_gemm_and_rows(comm: int, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``all_gather(x) @ weight.T``, and ``all_gather(x)`` for other products."""
    ranks = communicator(comm)
    rows = x.new_empty(x.shape[0] * ranks.world_size, x.shape[1])
    product = ops.all_gather_gemm(ranks, in_rows(x), in_rows_or_columns(weight), gathered=rows)
    return product, rows


@operator(lambda comm, x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def gemm_all_to_all_evenly(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` of [M, K] and [H, K], M / N rows of which go to each rank; M is the same on all."""
    ranks, rows = communicator(comm), x.shape[0]
    given = [[rows // ranks.world_size] * ranks.world_size] * ranks.world_size
    with result_lock(ranks):
        return ops.gemm_all_to_all(ranks, in_rows(x), in_rows(weight), given, most_rows=rows).clone()

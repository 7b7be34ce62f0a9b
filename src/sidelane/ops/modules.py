"""Layers in place of PyTorch's, fused with the collective behind them. They are trained, compiled and cast by
``torch.autocast`` as PyTorch's are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sidelane.modes import exclude_compilers
from sidelane.ops import library
from sidelane.ops.embedding_tables import MODES, SUM
from sidelane.ops.handle import check_choice, reporting_refusals
from sidelane.program.collective import split_evenly
from sidelane.session import Communicator

if TYPE_CHECKING:
    from sidelane.ops.scale_out import ScaleOut


class RowParallelLinear(nn.Module):
    """Layer like ``nn.Linear`` whose input features lie on different ranks; all of them get the result.

    Up to 16 tokens go through :func:`sidelane.ops.gemv_all_reduce`; more through :func:`sidelane.ops.gemm_all_reduce`.

    Args:
        comm: communicator of the ranks, open for as long as this is used.
        in_features: number of input features of all ranks; rank r has those of ``split_evenly(in_features, N)``.
        out_features: number of features of the result.
        bias: add a bias once, the same parameter on every rank.
        dtype: dtype of the layer: float32, float16 or bfloat16; None is PyTorch's default.

    Attributes:
        weight: parameter [out_features, own features].
        columns: range of this rank's features among all.
    """

    def __init__(
        self,
        comm: Communicator,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = split_evenly(in_features, comm.world_size)
        first = sum(sizes[: comm.rank])
        self.in_features, self.out_features = in_features, out_features
        self.columns = slice(first, first + sizes[comm.rank])
        self._comm = library.number_of(comm)
        options = {"device": comm.device, "dtype": dtype}
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, sizes[comm.rank], **options).uniform_(-bound, bound))  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.zeros(out_features, **options)) if bias else None  # type: ignore[arg-type]

    @classmethod
    def from_linear(cls, comm: Communicator, linear: nn.Linear) -> RowParallelLinear:
        """Make this rank's columns of a whole layer."""
        has_bias = linear.bias is not None
        made = cls(comm, linear.in_features, linear.out_features, bias=has_bias, dtype=linear.weight.dtype)
        with torch.no_grad():
            made.weight.copy_(linear.weight[:, made.columns])
            if made.bias is not None:
                made.bias.copy_(linear.bias)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., own features] to [..., out_features], the same on every rank."""
        rows, weight = _autocast(x.reshape(-1, x.shape[-1]), self.weight)
        y: torch.Tensor = library.row_parallel_linear(self._comm, rows, weight)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, own={self.columns}"


class EmbeddingBagAllToAll(nn.Module):
    """List of ``nn.EmbeddingBag`` on every rank, the exchange of the pooled bags, and its layout. Collective.

    Args:
        comm: communicator of the ranks, or the ranks of several nodes (``scale_out``), open for as long as this is
            used.
        num_embeddings: number of rows of each table of this rank.
        embedding_dim: dimension of all tables of all ranks.
        mode: ``sum`` or ``mean``.
        sparse: make gradients of the tables for the looked-up rows only, COO tensors that are not coalesced, as
            ``nn.EmbeddingBag(sparse=True)`` does. Compiled code leaves such a layer to eager code, and backward waits
            for the device.
        dtype: dtype of the layer, on all ranks: float32, float16 or bfloat16; None is PyTorch's default.

    Attributes:
        tables: parameters of this rank, [rows, embedding_dim] each.
        table_count: number of tables of all ranks.

    Raises:
        ValueError, TypeError: a size is not allowed.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def __init__(
        self,
        comm: Communicator | ScaleOut,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        mode: str = SUM,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with reporting_refusals(comm, "EmbeddingBagAllToAll"):
            check_choice("EmbeddingBagAllToAll", "mode", mode, MODES)
            if not num_embeddings:
                raise ValueError("EmbeddingBagAllToAll: tables of a rank (value=0, allowed=1 and more)")
        self.mode, self.embedding_dim, self.sparse = mode, embedding_dim, sparse
        self._comm = library.number_of(comm)
        self.tables = nn.ParameterList(
            torch.randn(rows, embedding_dim, device=comm.device, dtype=dtype) for rows in num_embeddings
        )
        counts = torch.zeros(comm.world_size, dtype=torch.int64, device=comm.device)
        comm.all_gather(counts, torch.tensor([len(num_embeddings)], device=comm.device))
        comm.synchronize()
        self.table_count = int(counts.sum())

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return this rank's samples of all tables.

        Args:
            indices: rows of all bags of the local tables, table by table, over the samples of all ranks; int32, int64.
            offsets: begin of each bag, and end of the last one, [tables * batch + 1].
            per_sample_weights: factor of each index, with ``sum`` only.

        Returns:
            Tensor [own samples, table_count * embedding_dim], as of :func:`sidelane.ops.embedding_all_to_all`.
        """
        tables = list(self.tables)
        call = _with_gradients_of_rows if self.sparse else library.embedding_all_to_all
        result: torch.Tensor = call(
            self._comm, tables, indices, offsets, per_sample_weights, self.mode, self.table_count
        )
        return result

    def extra_repr(self) -> str:
        sparse = ", sparse" if self.sparse else ""
        return f"embedding_dim={self.embedding_dim}, mode={self.mode}{sparse}, tables of all ranks={self.table_count}"


def _autocast(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a product in the dtype of ``torch.autocast`` for products; unchanged outside of it."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype)


@exclude_compilers
def _with_gradients_of_rows(*arguments: Any) -> torch.Tensor:
    """Call the embedding in eager code: no compiler takes tensors of rows."""
    found: torch.Tensor = library.embedding_all_to_all(*arguments, sparse=True)
    return found

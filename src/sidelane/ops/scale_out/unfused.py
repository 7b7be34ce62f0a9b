"""Operators among several nodes that are not fused: PyTorch's products and sums, and one all-to-all of the ranks.

They take the arguments of ``ops.gemm_all_to_all``, ``ops.rows.all_to_all_rows`` and
``ops.embedding_all_to_all_backward``, with the ranks of several nodes in place of a communicator. The host reads the
counts of rows, and waits in each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from sidelane.ops.embedding_tables import (
    MEAN,
    NAME,
    SUM,
    EmbeddingTables,
    batch_of,
    check_bags,
    check_sizes,
    checked,
    refuse_atomics,
)
from sidelane.ops.gemm import NAME as GEMM
from sidelane.ops.handle import check_tensor, telling_refusals
from sidelane.ops.operands import check_rows, check_weight, experts_of, product
from sidelane.ops.scale_out.ranks import ScaleOut


def gemm_all_to_all(
    ranks: ScaleOut, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, *, most_rows: int
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and send its rows to the ranks of ``counts`` on all nodes.

    Args:
        ranks: ranks of all nodes.
        x: see ``ops.gemm_all_to_all``, as the following.
        weight: matrix [H, K], or matrices of up to 64 experts, [E, H, K].
        counts: number of rows from rank i to rank j in row i, column j, [N, N], or with several experts, [N, N, E];
            int32 or int64, on the device, the same on all ranks.
        most_rows: largest number of rows that any rank gets. Rows beyond it are left out.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on, then zeros.

    Raises:
        ValueError, TypeError: an argument is wrong; on the other ranks PeerError, and there are no more calls.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """
    comm: Any = ranks  # has what these checks take of a communicator
    ranks.require_open()
    with telling_refusals(comm, GEMM), torch.no_grad():
        check_rows(GEMM, comm, x, counts, most_rows, experts_of(weight))
        check_weight(GEMM, comm, x, weight, most_rows)
        if weight.dim() == 2:
            return _exchanged(ranks, product(x, weight), counts, most_rows)
        parts = x.split_with_sizes([*(sizes := counts[ranks.rank].flatten().tolist()), x.shape[0] - sum(sizes)])
        matrices = itertools.cycle(weight.unbind())  # rows behind those of the last rank go nowhere
        products = [product(part, matrix) for part, matrix in zip(parts[:-1], matrices, strict=False)]
        return _exchanged(ranks, torch.cat(products), counts.sum(-1), most_rows)


def all_to_all_rows(ranks: ScaleOut, x: torch.Tensor, counts: torch.Tensor, *, most_rows: int) -> torch.Tensor:
    """Send rows unchanged to the ranks of ``counts`` on all nodes, as :func:`gemm_all_to_all` does with its results.

    With ``counts.transpose(0, 1).contiguous()`` it brings rows back: the gradient of a GEMM's results, for example.

    Args:
        ranks: see :func:`gemm_all_to_all`, as the following.
        x: rows for rank 0, for rank 1, and so on, [rows, H].
        counts: number of rows from rank i to rank j, [N, N].
        most_rows: largest number of rows that any rank gets.

    Returns:
        Tensor [most_rows, H].

    Raises:
        Exception: as :func:`gemm_all_to_all`.
    """
    comm: Any = ranks
    ranks.require_open()
    with telling_refusals(comm, GEMM), torch.no_grad():
        check_rows(GEMM, comm, x, counts, most_rows)
        return _exchanged(ranks, x, counts, most_rows)


def embedding_all_to_all_backward(
    ranks: ScaleOut,
    grad: torch.Tensor,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = SUM,
    per_sample_weights: torch.Tensor | None = None,
    sparse: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the gradients of ``embedding_all_to_all`` among several nodes.

    Dense gradients are added up in float32 by atomic additions, in an order that changes, and rounded once; gradients
    of rows (``sparse``) are the same bits each time.

    Args:
        ranks: ranks of all nodes.
        grad: gradient of the output, [b, A * D], of the tables' dtype.
        tables: argument of the forward.
        indices: argument of the forward.
        offsets: argument of the forward.
        mode: argument of the forward.
        per_sample_weights: argument of the forward.
        sparse: return gradients of rows: a COO tensor a table, not coalesced.

    Returns:
        A gradient for each local table; the gradient of the weights, if there are any.

    Raises:
        ValueError, TypeError: an argument is wrong; on the other ranks PeerError, and there are no more calls.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """
    comm: Any = ranks
    ranks.require_open()
    with telling_refusals(comm, NAME):
        if not sparse:
            refuse_atomics(comm, f"{NAME} backward")
        checked(comm, tables)
        check_bags(comm, tables, indices, offsets, per_sample_weights, mode)
        batch = batch_of(tables, offsets)
        check_sizes(comm, tables, batch)
    known = EmbeddingTables.kept(comm, tables, batch)
    with telling_refusals(comm, NAME):
        check_tensor(NAME, "grad", grad, ranks.device, (known.dtype,), (2,))
        if grad.shape != known.output_shape:
            raise ValueError(f"{NAME}: shape of grad (value={tuple(grad.shape)}, allowed={known.output_shape})")
    with torch.no_grad():
        of_bags = _of_bags(known, grad, ranks)
        found, of_weights = [], None if per_sample_weights is None else torch.zeros_like(per_sample_weights)
        cuts = offsets[::batch].tolist()
        for number, table in enumerate(tables):
            some, sizes = slice(*cuts[number : number + 2]), offsets[number * batch :][: batch + 1].diff()
            rows, values = indices[some].long(), of_bags[:, number].float()
            if mode == MEAN:
                values = values / sizes.clamp(min=1)[:, None]
            values = values.repeat_interleave(sizes, 0, output_size=len(rows))
            if per_sample_weights is not None and of_weights is not None:
                of_weights[some] = (table[rows].float() * values).sum(1).to(of_weights.dtype)
                values = values * per_sample_weights[some, None].float()
            if sparse:
                part = torch.sparse_coo_tensor(rows[None], values.to(table.dtype), table.shape, check_invariants=False)
            else:
                sums = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
                part = sums.index_add_(0, rows, values).to(table.dtype)
            found.append(part)
        return found, of_weights


def _of_bags(tables: EmbeddingTables, grad: torch.Tensor, ranks: ScaleOut) -> torch.Tensor:
    """Send the gradients of bags to the owners of their tables; return those of this rank's, [B, T, D]."""
    own, row = len(tables.tables), len(tables.tables) * tables.dim
    widths = [count * tables.dim for count in tables.counts]
    found = grad.new_empty(tables.batch, own, tables.dim)
    ranks.all_to_all(
        found.view(-1),
        torch.cat([part.reshape(-1) for part in grad.split(widths, 1)]),
        output_split_sizes=[size * row for size in tables.samples],
        input_split_sizes=[grad.shape[0] * width for width in widths],
    )
    return found


def _exchanged(ranks: ScaleOut, rows: torch.Tensor, counts: torch.Tensor, most_rows: int) -> torch.Tensor:
    """Send rows to the ranks of ``counts``; return the first ``most_rows`` that come, and zeros."""
    table = counts.tolist()
    sent, came = table[ranks.rank], [row[ranks.rank] for row in table]
    output = rows.new_zeros(max(most_rows, sum(came)), rows.shape[1])
    given = rows[: sum(sent)].contiguous()
    ranks.all_to_all(output[: sum(came)], given, output_split_sizes=came, input_split_sizes=sent)
    return output[:most_rows]

"""Slots of experts: low-latency calls, in which no host waits, so that a graph can hold them while routing changes.

Every rank sends its experts' numbers to all others, finds the slots of all tokens on its own, and sends the tokens as
``ops.dispatch_tokens`` does. On the way back gates are exchanged in the same way, since DeepEP's dispatch has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidelane.deep_ep.tokens import LowLatencyHandle
from sidelane.ops.expert_slots import assign_slots, spread_float8, spread_rows
from sidelane.ops.experts import exchange_rows, sum_rows
from sidelane.ops.handle import cached_object
from sidelane.ops.rows import quantized_rows
from sidelane.session import Communicator


def dispatch_to_slots(
    comm: Communicator, x: Tensor, topk_idx: Tensor, most_tokens: int, each: int, stats: Tensor | None, is_float8: bool
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle]:
    """Send tokens [T, H] to the slots of their experts; see ``Buffer.low_latency_dispatch``. Collective.

    Args:
        comm: communicator of the ranks.
        x: tokens of this rank.
        topk_idx: experts of each token, [T, k].
        most_tokens: M, largest number of tokens of a rank.
        each: number of experts of each rank.
        stats: tensor to which the numbers of rows are added.
        is_float8: tokens travel in float8, with scales.

    Returns:
        Rows in slots, or values and scales; numbers of rows of the experts; the handle.
    """
    n, (tokens, k) = comm.world_size, topk_idx.shape
    chosen = topk_idx.new_full((most_tokens, k), -1, dtype=torch.int32)
    chosen[:tokens] = topk_idx
    numbers, leaving, returned, results = assign_slots(comm, chosen, _of_all(comm, chosen), each)
    if stats is not None:
        stats.add_(numbers)
    scales: list[Tensor] = []

    def read(came: Tensor) -> Tensor:
        if not is_float8:
            return spread_rows(came, results, each)
        values, of_values = spread_float8(came, results, each, x.shape[1])
        scales.append(of_values)
        return values

    sent = quantized_rows(x) if is_float8 else x
    counts = _counts(comm, most_tokens)
    rows = exchange_rows(comm, sent, counts, n * most_tokens, read, terms=leaving, alike=(each, k))
    return (rows, *scales) if scales else rows, numbers, LowLatencyHandle(returned, results, each, most_tokens)  # type: ignore[return-value]


def combine_slots(comm: Communicator, rows: Tensor, gates: Tensor, handle: LowLatencyHandle, out: Tensor) -> Tensor:
    """Sum the results of each token times their gates into ``out``, [T, H], and return it. Collective.

    Args:
        comm: communicator of the ranks.
        rows: results in slots, one after the other, [X / N * N * M, H].
        gates: gates of this rank's tokens, [T, k].
        handle: handle of the dispatch.
        out: tensor for the sums, contiguous.
    """
    tokens, k = gates.shape
    own = gates.new_zeros(handle.most_tokens, k, dtype=torch.float32)
    own[:tokens] = gates
    counts, most_rows = _counts(comm, handle.most_tokens), len(handle.results)

    return exchange_rows(
        *(comm, rows, counts, most_rows, lambda came: sum_rows(came, handle.returned[:tokens], out=out)),
        terms=handle.results,
        factors=_of_all(comm, own),
        alike=(handle.experts, k),
    )


def _of_all(comm: Communicator, own: Tensor) -> Tensor:
    of_all = own.new_empty(comm.world_size * len(own), own.shape[1])
    comm.all_gather(of_all, own)
    return of_all


def _counts(comm: Communicator, most_tokens: int) -> Tensor:
    """Return the numbers of slots between ranks, int32[N, N]: ``most_tokens`` everywhere."""
    n = comm.world_size
    key = _counts, most_tokens
    return cached_object(comm, key, lambda: torch.full((n, n), most_tokens, dtype=torch.int32, device=comm.device))

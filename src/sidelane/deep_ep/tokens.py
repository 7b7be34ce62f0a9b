"""Places of tokens: layouts that ranks exchange, slots of experts, and rows that travel by them with the kernels
of ``ops.token_rows`` and ``ops.experts``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sidelane.ops.expert_slots import assign_slots, spread_float8, spread_rows
from sidelane.ops.experts import exchange_rows, sum_rows
from sidelane.ops.handle import cached_object, power_of_two
from sidelane.ops.operands import in_rows
from sidelane.ops.rows import MOST_TERMS, quantized_rows
from sidelane.ops.token_rows import WIDE_BESIDE, TokenRows
from sidelane.session import Communicator

LEAST_ROWS = 16
"""Least number of rows for which a dispatch has room; from there on twice as many at a time."""


class DispatchHandle(NamedTuple):
    """Places by which ``Buffer.dispatch`` sends tokens again, and ``Buffer.combine`` brings rows back.

    Attributes:
        counts: number of tokens from rank i to rank j in row i, column j, int32[N, N].
        counts_back: the same for the way back, which a rank's own tokens do not take.
        leaving: token of each row that leaves, those for rank 0 first, int32[N * T, 1]; -1 behind the last one.
        back: rows that go back, among those that arrived, those for rank 0 first, int32[rows, 1].
        returned: rows that come back for each token, int32[T, N]; -1 for none.
        kept: row of each token that stays on its rank, among those that arrived, int32[T, 1]; -1 for none.
        most_rows: number of rows for which all ranks have room.
        received: R, number of tokens that arrive at this rank.
        own: first of its own rows among them, and the row behind the last one.
    """

    counts: Tensor
    counts_back: Tensor
    leaving: Tensor
    back: Tensor
    returned: Tensor
    kept: Tensor
    most_rows: int
    received: int
    own: tuple[int, int]


class LowLatencyHandle(NamedTuple):
    """Slots by which ``Buffer.low_latency_combine`` brings results back.

    Attributes:
        returned: rows that come back for each token, int32[M, N]; -1 for none.
        results: slots of the experts' rows of each row that arrived, int32[N * M, k]; -1 for none.
        experts: number of experts of each rank.
        most_tokens: M, largest number of tokens of a rank.
    """

    returned: Tensor
    results: Tensor
    experts: int
    most_tokens: int


TokenLayout = tuple[Tensor, Tensor, Tensor]
"""Tokens for each rank, int32[N]; tokens for each expert, int32[X]; whether a token goes to a rank, bool[T, N]."""


def count_tokens(topk_idx: Tensor, experts: int, ranks: int) -> TokenLayout:
    """Return the layout of tokens for their experts, [T, k]; numbers out of range stand for none."""
    expert = torch.where((topk_idx >= 0) & (topk_idx < experts), topk_idx, experts).long()
    homes = torch.arange(ranks, device=topk_idx.device)
    is_in_rank = (expert[:, :, None] // (experts // ranks) == homes).any(1)
    ones = torch.ones_like(expert, dtype=torch.int32).flatten()
    per_expert = ones.new_zeros(experts + 1).scatter_add_(0, expert.flatten(), ones)[:experts]
    return is_in_rank.sum(0, dtype=torch.int32), per_expert, is_in_rank


def exchange_layout(comm: Communicator, layout: TokenLayout) -> tuple[DispatchHandle, list[int]]:
    """Return the handle of a layout, and the numbers of tokens of this rank's experts. The host waits for the peers."""
    (per_rank, per_expert, is_in_rank), n = layout, comm.world_size
    row = torch.cat([per_rank.int(), per_expert.int()])
    of_all = row.new_empty(n, len(row))
    comm.all_gather(of_all, row)
    comm.synchronize()
    table = of_all.tolist()
    there = [sum(line[rank] for line in table) for rank in range(n)]
    first, each = n + comm.rank * (len(per_expert) // n), len(per_expert) // n
    numbers = [sum(line[expert] for line in table) for expert in range(first, first + each)]
    # Rows of this rank for itself: first one among those that leave and among those that arrive, and their number.
    sent, stays = table[comm.rank][: comm.rank], table[comm.rank][comm.rank]
    own = sum(line[comm.rank] for line in table[: comm.rank])
    leaves = is_in_rank.T.reshape(-1)  # for rank 0 first
    place = leaves.cumsum(0, dtype=torch.int32) - 1
    token = torch.arange(len(is_in_rank), device=row.device, dtype=torch.int32).repeat(n)
    leaving = token.new_full((len(leaves) + 1,), -1)  # with a place for those that stay
    leaving.scatter_(0, torch.where(leaves, place, len(leaves)).long(), token)
    returned = torch.where(leaves, place, -1).view(n, -1).T.contiguous()
    kept = returned[:, comm.rank, None] + (own - sum(sent))
    kept = torch.where(is_in_rank[:, comm.rank, None], kept, -1)
    returned[:, comm.rank] = -1
    returned[:, comm.rank + 1 :] -= torch.where(is_in_rank[:, comm.rank + 1 :], stays, 0)
    arrived = torch.arange(there[comm.rank], device=row.device, dtype=torch.int32)
    most = power_of_two(max(LEAST_ROWS, *there, *(sum(line[:n]) for line in table)))
    counts = of_all[:, :n].contiguous()
    handle = DispatchHandle(
        counts=counts,
        counts_back=(counts - counts.diag().diag()).T.contiguous(),
        leaving=leaving[:-1, None],
        back=torch.cat([arrived[:own], arrived[own + stays :]])[:, None],
        returned=returned,
        kept=kept,
        most_rows=most,
        received=there[comm.rank],
        own=(own, own + stays),
    )
    return handle, numbers


def send_tokens(
    comm: Communicator, rows: Tensor, beside: list[Tensor], handle: DispatchHandle, units: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the rows of the tokens that arrive, [R, H], and what arrives of tensors of 4 bytes an element, [T, ...],
    which travel beside them.
    """
    moved, given = in_rows(rows).view(torch.int16), [part.contiguous().view(torch.int16) for part in beside]
    columns, widths = moved.shape[1], [part.shape[1] for part in given]
    widths.append(-sum(widths) % WIDE_BESIDE)  # of no meaning
    words = torch.cat([*given, moved.new_empty(len(rows), widths[-1])], 1)
    # Room for scales of 128 elements in float8, experts and gates: a dispatch by a handle makes nothing new.
    most = max(sum(widths), 4 * MOST_TERMS + -(-columns // 32))
    shape = handle.most_rows, columns, most + -most % WIDE_BESIDE
    sender = cached_object(comm, (TokenRows, *shape), lambda: TokenRows(comm, *shape))
    found, came = sender.run(moved, words, handle.leaving, handle.counts, handle.received, handle.own, units)
    parts = zip(came.split(widths, 1), beside, strict=False)
    return found.view(rows.dtype), [part.contiguous().view(like.dtype) for part, like in parts]


def bring_back(comm: Communicator, rows: Tensor, handle: DispatchHandle, units: int) -> Tensor:
    """Return the sums of the rows of each token, [T, H]: those of other ranks in their order, then this rank's own."""
    return exchange_rows(
        *(comm, rows, handle.counts_back, handle.most_rows),
        lambda came: sum_rows(came, handle.returned, own=(rows, handle.kept)),
        terms=handle.back,
        units=units,
    )


def dispatch_to_slots(
    comm: Communicator, x: Tensor, topk_idx: Tensor, most_tokens: int, each: int, is_float8: bool
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle]:
    """Send tokens [T, H] to the slots of ``each`` experts of a rank; see ``Buffer.low_latency_dispatch``.

    Every rank gets the experts of all tokens, and finds their slots on its own. No host waits.
    """
    n, (tokens, k) = comm.world_size, topk_idx.shape
    chosen = topk_idx.int().contiguous()
    if tokens < most_tokens:
        chosen = functional.pad(chosen, (0, 0, 0, most_tokens - tokens), value=-1)
    numbers, leaving, returned, results = assign_slots(comm, chosen, _of_all(comm, chosen), each)

    def read(came: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return spread_float8(came, results, each, x.shape[1]) if is_float8 else spread_rows(came, results, each)

    sent, counts = quantized_rows(x) if is_float8 else x, _counts(comm, most_tokens)
    rows = exchange_rows(comm, sent, counts, n * most_tokens, read, terms=leaving, alike=(each, k))
    return rows, numbers, LowLatencyHandle(returned, results, each, most_tokens)


def combine_slots(comm: Communicator, rows: Tensor, gates: Tensor, handle: LowLatencyHandle, out: Tensor) -> Tensor:
    """Sum the results in slots, [X / N * N * M, H], of each token times their gates, [T, k], into ``out``, [T, H].

    Gates are exchanged first, since DeepEP's dispatch has none.
    """
    tokens, k = gates.shape
    own = functional.pad(gates.float(), (0, 0, 0, handle.most_tokens - tokens))
    return exchange_rows(
        *(comm, rows, _counts(comm, handle.most_tokens), len(handle.results)),
        lambda came: sum_rows(came, handle.returned[:tokens], out=out),
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

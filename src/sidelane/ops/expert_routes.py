# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""route_experts: where tokens of all ranks, and rows of this rank's experts, lie for a routing.

Equivalent: an all-gather of the routing, a stable sort of a rank's pairs of a token and an expert, and its inverse.
Every rank finds its places on its own, in three kernels, so that no host waits. A rank has T places for the tokens of
each rank, and those that it does not want stay empty: counts are constant, whatever the routing.

Example: 2 ranks with 2 experts each, 1 token a rank, top-2: token 0 wants experts 1 and 2, token 1 wants 2 and 3. Rank
0 gets token 0 for expert 1; rank 1 gets both, and has rows of tokens 0 and 1 for expert 2, and of token 1 for expert 3.
So on rank 1 ``rows`` is 0, 1, 1, ``ends`` 2, 3, and ``results`` (-1, 0) and (1, 2). Rank 0 returns one row, rank 1 two.

Legend: N ranks; T tokens of a rank; E experts of a rank, in EP lanes; k experts of a token, in KP lanes; C rows that
experts of a rank have room for; pairs are looked at BLOCK at a time, and TOKENS tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.ops.gemm import NO_ROOM
from sidelane.ops.handle import FLOATS, check_tensor, compare_shapes, power_of_two, telling_refusals
from sidelane.ops.library import communicator, number_of, operator
from sidelane.ops.rows import MOST_TERMS
from sidelane.session import Communicator

NAME = "route_experts"

BLOCK, TOKENS = 2048, 64
"""Pairs of a token and an expert, and tokens, that a program looks at together."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """Places of tokens and of experts' rows on this rank for one routing, all on the device.

    Attributes:
        gates: gates of all ranks' tokens, float32[N * T, k], with gradients.
        ends: number of rows of the experts up to each one, int32[E]: ``offs`` of a grouped product.
        leaving: token of each row that leaves, those for rank 0 first, int32[N * T, 1]; -1 for none.
        returned: rows that come back for each token, int32[T, N]; -1 for none.
        rows: row that arrived for each expert's row, int32[C, 1]; -1 for none.
        results: experts' rows of each row that arrived, int32[N * T, k]; -1 for none, ``NO_ROOM`` (-2) for one of this
            rank's that has no room: a row of which all are so comes back as zeros, since the token's rank awaits it.
        counts: number of places of each rank at each other, int32[N, N].
    """

    gates: Tensor
    ends: Tensor
    leaving: Tensor
    returned: Tensor
    rows: Tensor
    results: Tensor
    counts: Tensor


def route_experts(
    comm: Communicator, chosen: Tensor, gates: Tensor, *, experts: int, most_rows: int | None = None
) -> ExpertRoutes:
    """Find the places of all tokens for a routing, without the host: one all-gather, and work on the device. Numbers of
    tokens and experts that are not those of the last call are compared with the peers' hosts.

    Args:
        comm: communicator of the ranks.
        chosen: numbers of each token's experts, all different, among those of all ranks, rank 0's first, [T, k], int32
            or int64; a negative one stands for none. T and k are alike on all ranks: fill up with negative ones.
        gates: factors of their results, [T, k].
        experts: E, number of experts of each rank, alike on all ranks.
        most_rows: C, largest number of rows of a rank's experts; what more there is for the last experts is left out,
            as if it had not been chosen; alike on all ranks. None: room for any routing, N * T * min(k, E).

    Raises:
        ValueError, TypeError: an argument is wrong.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        chosen = check_tensor(NAME, "chosen", chosen, comm.device, (torch.int32, torch.int64), (2,))
        gates = check_tensor(NAME, "gates", gates, comm.device, FLOATS, (2,))
        tokens, k = chosen.shape
        if gates.shape != chosen.shape or not tokens or not 1 <= k <= MOST_TERMS:
            text = (
                f"value={tuple(chosen.shape)}, {tuple(gates.shape)}, allowed=alike, 1..{MOST_TERMS} experts of a token"
            )
            raise ValueError(f"{NAME}: shapes of chosen and gates ({text})")
        room = comm.world_size * tokens * min(k, max(1, experts))
        most_rows = room if most_rows is None else min(most_rows, room)
        if experts < 1 or most_rows < 1:
            raise ValueError(f"{NAME}: experts, most_rows (value={experts}, {most_rows}, allowed=1 and more)")
    n, number, own = comm.world_size, number_of(comm), chosen.int()
    gates, everyone = routing_of_all(number, own, gates.float())
    ends, leaving, returned, rows, results = index_tokens(number, own, everyone, experts, most_rows)
    counts = torch.full((n, n), tokens, dtype=torch.int32, device=comm.device)
    return ExpertRoutes(gates, ends, leaving, returned, rows, results, counts)


def _routing_like(comm: int, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    rows = communicator(comm).world_size * chosen.shape[0]
    return gates.new_empty(rows, gates.shape[1]), chosen.new_empty(rows, chosen.shape[1])


def _routing_saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.comm = inputs[0]
    ctx.mark_non_differentiable(output[1])


def _routing_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return None, None, own_sums(ctx.comm, grad)


@operator(_routing_like, _routing_backward, _routing_saves)
def routing_of_all(comm: int, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gates of all ranks' tokens, float32[N * T, k], and their experts, int32: one all-gather."""
    ranks, (tokens, k) = communicator(comm), chosen.shape
    compare_shapes(ranks, f"{NAME}, tokens and experts of each", (tokens, k))
    own = torch.stack([chosen, gates.contiguous().view(torch.int32)])
    gathered = own.new_empty(ranks.world_size, 2, tokens, k)
    ranks.all_gather(gathered, own)
    everyone, of_gates = (part.clone().view(-1, k) for part in gathered.unbind(1))  # memory of their own
    return of_gates.view(torch.float32), everyone


def _places_like(
    comm: int, chosen: Tensor, everyone: Tensor, experts: int, most_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, (tokens, k), empty = communicator(comm).world_size, chosen.shape, chosen.new_empty
    return empty(experts), empty(n * tokens, 1), empty(tokens, n), empty(most_rows, 1), empty(n * tokens, k)


@operator(_places_like)
def index_tokens(
    comm: int, chosen: Tensor, everyone: Tensor, experts: int, most_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``ends``, ``leaving``, ``returned``, ``rows`` and ``results`` of :class:`ExpertRoutes`, by three kernels.

    Args:
        comm: number of the communicator.
        chosen: experts of this rank's tokens, int32[T, k], contiguous.
        everyone: experts of all ranks' tokens, int32[N * T, k], contiguous.
        experts: E, number of experts of each rank.
        most_rows: C, number of rows of a rank's experts.
    """
    ranks, (tokens, k) = communicator(comm), chosen.shape
    compare_shapes(ranks, f"{NAME}, experts and most_rows", (experts, most_rows))
    ends, leaving, returned, rows, results = _places_like(comm, chosen, everyone, experts, most_rows)
    numbers, pairs, first = torch.empty_like(ends), everyone.numel(), ranks.rank * experts
    warps = {"BLOCK": BLOCK, "num_warps": 8}
    launch(_count, (experts,), (everyone, numbers, pairs, first), warps)
    arguments = everyone, numbers, ends, rows, results, pairs, first, experts, most_rows, k
    launch(_place, (experts + 1,), arguments, {"EP": power_of_two(experts), **warps})
    arguments = chosen.contiguous(), leaving, returned, tokens, k, experts, ranks.world_size
    launch(_leave, (-(-tokens // TOKENS),), arguments, {"KP": power_of_two(k), "TOKENS": TOKENS})
    return ends, leaving, returned, rows, results


@operator(lambda comm, parts: parts.new_empty(parts.shape[0] // communicator(comm).world_size, parts.shape[1]))
def own_sums(comm: int, parts: Tensor) -> Tensor:
    """Return the sums over the ranks of this rank's part of the rows."""
    ranks = communicator(comm)
    output = parts.new_empty(parts.shape[0] // ranks.world_size, parts.shape[1])
    ranks.reduce_scatter(output, parts.contiguous())
    return output


@triton.jit
def _count(everyone, numbers, pairs, first, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for at in range(0, pairs, BLOCK):
        pair = at + tl.arange(0, BLOCK)
        found += (tl.load(everyone + pair, mask=pair < pairs, other=-1) == first + expert).to(tl.int32)
    tl.store(numbers + expert, tl.sum(found))


@triton.jit
def _place(
    everyone, numbers, ends, rows, results, pairs, first, experts, most_rows, k,
    EP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)  # and behind them, what is no expert's
    lane = tl.arange(0, EP)
    number = tl.load(numbers + lane, mask=lane < experts, other=0)
    before = tl.sum(tl.where(lane < expert, number, 0))
    if expert < experts:
        tl.store(ends + expert, tl.minimum(tl.sum(tl.where(lane <= expert, number, 0)), most_rows))
        for at in range(0, pairs, BLOCK):
            pair = at + tl.arange(0, BLOCK)
            is_own = tl.load(everyone + pair, mask=pair < pairs, other=-1) == first + expert
            row = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(results + pair, tl.where(row < most_rows, row, NO_ROOM), mask=is_own)
            tl.store(rows + row, pair // k, mask=is_own & (row < most_rows))
            before += tl.sum(is_own.to(tl.int32))
    else:
        for at in range(0, pairs, BLOCK):
            pair = at + tl.arange(0, BLOCK)
            other = tl.load(everyone + pair, mask=pair < pairs, other=-1) - first
            tl.store(results + pair, -1, mask=(pair < pairs) & ((other < 0) | (other >= experts)))
        for at in range(before, most_rows, BLOCK):
            row = at + tl.arange(0, BLOCK)
            tl.store(rows + row, -1, mask=row < most_rows)


@triton.jit
def _leave(
    chosen, leaving, returned, tokens, k, experts, ranks,
    KP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    choice = tl.arange(0, KP)
    inside = (token < tokens)[:, None] & (choice < k)[None, :]
    expert = tl.load(chosen + token[:, None] * k + choice[None, :], mask=inside, other=-1)
    for peer in range(ranks):
        is_there = (expert >= peer * experts) & (expert < (peer + 1) * experts)
        wants = tl.max(is_there.to(tl.int32), 1) > 0
        tl.store(leaving + peer * tokens + token, tl.where(wants, token, -1), mask=token < tokens)
        tl.store(returned + token * ranks + peer, tl.where(wants, peer * tokens + token, -1), mask=token < tokens)


KERNELS = _count, _place, _leave

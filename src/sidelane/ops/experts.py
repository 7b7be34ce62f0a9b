# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""route_experts, dispatch_tokens and combine_tokens: tokens to the ranks of their experts and back, once for each rank.

Equivalent: an all-gather of the routing, a stable sort of a rank's pairs of a token and an expert, a row for each pair,
an all-to-all, and the other way round a sum of k rows for each token. Here a token that several experts of a rank want
travels there once, and comes back as one row: the sum of its experts' results there, times their gates. Both ways are
the kernel of ``all_to_all_rows``, and one that sums rows of one's own::

    dispatch   rows of tokens, from where they lie -> the rank of an expert | a copy for each of its experts, by expert
    combine    sums over the experts of a rank -> the token's rank          | sums over ranks

Each is the other's transpose, and so its backward. No host waits, and a graph may hold the calls while routing changes:
every rank finds its slots on its own, in three kernels. A rank has T slots for the tokens of each rank, and those
that it does not want stay empty: counts are constant, whatever the routing. Tokens may travel in float8
(``rows``).

Example: 2 ranks with 2 experts each, 1 token a rank, top-2: token 0 wants experts 1 and 2, token 1 wants 2 and 3. Rank
0 gets token 0 for expert 1; rank 1 gets both, and has rows of tokens 0 and 1 for expert 2, and of token 1 for expert 3.
So on rank 1 ``rows`` is 0, 1, 1, ``ends`` 2, 3, and ``results`` (-1, 0) and (1, 2). Rank 0 returns one row, rank 1 two.

Legend: N ranks; T tokens of a rank; H elements of a row; E experts of a rank, in EP lanes; k experts of a token, in KP
lanes; C rows that experts of a rank have room for; pairs are looked at BLOCK at a time, and TOKENS tokens; TERMS terms
of a sum, in tiles of ROWS rows and COLS columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.ops.gemm import NO_ROOM, ROW_TILES, GemmAllToAll, sum_of_terms
from sidelane.ops.handle import (
    FLOATS,
    BufferLock,
    buffer_lock,
    cached_object,
    check_tensor,
    compare_shapes,
    power_of_two,
    reporting_refusals,
)
from sidelane.ops.library import communicator, number_of, operator
from sidelane.ops.operands import in_rows
from sidelane.ops.operator import CachedLaunch
from sidelane.ops.rows import MOST_TERMS, dequantized_rows, quantized_rows, send_rows
from sidelane.session import Communicator

R = TypeVar("R")

ROUTE, DISPATCH, COMBINE = "route_experts", "dispatch_tokens", "combine_tokens"

BLOCK, TOKENS = 2048, 64
"""Pairs of a token and an expert, and tokens, that a program looks at together."""

ROWS, COLS = 4, 1024
"""Rows and columns that a program sums."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """Slots of tokens and of experts' rows on this rank for one routing, all on the device.

    Attributes:
        gates: gates of all ranks' tokens, float32[N * T, k], with gradients.
        ends: number of rows of the experts up to each one, int32[E]: ``offs`` of a grouped product.
        leaving: token of each row that leaves, those for rank 0 first, int32[N * T, 1]; -1 for none.
        returned: rows that come back for each token, int32[T, N]; -1 for none.
        rows: row that arrived for each expert's row, int32[C, 1]; -1 for none.
        results: experts' rows of each row that arrived, int32[N * T, k]; -1 for none, ``NO_ROOM`` (-2) for one of this
            rank's that has no room: a row of which all are so comes back as zeros, since the token's rank awaits it.
        counts: number of slots of each rank at each other, int32[N, N].
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
    """Find the slots of all tokens for a routing, without the host: one all-gather, and work on the device. Numbers of
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
    with reporting_refusals(comm, ROUTE):
        chosen = check_tensor(ROUTE, "chosen", chosen, comm.device, (torch.int32, torch.int64), (2,))
        gates = check_tensor(ROUTE, "gates", gates, comm.device, FLOATS, (2,))
        tokens, k = chosen.shape
        if gates.shape != chosen.shape or not tokens or not 1 <= k <= MOST_TERMS:
            text = (
                f"value={tuple(chosen.shape)}, {tuple(gates.shape)}, allowed=one shape, 1..{MOST_TERMS} experts a token"
            )
            raise ValueError(f"{ROUTE}: shapes of chosen and gates ({text})")
        room = comm.world_size * tokens * min(k, max(1, experts))
        most_rows = room if most_rows is None else min(most_rows, room)
        if experts < 1 or most_rows < 1:
            raise ValueError(f"{ROUTE}: experts, most_rows (value={experts}, {most_rows}, allowed=1 and more)")
    n, number, own = comm.world_size, number_of(comm), chosen.int()
    gates, everyone = routing_of_all(number, own, gates.float())
    ends, leaving, returned, rows, results = index_tokens(number, own, everyone, experts, most_rows)
    counts = torch.full((n, n), tokens, dtype=torch.int32, device=comm.device)
    return ExpertRoutes(gates, ends, leaving, returned, rows, results, counts)


def dispatch_tokens(
    comm: Communicator, tokens: Tensor, routes: ExpertRoutes, *, wire: torch.dtype | None = None
) -> Tensor:
    """Send tokens to the ranks of their experts, each once, and copy them there for each expert. With gradients.

    The first call of a shape makes its resources, with all ranks; later ones may be captured, with other routes.

    Args:
        comm: communicator of the ranks.
        tokens: this rank's tokens, [T, H]; float32, float16 or bfloat16.
        routes: slots for this routing.
        wire: dtype in which tokens travel, ``torch.float8_e4m3fn`` with a float32 scale for each 128 elements; None for
            their own. Gradients travel in their own.

    Returns:
        Tensor [C, H]: rows by expert, in the order of ranks and tokens; zeros behind ``routes.ends[-1]``.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with reporting_refusals(comm, DISPATCH):
        tokens = check_tensor(DISPATCH, "tokens", tokens, comm.device, FLOATS, (2,))
        if len(tokens) != len(routes.returned):
            raise ValueError(f"{DISPATCH}: rows of tokens (value={len(tokens)}, allowed={len(routes.returned)})")
        if wire not in (None, torch.float8_e4m3fn):
            raise ValueError(f"{DISPATCH}: wire (value={wire}, allowed=None, {torch.float8_e4m3fn})")
    found: Tensor = tokens_to_experts(number_of(comm), tokens, _slots(routes), wire is not None, len(routes.ends))
    return found


def combine_tokens(comm: Communicator, rows: Tensor, routes: ExpertRoutes) -> Tensor:
    """Return each token's sum of its experts' results times their gates. With gradients, also of ``routes.gates``.

    Each rank sums the results of its experts for a token before it sends them, in float32, rounded once; the token's
    rank sums those of the ranks, in their order.

    Args:
        comm: communicator of the ranks.
        rows: results of this rank's experts, [C, H], in the order of :func:`dispatch_tokens`; what lies behind
            ``routes.ends[-1]`` is not read.
        routes: slots for this routing.

    Returns:
        Tensor [T, H].

    Raises:
        As :func:`dispatch_tokens`.
    """
    with reporting_refusals(comm, COMBINE):
        rows = check_tensor(COMBINE, "rows", rows, comm.device, FLOATS, (2,))
        if len(rows) != len(routes.rows):
            raise ValueError(f"{COMBINE}: rows (value={len(rows)}, allowed={len(routes.rows)})")
    found: Tensor = experts_to_tokens(number_of(comm), rows, routes.gates, _slots(routes), len(routes.ends))
    return found


def sum_rows(
    x: Tensor,
    terms: Tensor,
    factors: Tensor | None = None,
    *,
    out: Tensor | None = None,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return sums of rows of ``x``, [rows, H], on this rank; :func:`all_to_all_rows` has ``terms`` and ``factors``.

    Rows without terms are zeros. ``out`` is contiguous. ``own``: other rows, of which one is the last term of each sum,
    and their numbers, int32[rows, 1]; -1 for none.
    """
    (rows, summed), columns = terms.shape, x.shape[1]
    output = x.new_empty(rows, columns) if out is None else out
    grid = -(-rows // ROWS), -(-columns // COLS)
    others, places = own or (None, None)
    stride = 0 if others is None else others.stride(0)
    arguments = x, output, terms, factors, others, places, rows, columns, x.stride(0), stride
    if rows:
        launch(_sum_rows, grid, arguments, {"TERMS": summed, "ROWS": ROWS, "COLS": COLS})
    return output


def _slots(routes: ExpertRoutes) -> list[Tensor]:
    return [routes.leaving, routes.returned, routes.rows, routes.results, routes.counts]


def exchange_rows(
    comm: Communicator,
    sent: Tensor,
    counts: Tensor,
    most_rows: int,
    read: Callable[[Tensor], R],
    *,
    terms: Tensor | None = None,
    factors: Tensor | None = None,
    alike: tuple[int, ...] = (),
    units: int | None = None,
    sends_zeros: bool = False,
) -> R:
    """Send rows, or sums of rows, as :func:`all_to_all_rows` does, and return what ``read`` makes of those that come.

    Uses of one shape are in turn, on whatever streams, since the next one overwrites the rows that came.

    Args:
        comm: communicator of the ranks.
        sent: rows, for rank 0 first.
        counts: numbers of rows between ranks, int32[N, N].
        most_rows: largest number of rows that any rank gets.
        read: function of the rows that came, whose result is memory of its own.
        terms: see :func:`all_to_all_rows`.
        factors: see :func:`all_to_all_rows`.
        alike: numbers that are the same on all ranks: each has a handle of its own, so that ranks that differ in one
            never take each other's rows for theirs.
        units: largest number of compute units that the kernel takes, the same on all ranks; None for all.
        sends_zeros: rows of which all terms are ``NO_ROOM`` are sent as zeros.
    """
    shape = most_rows, sent.shape[1], sent.dtype, units, *alike

    def make() -> tuple[GemmAllToAll, BufferLock]:
        handle = GemmAllToAll(comm, most_rows, sent.shape[1], sent.dtype, tiles=ROW_TILES)
        if units is not None:
            handle.programs = min(handle.programs, units * ROW_TILES.per_unit)
        return handle, buffer_lock(comm)

    handle, turn = cached_object(comm, (exchange_rows, *shape), make)

    def sender() -> CachedLaunch:
        return functools.partial(handle.run, sends_zeros=sends_zeros, alike=f", numbers {alike}")

    with turn:  # until the rows have been read
        return read(send_rows(comm, most_rows, sender, (handle, sends_zeros), sent, counts, terms, factors))


def _exchanged(
    name: str,
    number: int,
    sent: Tensor,
    terms: Tensor,
    slots: list[Tensor],
    experts: int,
    read: Callable[[Tensor], Tensor],
    factors: Tensor | None = None,
    *,
    sends_zeros: bool = False,
) -> Tensor:
    """Send sums of rows of ``sent``, and return what ``read`` makes of those that come."""
    comm, (most_rows, k) = communicator(number), slots[3].shape
    # By dtype: tokens that leave in float8 come back, as gradients, in their own dtype, in each step anew.
    compare_shapes(comm, f"{name} of {sent.dtype}", (most_rows, sent.shape[1], sent.dtype, experts, k))
    options: dict[str, Any] = {"terms": terms, "factors": factors, "sends_zeros": sends_zeros}
    return exchange_rows(comm, sent, slots[4], most_rows, read, alike=(experts, k), **options)


def _dispatch_saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.comm, _, slots, _, ctx.experts = inputs
    ctx.save_for_backward(*slots)


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    slots = list(ctx.saved_tensors)
    return None, experts_to_tokens(ctx.comm, grad, None, slots, ctx.experts), [None] * len(slots), None, None


@operator(
    lambda comm, tokens, slots, *_: tokens.new_empty(len(slots[2]), tokens.shape[1]),
    _dispatch_backward,
    _dispatch_saves,
)
def tokens_to_experts(comm: int, tokens: Tensor, slots: list[Tensor], quantized: bool, experts: int) -> Tensor:
    """See :func:`dispatch_tokens`; ``slots``: :func:`_slots`; ``quantized``: tokens travel in float8; ``experts``: E,
    which ranks compare.
    """
    leaving, rows, sent = slots[0], slots[2], in_rows(tokens)
    if not quantized:
        return _exchanged(DISPATCH, comm, sent, leaving, slots, experts, lambda came: sum_rows(came, rows))
    read = functools.partial(dequantized_rows, rows=rows, columns=tokens.shape[1], dtype=tokens.dtype)
    return _exchanged(DISPATCH, comm, quantized_rows(sent), leaving, slots, experts, read)


def _combine_saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.comm, values, gates, slots, ctx.experts = inputs
    ctx.save_for_backward(values, gates, *slots)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, gates, *slots = ctx.saved_tensors
    rows, results = slots[2], slots[3]
    # The gradient of its token, for each expert's row.
    for_token = tokens_to_experts(ctx.comm, grad, slots, False, ctx.experts)
    _, for_values, for_gates, *_ = ctx.needs_input_grad
    of_values = for_token
    of_gates = None
    if for_values and gates is not None:
        arrived = torch.where(results >= 0, results, len(values)).flatten().long()  # one slot more for what is none
        gate = gates.new_zeros(len(values) + 1).scatter_(0, arrived, gates.flatten())[:-1]
        of_values = (for_token * gate[:, None]).to(values.dtype)
    if for_gates:
        product = (for_token.float() * torch.where(rows >= 0, values, 0).float()).sum(-1)
        of_gates = torch.where(results >= 0, product[results.clamp(min=0)], 0)
    return None, of_values if for_values else None, of_gates, [None] * len(slots), None


@operator(
    lambda comm, values, gates, slots, experts: values.new_empty(len(slots[1]), values.shape[1]),
    _combine_backward,
    _combine_saves,
)
def experts_to_tokens(comm: int, values: Tensor, gates: Tensor | None, slots: list[Tensor], experts: int) -> Tensor:
    """See :func:`combine_tokens`. Without gates, sums of experts' rows: gradients of dispatched tokens."""
    returned, results = slots[1], slots[3]

    def read(came: Tensor) -> Tensor:
        return sum_rows(came, returned)

    return _exchanged(COMBINE, comm, in_rows(values), results, slots, experts, read, gates, sends_zeros=True)


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
    compare_shapes(ranks, f"{ROUTE}, tokens and experts of each", (tokens, k))
    own = torch.stack([chosen, gates.contiguous().view(torch.int32)])
    gathered = own.new_empty(ranks.world_size, 2, tokens, k)
    ranks.all_gather(gathered, own)
    everyone, of_gates = (part.clone().view(-1, k) for part in gathered.unbind(1))  # memory of their own
    return of_gates.view(torch.float32), everyone


def _slots_like(
    comm: int, chosen: Tensor, everyone: Tensor, experts: int, most_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, (tokens, k), empty = communicator(comm).world_size, chosen.shape, chosen.new_empty
    return empty(experts), empty(n * tokens, 1), empty(tokens, n), empty(most_rows, 1), empty(n * tokens, k)


@operator(_slots_like)
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
    compare_shapes(ranks, f"{ROUTE}, experts and most_rows", (experts, most_rows))
    ends, leaving, returned, rows, results = _slots_like(comm, chosen, everyone, experts, most_rows)
    numbers, pairs, first = torch.empty_like(ends), everyone.numel(), ranks.rank * experts
    warps = {"BLOCK": BLOCK, "num_warps": 8}
    launch(_count, (experts,), (everyone, numbers, pairs, first), warps)
    arguments = everyone, numbers, ends, rows, results, pairs, first, experts, most_rows, k
    launch(_assign, (experts + 1,), arguments, {"EP": power_of_two(experts), **warps})
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
def _assign(
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
        leave_others(everyone, results, pairs, first, experts, BLOCK)
        for at in range(before, most_rows, BLOCK):
            row = at + tl.arange(0, BLOCK)
            tl.store(rows + row, -1, mask=row < most_rows)


@triton.jit
def leave_others(everyone, results, pairs, first, experts, BLOCK: tl.constexpr):
    """Store -1 as the row of each pair with an expert of another rank, or with none."""
    for at in range(0, pairs, BLOCK):
        pair = at + tl.arange(0, BLOCK)
        other = tl.load(everyone + pair, mask=pair < pairs, other=-1) - first
        tl.store(results + pair, -1, mask=(pair < pairs) & ((other < 0) | (other >= experts)))


@triton.jit
def _leave(
    chosen, leaving, returned, tokens, k, experts, ranks,
    KP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    send_to_ranks(tl.program_id(0), chosen, leaving, returned, tokens, k, experts, ranks, KP, TOKENS)


@triton.jit
def send_to_ranks(
    block, chosen, leaving, returned, tokens, k, experts, ranks,
    KP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store where a block of TOKENS tokens leaves, and what comes back for it; see :class:`ExpertRoutes`."""
    token = block * TOKENS + tl.arange(0, TOKENS)
    choice = tl.arange(0, KP)
    inside = (token < tokens)[:, None] & (choice < k)[None, :]
    expert = tl.load(chosen + token[:, None] * k + choice[None, :], mask=inside, other=-1)
    for peer in range(ranks):
        is_there = (expert >= peer * experts) & (expert < (peer + 1) * experts)
        wants = tl.max(is_there.to(tl.int32), 1) > 0
        tl.store(leaving + peer * tokens + token, tl.where(wants, token, -1), mask=token < tokens)
        tl.store(returned + token * ranks + peer, tl.where(wants, peer * tokens + token, -1), mask=token < tokens)


@triton.jit(do_not_specialize=["rows"])
def _sum_rows(
    x, output, terms, factors, own, places, rows, columns, x_stride, own_stride,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    values, is_there = sum_of_terms(x, terms, factors, row, column, row < rows, columns, x_stride, ROWS, COLS, TERMS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.where(is_there[:, None], values, tl.zeros_like(values))
    if own is not None:
        more, is_more = sum_of_terms(own, places, None, row, column, row < rows, columns, own_stride, ROWS, COLS, 1)
        values = values.to(tl.float32) + tl.where(is_more[:, None], more, tl.zeros_like(more)).to(tl.float32)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(output + at, values.to(output.dtype.element_ty), mask=inside)


ASSIGNING, KERNEL = (_count, _assign, _leave), _sum_rows

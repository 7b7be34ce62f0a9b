# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""dispatch_tokens and combine_tokens: tokens to the ranks of their experts and back, once for each rank.

Equivalent: a row for each pair of a token and an expert, an all-to-all, and the other way round a sum of k rows for
each token. Here a token that several experts of a rank want travels there once, and comes back as one row: the sum of
its experts' results there, times their gates. Both are the kernel of ``all_to_all_rows``, and one that sums rows of
one's own::

    dispatch   rows of tokens, from where they lie -> the rank of an expert | a copy for each of its experts, by expert
    combine    sums over the experts of a rank -> the token's rank          | sums over ranks

Each is the other's transpose, and so its backward. Where rows lie is in ``expert_routes``; no host waits, and a graph
may hold the calls while routing changes. Tokens may travel in float8 (``float8_rows``).

Legend: N ranks; T tokens of a rank; H elements of a row; E experts of a rank; k experts of a token; C rows that experts
of a rank have room for; TERMS terms of a sum, in tiles of ROWS rows and COLS columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.ops.expert_routes import ExpertRoutes
from sidelane.ops.float8_rows import dequantized_rows, quantized_rows
from sidelane.ops.gemm import ROW_TILES, GemmAllToAll, sum_of_terms
from sidelane.ops.handle import FLOATS, check_tensor, compare_shapes, in_turn, kept, telling_refusals
from sidelane.ops.library import communicator, number_of, operator
from sidelane.ops.operands import in_rows
from sidelane.ops.operator import CachedLaunch
from sidelane.ops.rows import send_rows
from sidelane.session import Communicator

DISPATCH, COMBINE = "dispatch_tokens", "combine_tokens"
ROWS, COLS = 4, 1024
"""Rows and columns that a program sums."""


def dispatch_tokens(
    comm: Communicator, tokens: Tensor, routes: ExpertRoutes, *, wire: torch.dtype | None = None
) -> Tensor:
    """Send tokens to the ranks of their experts, each once, and copy them there for each expert. With gradients.

    The first call of a shape makes its resources, with all ranks; later ones may be captured, with other routes.

    Args:
        comm: communicator of the ranks.
        tokens: this rank's tokens, [T, H]; float32, float16 or bfloat16.
        routes: places for this routing.
        wire: dtype in which tokens travel, ``torch.float8_e4m3fn`` with a float32 scale for each 128 elements; None for
            their own. Gradients travel in their own.

    Returns:
        Tensor [C, H]: rows by expert, in the order of ranks and tokens; zeros behind ``routes.ends[-1]``.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, DISPATCH):
        tokens = check_tensor(DISPATCH, "tokens", tokens, comm.device, FLOATS, (2,))
        if len(tokens) != len(routes.returned):
            raise ValueError(f"{DISPATCH}: rows of tokens (value={len(tokens)}, allowed={len(routes.returned)})")
        if wire not in (None, torch.float8_e4m3fn):
            raise ValueError(f"{DISPATCH}: wire (value={wire}, allowed=None, {torch.float8_e4m3fn})")
    found: Tensor = tokens_to_experts(number_of(comm), tokens, *_places(routes), wire is not None, len(routes.ends))
    return found


def combine_tokens(comm: Communicator, rows: Tensor, routes: ExpertRoutes) -> Tensor:
    """Return each token's sum of its experts' results times their gates. With gradients, also of ``routes.gates``.

    Each rank sums the results of its experts for a token before it sends them, in float32, rounded once; the token's
    rank sums those of the ranks, in their order.

    Args:
        comm: communicator of the ranks.
        rows: results of this rank's experts, [C, H], in the order of :func:`dispatch_tokens`; what lies behind
            ``routes.ends[-1]`` is not read.
        routes: places for this routing.

    Returns:
        Tensor [T, H].

    Raises the same errors as :func:`dispatch_tokens`.
    """
    with telling_refusals(comm, COMBINE):
        rows = check_tensor(COMBINE, "rows", rows, comm.device, FLOATS, (2,))
        if len(rows) != len(routes.rows):
            raise ValueError(f"{COMBINE}: rows (value={len(rows)}, allowed={len(routes.rows)})")
    found: Tensor = experts_to_tokens(number_of(comm), rows, routes.gates, *_places(routes), len(routes.ends))
    return found


def sum_rows(x: Tensor, terms: Tensor, factors: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return sums of rows of ``x``, [rows, H], on this rank; :func:`all_to_all_rows` has ``terms`` and ``factors``.

    Rows without terms are zeros. ``out`` is contiguous.
    """
    (rows, summed), columns = terms.shape, x.shape[1]
    output = x.new_empty(rows, columns) if out is None else out
    grid = -(-rows // ROWS), -(-columns // COLS)
    arguments = x, output, terms, factors, rows, columns, x.stride(0)
    if rows:
        launch(_sum_rows, grid, arguments, {"TERMS": summed, "ROWS": ROWS, "COLS": COLS})
    return output


def _places(routes: ExpertRoutes) -> tuple[Tensor, ...]:
    return routes.leaving, routes.returned, routes.rows, routes.results, routes.counts


class _Exchange:
    """Rows between ranks for one shape: a handle of its own, since its output is read behind each call, in turn.

    Each number of experts has one, so that ranks that differ in it never take each other's rows for theirs.
    """

    def __init__(
        self, comm: Communicator, most_rows: int, columns: int, dtype: torch.dtype, experts: int, k: int
    ) -> None:
        self.comm, self.most_rows, self.in_turn = comm, most_rows, in_turn(comm)
        self._handle = GemmAllToAll(comm, most_rows, columns, dtype, tiles=ROW_TILES)
        self._alike = f", {experts} experts of a rank, {k} of a token"

    def send(
        self, x: Tensor, counts: Tensor, terms: Tensor, factors: Tensor | None = None, *, sends_zeros: bool = False
    ) -> Tensor:
        """Send sums of rows of ``x``; as long as its result is read, the caller is ``in_turn``."""

        def sender() -> CachedLaunch:
            return functools.partial(self._handle.run, sends_zeros=sends_zeros, alike=self._alike)

        return send_rows(self.comm, self.most_rows, sender, (self, sends_zeros), x, counts, terms, factors)


def _exchange(name: str, number: int, sent: Tensor, results: Tensor, experts: int) -> _Exchange:
    comm, (most_rows, k) = communicator(number), results.shape
    shape = most_rows, sent.shape[1], sent.dtype, experts, k
    # By dtype: tokens that leave in float8 come back, as gradients, in their own dtype, in each step anew.
    compare_shapes(comm, f"{name} of {sent.dtype}", shape)
    return kept(comm, (_Exchange, *shape), lambda: _Exchange(comm, *shape))


def _to_experts(comm: int, tokens: Tensor, places: Any, quantized: bool, experts: int) -> Tensor:
    leaving, _, rows, results, counts = places
    sent = quantized_rows(in_rows(tokens)) if quantized else in_rows(tokens)
    exchange = _exchange(DISPATCH, comm, sent, results, experts)
    with exchange.in_turn:  # until its rows have been copied
        came = exchange.send(sent, counts, leaving)
        return dequantized_rows(came, rows, tokens.shape[1], tokens.dtype) if quantized else sum_rows(came, rows)


def _to_tokens(comm: int, rows: Tensor, places: Any, experts: int, gates: Tensor | None = None) -> Tensor:
    _, returned, _, results, counts = places
    sent = in_rows(rows)
    exchange = _exchange(COMBINE, comm, sent, results, experts)
    with exchange.in_turn:  # until its rows have been added up
        return sum_rows(exchange.send(sent, counts, results, gates, sends_zeros=True), returned)


def _dispatch_saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.comm, ctx.experts = inputs[0], inputs[8]
    ctx.save_for_backward(*inputs[2:7])


def _combine_saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.comm, ctx.experts = inputs[0], inputs[8]
    ctx.save_for_backward(*inputs[1:8])


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (None, rows_to_tokens(ctx.comm, grad, *ctx.saved_tensors, ctx.experts), *[None] * 7)


@operator(lambda comm, tokens, leaving, returned, rows, *_: tokens.new_empty(rows.shape[0], tokens.shape[1]),
          _dispatch_backward, _dispatch_saves)  # fmt: skip
def tokens_to_experts(
    comm: int,
    tokens: Tensor,
    leaving: Tensor,
    returned: Tensor,
    rows: Tensor,
    results: Tensor,
    counts: Tensor,
    quantized: bool,
    experts: int = 1,
) -> Tensor:
    """See :func:`dispatch_tokens`; ``quantized``: tokens travel in float8; ``experts``: E, which ranks compare."""
    return _to_experts(comm, tokens, (leaving, returned, rows, results, counts), quantized, experts)


@operator(lambda comm, results_of, leaving, returned, *_: results_of.new_empty(returned.shape[0], results_of.shape[1]))
def rows_to_tokens(
    comm: int,
    results_of: Tensor,
    leaving: Tensor,
    returned: Tensor,
    rows: Tensor,
    results: Tensor,
    counts: Tensor,
    experts: int = 1,
) -> Tensor:
    """Return sums of experts' rows for each token, without gates: gradients of dispatched tokens."""
    return _to_tokens(comm, results_of, (leaving, returned, rows, results, counts), experts)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, gates, *places = ctx.saved_tensors
    rows, results = places[2], places[3]
    # The gradient of its token, for each expert's row.
    for_token = tokens_to_experts(ctx.comm, grad, *places, False, ctx.experts)
    _, for_values, for_gates, *_ = ctx.needs_input_grad
    of_values = of_gates = None
    if for_values:
        arrived = torch.where(results >= 0, results, len(values)).flatten().long()  # one place more for what is none
        gate = gates.new_zeros(len(values) + 1).scatter_(0, arrived, gates.flatten())[:-1]
        of_values = (for_token * gate[:, None]).to(values.dtype)
    if for_gates:
        product = (for_token.float() * torch.where(rows >= 0, values, 0).float()).sum(-1)
        of_gates = torch.where(results >= 0, product[results.clamp(min=0)], 0)
    return (None, of_values, of_gates, *[None] * 6)


@operator(lambda comm, values, gates, leaving, returned, *_: values.new_empty(returned.shape[0], values.shape[1]),
          _combine_backward, _combine_saves)  # fmt: skip
def experts_to_tokens(
    comm: int,
    values: Tensor,
    gates: Tensor,
    leaving: Tensor,
    returned: Tensor,
    rows: Tensor,
    results: Tensor,
    counts: Tensor,
    experts: int = 1,
) -> Tensor:
    """See :func:`combine_tokens`."""
    return _to_tokens(comm, values, (leaving, returned, rows, results, counts), experts, gates)


@triton.jit(do_not_specialize=["rows"])
def _sum_rows(
    x, output, terms, factors, rows, columns, x_stride,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    values, is_there = sum_of_terms(x, terms, factors, row, column, row < rows, columns, x_stride, ROWS, COLS, TERMS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.where(is_there[:, None], values, tl.zeros_like(values))
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(output + place, values.to(output.dtype.element_ty), mask=inside)


KERNEL = _sum_rows

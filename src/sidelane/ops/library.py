"""Fused operators as operators of PyTorch (``torch.ops.sidelane``): with autograd, and whole under ``torch.compile``.

An operator of PyTorch cannot take a communicator, so it takes the number that :func:`number_of` gives. Gradients
follow the convention of tensor-parallel layers: a result that was added up, which all ranks get alike, has a gradient
that all ranks have alike, and needs no communication. Results are memory of the caller's own.

A compiled graph keeps the order of these calls as it is the same graph on every rank; ranks that compile different
programs around them may differ in it, which ends in a MismatchError.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.library import CustomOpDef

from sidelane.ops import (
    dispatch_gemm,
    embedding,
    embedding_backward,
    gemm,
    gemv,
    pipelined_gemm,
    rms_norm,
)
from sidelane.ops.handle import BufferLock, buffer_lock, cached_object, power_of_two
from sidelane.ops.operands import MOST_ELEMENTS, in_rows, in_rows_or_columns
from sidelane.session import Communicator

if TYPE_CHECKING:  # ranks of one node do without
    from sidelane.ops.scale_out import ScaleOut

_numbers = itertools.count(1)
_communicators: weakref.WeakValueDictionary[int, Communicator | ScaleOut] = weakref.WeakValueDictionary()


def number_of(comm: Communicator | ScaleOut) -> int:
    """Return the number by which the operators know a communicator, or the ranks of several nodes, in this process.

    Compiled code is guarded by the attribute: by an entry of ``cache`` it would be compiled anew whenever that grows.
    """
    if comm.operator_number is None:
        comm.operator_number = next(_numbers)
        comm.cache[number_of] = comm.operator_number
        _communicators[comm.operator_number] = comm
    return comm.operator_number


def communicator(number: int) -> Communicator:
    """Return the communicator of a number.

    Raises:
        ValueError: there is none, or no longer.
        TypeError: the number is that of ranks of several nodes.
    """
    found = communicator_of(number)
    if not isinstance(found, Communicator):
        raise TypeError("sidelane: this operator needs a communicator of one node, not ranks of several")
    return found


def communicator_of(number: int) -> Communicator | ScaleOut:
    """Return what a number stands for. Raises ValueError as :func:`communicator`."""
    found = _communicators.get(int(number))  # of a graph with dynamic shapes it may be a SymInt, which no dict takes
    if found is None or number_of not in found.cache:
        raise ValueError(f"sidelane: no open communicator has this number, see number_of (value={number})")
    return found


def result_lock(ranks: Communicator | ScaleOut) -> BufferLock:
    """Return the lock of operators that copy a result from where the next call, of another stream, puts its own."""
    comm = ranks if isinstance(ranks, Communicator) else ranks.intra_node
    return cached_object(comm, result_lock, lambda: buffer_lock(comm))


def _of_nodes(ranks: Communicator | ScaleOut, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a communicator, or the one of that name for the ranks of several nodes."""
    if isinstance(ranks, Communicator):
        return function
    from sidelane.ops import scale_out

    found: Callable[..., Any] = getattr(scale_out, function.__name__)
    return found


def operator(
    fake: Callable[..., Any], backward: Callable[..., Any] | None = None, saves: Callable[..., None] | None = None
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as an operator of PyTorch, under its name.

    Args:
        fake: function of the same arguments that returns results without content.
        backward: function that returns a gradient for each argument; None for no gradients.
        saves: function that keeps what ``backward`` needs.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        made = torch.library.custom_op(f"sidelane::{function.__name__}", function, mutates_args=())
        made.register_fake(fake)
        if backward is not None:
            made.register_autograd(backward, setup_context=saves)
        return made

    return register


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the communicator's number, and the tensors behind it."""
    ctx.comm = inputs[0]
    ctx.save_for_backward(*(one for one in inputs[1:] if isinstance(one, Tensor)))


def _product_like(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    _, for_x, for_weight = ctx.needs_input_grad
    return None, grad @ weight if for_x else None, grad.T @ x if for_weight else None


@operator(_product_like, _linear_backward, _saves)
def row_parallel_linear(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``all_reduce(x @ weight.T)`` of [T, K] and [M, K] by ``auto``: a GEMV up to 16 tokens, else a GEMM."""
    ranks, (tokens, columns), rows = communicator(comm), x.shape, weight.shape[0]
    if 1 <= tokens <= gemv.MOST_TOKENS:
        return gemv.gemv_all_reduce(ranks, weight, x.contiguous())
    if not 1 <= tokens * rows <= MOST_ELEMENTS:
        return gemv.unfused_gemv(ranks, weight, x)
    step = max(gemv.MOST_TOKENS, power_of_two(tokens) // 16)  # each shape keeps a workspace: at most 16 an octave
    padded = min(-(-tokens // step) * step, MOST_ELEMENTS // rows)
    filled, factor = in_rows(x), in_rows_or_columns(weight)
    if padded != tokens or not columns:
        filled = x.new_zeros(padded, max(1, columns))
        filled[:tokens, :columns] = x
    if not columns:
        factor = weight.new_zeros(rows, 1)
    with result_lock(ranks):
        return pipelined_gemm.gemm_all_reduce(ranks, filled, factor)[:tokens].clone()


def _norm_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.eps = inputs[4]
    ctx.save_for_backward(output[1], inputs[3])


def _norm_backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normal, of_normal = wide * scale, grad.float() * weight.float()
    of_total = scale * (of_normal - normal * (of_normal * normal).mean(-1, keepdim=True)) + grad_total.float()
    of_total = of_total.to(total.dtype)
    of_weight = (grad.float() * normal).sum(0).to(weight.dtype)
    return None, of_total, of_total.clone() if ctx.needs_input_grad[2] else None, of_weight, None


@operator(lambda comm, x, *_: (torch.empty_like(x), torch.empty_like(x)), _norm_backward, _norm_saves)
def all_reduce_rms_norm(
    comm: int, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See :func:`sidelane.ops.all_reduce_rms_norm`; more tokens than its limit are reduced and normalised unfused."""
    if x.shape[0] > rms_norm.MOST_TOKENS or not x.shape[0]:
        return rms_norm.unfused_norm(communicator(comm), x, residual, weight, eps=eps)
    return rms_norm.all_reduce_rms_norm(communicator(comm), x, residual, weight, eps=eps)


def _embedding_like(
    comm: int, tables: list[Tensor], indices: Tensor, offsets: Tensor, _: Any, mode: str, table_count: int, *__: Any
) -> Tensor:
    ranks = communicator_of(comm)
    batch = (offsets.shape[0] - 1) // len(tables)
    own = (batch + ranks.world_size - 1 - ranks.rank) // ranks.world_size
    return tables[0].new_empty(own, table_count * tables[0].shape[1])


def _embedding_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.comm, tables, indices, offsets, weights, ctx.mode, _, ctx.sparse = inputs
    ctx.is_weighted = weights is not None
    ctx.save_for_backward(indices, offsets, *([weights] if ctx.is_weighted else []), *tables)


def _embedding_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, offsets, *rest = ctx.saved_tensors
    weights, tables = (rest[0], rest[1:]) if ctx.is_weighted else (None, rest)
    if ctx.sparse:  # eager: no compiler takes tensors of rows
        options = {"mode": ctx.mode, "per_sample_weights": weights, "sparse": True}
        of_tables, of_weights = _backward_of_embedding(ctx.comm, grad, tables, indices, offsets, options)
        return None, of_tables, None, None, of_weights, None, None, None
    found = embedding_all_to_all_backward(ctx.comm, grad, tables, indices, offsets, weights, ctx.mode)
    of_weights = found[-1] if ctx.is_weighted else None
    return None, found[: len(tables)], None, None, of_weights, None, None  # torch omits attributes at their defaults


@operator(_embedding_like, _embedding_gradients, _embedding_saves)
def embedding_all_to_all(
    comm: int,
    tables: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
    table_count: int,
    sparse: bool = False,
) -> Tensor:
    """See :func:`sidelane.ops.embedding_all_to_all`; ``table_count`` is that of all ranks.

    ``sparse``: gradients of tables are those of rows, COO tensors that are not coalesced, for eager code only.
    """
    options: dict[str, Any] = {"mode": mode, "per_sample_weights": per_sample_weights}
    ranks = communicator_of(comm)
    call: Any = _of_nodes(ranks, embedding.embedding_all_to_all)
    with result_lock(ranks):
        found: Tensor = call(ranks, tables, indices, offsets, **options)
        return found.clone()


def _backward_of_embedding(
    comm: int, grad: Tensor, tables: list[Tensor], indices: Tensor, offsets: Tensor, options: dict[str, Any]
) -> tuple[list[Tensor], Tensor | None]:
    ranks = communicator_of(comm)
    call: Any = _of_nodes(ranks, embedding_backward.embedding_all_to_all_backward)
    found: tuple[list[Tensor], Tensor | None] = call(ranks, grad, tables, indices, offsets, **options)
    return found


def _gradients_like(
    comm: int, grad: Tensor, tables: list[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None, mode: str
) -> list[Tensor]:
    return [torch.empty_like(part) for part in (tables if weights is None else [*tables, weights])]


@operator(_gradients_like)
def embedding_all_to_all_backward(
    comm: int,
    grad: Tensor,
    tables: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
) -> list[Tensor]:
    """Return dense gradients of the tables, then that of the weights, if there are any."""
    options: dict[str, Any] = {"mode": mode, "per_sample_weights": per_sample_weights}
    found, of_weights = _backward_of_embedding(comm, grad, tables, indices, offsets, options)
    found = [part.clone() if part.untyped_storage().nbytes() > part.nbytes else part for part in found]  # no views
    return found if of_weights is None else [*found, of_weights]


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    _, for_x, for_weight = ctx.needs_input_grad
    of_all = all_gather_rows(ctx.comm, grad)
    return None, of_all @ weight if for_x else None, of_all.T @ x if for_weight else None


@operator(
    lambda comm, x, weight: x.new_empty(x.shape[0] // communicator(comm).world_size, weight.shape[0]),
    _reduce_scatter_backward,
    _saves,
)
def gemm_reduce_scatter(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's rows of the sum of ``x @ weight.T`` of [M, K] and [H, K]."""
    return pipelined_gemm.gemm_reduce_scatter(communicator(comm), in_rows(x), in_rows_or_columns(weight))


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    _, for_x, for_weight = ctx.needs_input_grad
    of_x = gemm_reduce_scatter(ctx.comm, grad, weight.T) if for_x else None
    return None, of_x, grad.T @ all_gather_rows(ctx.comm, x) if for_weight else None


@operator(
    lambda comm, x, weight: x.new_empty(x.shape[0] * communicator(comm).world_size, weight.shape[0]),
    _all_gather_backward,
    _saves,
)
def all_gather_gemm(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``all_gather(x) @ weight.T`` of [M, K] and [H, K]."""
    return pipelined_gemm.all_gather_gemm(communicator(comm), in_rows(x), in_rows_or_columns(weight))


@operator(lambda comm, x: x.new_empty(x.shape[0] * communicator(comm).world_size, x.shape[1]))
def all_gather_rows(comm: int, x: Tensor) -> Tensor:
    """Return the rows of all ranks, for gradients of weights."""
    gathered = x.new_empty(x.shape[0] * communicator(comm).world_size, x.shape[1])
    communicator(comm).all_gather(gathered, x.contiguous())
    return gathered


@operator(_product_like, _linear_backward, _saves)
def gemm_all_reduce(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of ``x @ weight.T`` of [M, K] and [H, K], on all ranks."""
    ranks = communicator(comm)
    with result_lock(ranks):
        result = pipelined_gemm.gemm_all_reduce(ranks, in_rows(x), in_rows_or_columns(weight))
        return result.clone()  # the next call writes into it


def _routed_like(comm: int, x: Tensor, weight: Tensor, counts: Tensor, most_rows: int) -> Tensor:
    return x.new_empty(most_rows, weight.shape[-2])


def _has_no_gradients(ctx: Any, *_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "gemm_all_to_all, all_to_all_gemm: tensors that require gradients (value=enabled, allowed=torch.no_grad()): "
        "dispatch_tokens, combine_tokens and a grouped product between them have gradients"
    )


@operator(_routed_like, _has_no_gradients, _has_no_gradients)
def gemm_all_to_all(comm: int, x: Tensor, weight: Tensor, counts: Tensor, most_rows: int) -> Tensor:
    """See :func:`sidelane.ops.gemm_all_to_all`; behind the rows that arrived are zeros. It has no gradients."""
    ranks = communicator(comm)
    with result_lock(ranks):
        came = gemm.gemm_all_to_all(ranks, in_rows(x), in_rows(weight), counts, most_rows=most_rows)
        return _with_zeros(came, counts[:, ranks.rank].sum())


@operator(_routed_like, _has_no_gradients, _has_no_gradients)
def all_to_all_gemm(comm: int, x: Tensor, weight: Tensor, counts: Tensor, most_rows: int) -> Tensor:
    """See :func:`sidelane.ops.all_to_all_gemm`; behind the results are zeros. It has no gradients."""
    ranks = communicator(comm)
    found = dispatch_gemm.all_to_all_gemm(ranks, in_rows(x), in_rows(weight), counts, most_rows=most_rows)
    return _with_zeros(found, counts[:, ranks.rank].sum())


def _resharded_like(
    comm: int, tensors: list[Tensor], scatter_dim: int, gather_dim: int, lengths: list[int]
) -> list[Tensor]:
    ranks, found = communicator(comm), []
    for tensor, length in zip(tensors, lengths, strict=True):
        shape = [*tensor.shape]
        shape[scatter_dim] = (shape[scatter_dim] + ranks.world_size - 1 - ranks.rank) // ranks.world_size
        shape[gather_dim] = length
        found.append(tensor.new_empty(shape))
    return found


def _reshard_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.comm, tensors, ctx.scatter_dim, ctx.gather_dim, _ = inputs
    ctx.lengths = [tensor.shape[ctx.scatter_dim] for tensor in tensors]


def _reshard_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return None, reshard(ctx.comm, grads, ctx.gather_dim, ctx.scatter_dim, ctx.lengths), None, None, None


@operator(_resharded_like, _reshard_backward, _reshard_saves)
def reshard(comm: int, tensors: list[Tensor], scatter_dim: int, gather_dim: int, lengths: list[int]) -> list[Tensor]:
    """See :func:`sidelane.ops.reshard`; ``lengths``: those of ``gather_dim`` in each result."""
    results = _resharded_like(comm, tensors, scatter_dim, gather_dim, lengths)
    given = [tensor.contiguous().resolve_conj().resolve_neg() for tensor in tensors]
    communicator(comm).all_to_all(results, given, scatter_dim=scatter_dim, gather_dim=gather_dim)
    return results


def _with_zeros(rows: Tensor, count: Tensor) -> Tensor:
    """Return rows in memory of the caller's own, with zeros behind so many."""
    is_there = torch.arange(rows.shape[0], device=rows.device) < count
    return torch.where(is_there[:, None], rows, torch.zeros_like(rows))

"""Fused operators as operators of PyTorch (``torch.ops.sidelane``): with autograd, and whole under ``torch.compile``.

An operator of PyTorch cannot take a communicator, so that it takes the number that :func:`number_of` gives. Gradients
follow the convention of tensor-parallel layers: what all ranks get alike, a result that was added up, has a gradient
that all ranks have alike, and nothing is communicated for it. Results are memory of the caller's own.

A compiled graph keeps the order of these calls as it is the same graph on every rank; ranks that compile different
programs around them may differ in it, which ends in a MismatchError.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from sidelane.collectives import Communicator
from sidelane.ops import embedding, embedding_backward, gemv, reference, rms_norm

_numbers = itertools.count(1)
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def number_of(comm: Communicator) -> int:
    """By which the operators know a communicator, in this process."""
    number: int | None = comm.kept.get(number_of)
    if number is None:
        number = comm.kept[number_of] = next(_numbers)
        _communicators[number] = comm
    return number


def communicator(number: int) -> Communicator:
    """The other way round. Raises ValueError if there is none, or no longer."""
    found = _communicators.get(number)
    if found is None or number_of not in found.kept:
        raise ValueError(f"sidelane: communicator (value={number}, allowed=number_of one that is open)")
    return found


@torch.library.custom_op("sidelane::row_parallel_linear", mutates_args=())
def row_parallel_linear(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    """``all_reduce(x @ weight.T)`` of [T, K] and [M, K]: fused for up to 16 tokens, else one after the other."""
    if x.shape[0] > gemv.MOST_TOKENS or not x.shape[0]:
        return reference.gemv_all_reduce(communicator(comm), weight, x)
    return gemv.gemv_all_reduce(communicator(comm), weight, x.contiguous())


@row_parallel_linear.register_fake
def _(comm: int, x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    _, for_x, for_weight = ctx.needs_input_grad
    return None, grad @ weight if for_x else None, grad.T @ x if for_weight else None


row_parallel_linear.register_autograd(_linear_backward, setup_context=_linear_saves)


@torch.library.custom_op("sidelane::all_reduce_rms_norm", mutates_args=())
def all_reduce_rms_norm(
    comm: int, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See :func:`sidelane.ops.all_reduce_rms_norm`; more tokens than it takes go one after the other."""
    if x.shape[0] > rms_norm.MOST_TOKENS or not x.shape[0]:
        return reference.all_reduce_rms_norm(communicator(comm), x, residual, weight, eps=eps)
    return rms_norm.all_reduce_rms_norm(communicator(comm), x, residual, weight, eps=eps)


@all_reduce_rms_norm.register_fake
def _(comm: int, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


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


all_reduce_rms_norm.register_autograd(_norm_backward, setup_context=_norm_saves)


@torch.library.custom_op("sidelane::embedding_all_to_all", mutates_args=())
def embedding_all_to_all(
    comm: int,
    tables: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
    table_count: int,
) -> Tensor:
    """See :func:`sidelane.ops.embedding_all_to_all`; ``table_count`` is that of all ranks."""
    options: dict[str, Any] = {"mode": mode, "per_sample_weights": per_sample_weights}
    return embedding.embedding_all_to_all(communicator(comm), tables, indices, offsets, **options).clone()


@embedding_all_to_all.register_fake
def _(
    comm: int,
    tables: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
    table_count: int,
) -> Tensor:
    ranks = communicator(comm)
    batch = (offsets.shape[0] - 1) // len(tables)
    own = (batch + ranks.world_size - 1 - ranks.rank) // ranks.world_size
    return tables[0].new_empty(own, table_count * tables[0].shape[1])


@torch.library.custom_op("sidelane::embedding_all_to_all_backward", mutates_args=())
def embedding_all_to_all_backward(
    comm: int,
    grad: Tensor,
    tables: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
) -> list[Tensor]:
    """Dense gradients of the tables, then that of the weights, if there are any."""
    options: dict[str, Any] = {"mode": mode, "per_sample_weights": per_sample_weights}
    found, of_weights = embedding_backward.embedding_all_to_all_backward(
        communicator(comm), grad, tables, indices, offsets, **options
    )
    found = [part.clone() if part.untyped_storage().nbytes() > part.nbytes else part for part in found]  # no views
    return found if of_weights is None else [*found, of_weights]


@embedding_all_to_all_backward.register_fake
def _(
    comm: int,
    grad: Tensor,
    tables: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
) -> list[Tensor]:
    some = tables if per_sample_weights is None else [*tables, per_sample_weights]
    return [torch.empty_like(part) for part in some]


def _embedding_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.comm, tables, indices, offsets, weights, ctx.mode, _ = inputs
    ctx.is_weighted = weights is not None
    ctx.save_for_backward(indices, offsets, *([weights] if ctx.is_weighted else []), *tables)


def _embedding_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, offsets, *rest = ctx.saved_tensors
    weights, tables = (rest[0], rest[1:]) if ctx.is_weighted else (None, rest)
    found = embedding_all_to_all_backward(ctx.comm, grad, tables, indices, offsets, weights, ctx.mode)
    return None, found[: len(tables)], None, None, found[-1] if ctx.is_weighted else None, None, None


embedding_all_to_all.register_autograd(_embedding_gradients, setup_context=_embedding_saves)

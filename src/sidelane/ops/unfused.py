"""Unfused products next to a collective, in symmetric memory: the product is computed where the collective reads it, or
gathered where the product reads it. In ordinary memory the communicator would copy it there and back.

``reference`` has the same operators in ordinary memory, as PyTorch's users would write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import cast

import torch

from sidelane.ops import reference
from sidelane.ops.buffer_turn import BufferTurn, in_turn
from sidelane.ops.handle import is_captured, kept
from sidelane.ops.operands import apart_from
from sidelane.session import Communicator

MOST_SHAPES = 8
"""Largest number of shapes of an operator that have a buffer, since buffers stay: graphs may hold them. Further shapes
run in ordinary memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer of a shape. ``values``: [rows, columns] in symmetric memory. ``turn``: turns of its users."""

    values: torch.Tensor
    turn: BufferTurn


def prepare_unfused(comm: Communicator, op: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Make the buffer of a shape, if there is room for one more. Collective if the shape is new."""
    _buffer_of(comm, op, rows, columns, dtype)


def gemm_reduce_scatter(comm: Communicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Run ``x @ weight.T`` and a reduce-scatter of its rows; see :func:`sidelane.ops.gemm_reduce_scatter`."""
    buffer = _buffer_of(comm, "gemm_reduce_scatter", x.shape[0], weight.shape[0], x.dtype)
    if buffer is None:
        with torch.no_grad():
            return reference.gemm_reduce_scatter(comm, x, weight)
    with torch.no_grad(), buffer.turn:
        torch.mm(x, weight.t(), out=buffer.values)
        output = x.new_empty(x.shape[0] // comm.world_size, weight.shape[0])
        comm.reduce_scatter(output, buffer.values)
        return output


def gemm_all_reduce(comm: Communicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``all_reduce(x @ weight.T)``, which the next call of this shape overwrites; see
    :func:`sidelane.ops.gemm_all_reduce`.
    """
    buffer = _buffer_of(comm, "gemm_all_reduce", x.shape[0], weight.shape[0], x.dtype)
    if buffer is None:
        with torch.no_grad():
            return reference.gemm_all_reduce(comm, x, weight)
    with torch.no_grad(), buffer.turn:
        torch.mm(apart_from(buffer.values, x), weight.t(), out=buffer.values)
        comm.all_reduce(buffer.values)
        return buffer.values


def all_gather_gemm(comm: Communicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``all_gather(x) @ weight.T``; see :func:`sidelane.ops.all_gather_gemm`."""
    rows, depth = x.shape
    buffer = _buffer_of(comm, "all_gather_gemm", comm.world_size * rows, depth, x.dtype)
    if buffer is None:
        with torch.no_grad():
            return reference.all_gather_gemm(comm, x, weight)
    with torch.no_grad(), buffer.turn:
        own = buffer.values[comm.rank * rows : (comm.rank + 1) * rows].copy_(x)
        comm.all_gather(buffer.values, own)
        return reference.product(buffer.values, weight)


def _buffer_of(comm: Communicator, op: str, rows: int, columns: int, dtype: torch.dtype) -> _Buffer | None:
    """Return the buffer of a shape; None if it has none. Collective if the shape is new: shapes come in the same order
    on all ranks, so all have the same buffers.
    """
    buffers = cast("dict[Hashable, _Buffer]", kept(comm, (_buffer_of, op), dict))
    shape = rows, columns, dtype
    if shape not in buffers and len(buffers) < MOST_SHAPES and not is_captured(comm):
        with torch.inference_mode(False):
            buffers[shape] = _Buffer(comm.empty(rows, columns, dtype=dtype), in_turn(comm))
    return buffers.get(shape)

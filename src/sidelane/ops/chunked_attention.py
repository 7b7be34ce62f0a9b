"""Attention over a split sequence in chunks of heads: exchanges of other chunks run while one is computed.

With three chunks, each a part of every rank's heads, which copy engines move::

    copy engines   q, k, v of 0 | of 1     | of 2     | result of 0 | of 1     | of 2
    compute                     | attend 0 | attend 1 | attend 2    |          |

The backward pass is the same the other way round, last chunk first: gradients of the result go out, and those of q, k
and v come back. Every exchange is a call of its own, whose program is proved with its handshake for any number of
invocations (``program.resharding``): chunks have buffers of their own in symmetric memory, and calls use these again in
the order of the communicator. Peers store into them directly, since copies inside a GPU would wait for the attention; a
rank copies the heads that stay on it by kernels.

The dependencies of a chunk are *tokens*, empty tensors, so that autograd runs the exchanges of the backward pass in
an order that is the same on all ranks: that of its nodes, the latest first.

Legend: B, S, N as in ``attention.py``; G groups, and W elements of a group (or of its q, k or v), in a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidelane.collectives.work import Work
from sidelane.config import COMPUTE
from sidelane.ops.handle import buffer_lock, cached_object
from sidelane.program.resharding import even_parts
from sidelane.session import Communicator

_POSITIONS, _GROUPS = 1, 2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function from q, k and v of all positions, [B, S, groups, W], to the result, [B, S, groups, W]."""


def most_chunks(groups: int, world_size: int) -> int:
    """Return the largest number of chunks: each has a group of every rank."""
    return max(1, groups // world_size)


def head_chunks(groups: int, world_size: int, count: int) -> list[slice]:
    """Return the groups of each chunk: whole turns of the ranks, so that a rank has as many groups as without chunks.

    >>> [(chunk.start, chunk.stop) for chunk in head_chunks(11, 2, 3)]
    [(0, 4), (4, 8), (8, 11)]
    """
    turns = even_parts(groups // world_size, count)
    ends = accumulate((turn * world_size for turn in turns), initial=0)
    found = [slice(*pair) for pair in pairwise(ends)]
    return [*found[:-1], slice(found[-1].start, groups)]


class ChunkBuffers:
    """Buffers for the exchanges of one direction of one shape, in symmetric memory. Collective.

    Args:
        comm: communicator of the ranks.
        batch: B.
        length: S.
        groups: G.
        count: number of chunks.
        dtype: dtype of all tensors.
        widths: W of each tensor that is spread over the ranks by groups.
        results: W of each tensor that comes back.
    """

    def __init__(
        self,
        comm: Communicator,
        batch: int,
        length: int,
        groups: int,
        count: int,
        dtype: torch.dtype,
        widths: Sequence[int],
        results: Sequence[int],
    ) -> None:
        n, rank = comm.world_size, comm.rank
        self._comm, self._lock, self._serial = comm, buffer_lock(comm), 0
        self._whole: list[Tensor] = []
        self._coming: dict[int, Work] = {}
        self._going: list[Work] = []
        self._chunks = head_chunks(groups, n, count)
        positions = even_parts(length, n)
        first = sum(positions[:rank])
        self._own = slice(first, first + positions[rank])
        self._mine: list[slice] = []
        self._came: list[list[Tensor]] = []
        for chunk in self._chunks:
            parts = even_parts(chunk.stop - chunk.start, n)
            begin = chunk.start + sum(parts[:rank])
            self._mine.append(slice(begin, begin + parts[rank]))
            most = [comm.empty(batch * length * parts[0] * width, dtype=dtype) for width in widths]
            self._came.append(
                [
                    one[: batch * length * parts[rank] * width].view(batch, length, parts[rank], width)
                    for one, width in zip(most, widths, strict=True)
                ]
            )
        self._home = [
            comm.empty(batch * positions[0] * groups * width, dtype=dtype)[
                : batch * positions[rank] * groups * width
            ].view(batch, positions[rank], groups, width)
            for width in results
        ]

    def begin(self, whole: Sequence[Tensor], order: Sequence[int]) -> int:
        """Begin to send the groups of all chunks to their ranks, for a new call. Return its number.

        Args:
            whole: tensors to spread, [B, own positions, G, W].
            order: numbers of the chunks.
        """
        self._serial += 1
        self._whole, self._going = [tensor.contiguous() for tensor in whole], []
        self._lock.__enter__()
        self._coming = {
            number: self._exchange(
                self._came[number], [tensor[:, :, self._chunks[number]] for tensor in self._whole], _GROUPS, _POSITIONS
            )
            for number in order
        }
        return self._serial

    def take(self, call: int, number: int, *, keeps: bool) -> list[Tensor]:
        """Return all positions of this rank's groups of a chunk, in memory of the caller's own if it ``keeps`` them."""
        self._require(call)
        own, found = self._own, []
        for came, tensor in zip(self._came[number], self._whole, strict=True):
            filled = torch.empty_like(came) if keeps else came
            filled[:, own] = tensor[:, :, self._mine[number]]
            found.append(filled)
        self._coming.pop(number).wait()
        if keeps:
            for came, filled in zip(self._came[number], found, strict=True):
                for others in (slice(0, own.start), slice(own.stop, None)):
                    filled[:, others] = came[:, others]
        return found

    def give(self, call: int, number: int, computed: Sequence[Tensor]) -> Tensor:
        """Begin to send results of a chunk, [B, S, this rank's, W], to the ranks of their positions. Return a token."""
        self._require(call)
        places = [home[:, :, self._chunks[number]] for home in self._home]
        self._going.append(self._exchange(places, [tensor.contiguous() for tensor in computed], _POSITIONS, _GROUPS))
        for home, tensor in zip(self._home, computed, strict=True):
            home[:, :, self._mine[number]] = tensor[:, self._own]
        return computed[0].new_empty(0)

    def collect(self, call: int) -> list[Tensor]:
        """Return the results of all chunks, [B, own positions, G, W], in memory of the caller's own."""
        self._require(call)
        for work in self._going:
            work.wait()
        self._whole, self._going = [], []
        found = [home.clone() for home in self._home]
        self._lock.__exit__(None)
        return found

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], scatter: int, gather: int) -> Work:
        options: dict[str, Any] = {"scatter_dim": scatter, "gather_dim": gather, "copy_own_part": False}
        work = self._comm.all_to_all(list(outputs), list(inputs), **options, async_op=True, beside=COMPUTE)
        assert work is not None
        return work

    def _require(self, call: int) -> None:
        if call != self._serial:
            words = "a call in chunks began within another one of this shape, and has overwritten its buffers"
            raise RuntimeError(f"sequence_parallel_attention: {words} (value=chunks, allowed=chunks=1 for these two)")


class _Call:
    """One attention in chunks: the buffers of its direction under way, forward and later backward."""

    buffers: ChunkBuffers
    serial: int

    def __init__(self, comm: Communicator, count: int, length: int, given: Sequence[Tensor], result_width: int) -> None:
        self._comm, self._count = comm, count
        self._widths = tuple(tensor.shape[-1] for tensor in given), (result_width,)
        self._sizes = given[0].shape[0], length, given[0].shape[_GROUPS], count, given[0].dtype
        self.keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)

    def begin(self, whole: Sequence[Tensor], *, backward: bool) -> list[Tensor]:
        """Begin the exchanges of a direction. Return a token for each chunk."""
        key = (*self._sizes, *(self._widths[::-1] if backward else self._widths))
        self.buffers = cached_object(self._comm, (ChunkBuffers, *key), lambda: ChunkBuffers(self._comm, *key))
        numbers = range(self._count)
        self.serial = self.buffers.begin(whole, numbers[::-1] if backward else numbers)
        return [whole[0].new_empty(0) for _ in numbers]


def attend_in_chunks(
    comm: Communicator, count: int, length: int, given: Sequence[Tensor], result_width: int, attend: Attend
) -> Tensor:
    """Return this rank's positions of the attention, [B, own positions, G, W]. Collective; checked arguments.

    Args:
        comm: communicator of the ranks.
        count: number of chunks, 2 to :func:`most_chunks`.
        length: S; every rank has two positions or more.
        given: q, k and v of this rank's positions, [B, own positions, G, W].
        result_width: W of the result.
        attend: attention to all positions.
    """
    call, back = _Call(comm, count, length, given, result_width), []
    spread, take, give, collect = (getattr(each, "apply") for each in (_Spread, _Take, _Give, _Collect))  # noqa: B009
    for number, token in enumerate(spread(call, *given)):
        back.append(give(call, number, attend(*take(call, number, token))))
    result: Tensor = collect(call, *back)
    return result


class _Spread(torch.autograd.Function):
    """Sends q, k and v of all chunks; backward it collects their gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(call.begin(given, backward=False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.buffers.collect(ctx.call.serial)


class _Take(torch.autograd.Function):
    """Takes q, k and v of a chunk; backward it gives their gradients back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, number: int, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.number = call, number
        return tuple(call.buffers.take(call.serial, number, keeps=call.keeps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.call.buffers.give(ctx.call.serial, ctx.number, grads)


class _Give(torch.autograd.Function):
    """Gives the result of a chunk back; backward it takes its gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, number: int, computed: Tensor) -> Tensor:
        ctx.call, ctx.number = call, number
        return call.buffers.give(call.serial, number, [computed])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.call.buffers.take(ctx.call.serial, ctx.number, keeps=False)


class _Collect(torch.autograd.Function):
    """Collects the results of all chunks; backward it sends their gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tokens: Tensor) -> Tensor:
        ctx.call = call
        (result,) = call.buffers.collect(call.serial)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.begin(grads, backward=True)

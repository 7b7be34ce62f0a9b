"""Ring attention: blocks of keys and values travel by copy engines behind the attention of the block before.

B: batch, S: positions of a rank, H: heads of q, K: heads of k and v, D: size of a head, N: ranks.

At turn t a rank attends to the block of the rank t places before it (Liu et al., "Ring Attention with Blockwise
Transformers", 2023), which that rank itself sends; two inboxes take turns::

    copy engine   block 1        | block 2          | block 3
    compute       the own block  | attend to 1      | attend to 2      | attend to 3

Results of blocks are merged by the logarithms of the sums of their exponentials. Backward, blocks come again, and each
rank sends what it finds for another one's keys and values to that rank, which adds it up in the order of turns::

    copy engine   block 1        | block 2          | of 1 | block 3   | of 2 |       ...
    compute       the own block  | gradients with 1        | with 2           | with 3, add up that of 1, ...

Under a causal mask a rank needs only the beginning of most blocks, or none, and only that is sent (:func:`part_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sidelane.collectives.work import Work
from sidelane.ops.buffer_turn import in_turn
from sidelane.ops.handle import compare_shapes, is_captured, kept
from sidelane.ops.operands import in_rows
from sidelane.program.collective import split_evenly
from sidelane.program.rotation import rotation_program
from sidelane.session import BoundProgram, Communicator

PLAIN, ZIGZAG = ORDERS = "plain", "zigzag"
"""Orders of positions on ranks; see ``attention.sequence_positions``."""

MOST_SHAPES = 8
"""Number of shapes that a communicator keeps, besides those in graphs. The least recently used goes first."""

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_SIZES, _CUDNN_SIZES = range(8, 257, 8), range(8, 129, 8)
"""Dtypes, and sizes of a head, that kernels take as they are, backward too."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a rank's queries and of a block that attend to each other.

    Attributes:
        first: number of the first query; all behind it are in the part.
        count: number of positions at the beginning of the block.
        is_causal: the query of number i attends to positions up to i.
    """

    first: int
    count: int
    is_causal: bool = False


def own_length(length: int, world_size: int, rank: int, order: str) -> int:
    """Return the number of a rank's positions, by arithmetic that compilers trace with unknown lengths.

    >>> [own_length(10, 2, rank, PLAIN) for rank in range(2)], [own_length(13, 2, rank, ZIGZAG) for rank in range(2)]
    ([5, 5], [7, 6])
    """
    if order == PLAIN:
        return (length + world_size - 1 - rank) // world_size
    parts = 2 * world_size
    return (length + parts - 1 - rank) // parts + (length + rank) // parts


def part_of(order: str, is_causal: bool, length: int, world_size: int, rank: int, source: int) -> Part:
    """Return what a rank's queries have to do with the block of another one.

    >>> def show(rank, source):
    ...     return dataclasses.astuple(part_of(ZIGZAG, True, 16, 2, rank, source))
    >>> show(0, 0), show(0, 1), show(1, 0)
    ((0, 8, True), (4, 8, False), (0, 4, False))
    """
    first, count = 0, own_length(length, world_size, source, order)
    if is_causal and rank != source:
        if order == PLAIN:
            count = count if source < rank else 0
        elif source < rank:  # its late positions come behind all of this rank's
            count = split_evenly(length, 2 * world_size)[source]
        else:  # this rank's early positions come before all of its
            first = split_evenly(length, 2 * world_size)[rank]
    return Part(
        first, count if first < own_length(length, world_size, rank, order) else 0, is_causal and rank == source
    )


@dataclasses.dataclass(frozen=True)
class RingShape:
    """The shape of ring attention, the same on all ranks; the fields are those of the operator.

    Attributes:
        length: number of positions of all ranks.
        batch: B.
        heads: K.
        size, value_size: sizes of a head of k, and of v.
        dtype: dtype of q, k and v.
        order: order of positions, of :data:`ORDERS`.
        is_causal: there is a causal mask.
    """

    length: int
    batch: int
    heads: int
    size: int
    value_size: int
    dtype: torch.dtype
    order: str
    is_causal: bool


def ring_of(comm: Communicator, shape: RingShape) -> RingAttention:
    """Return the buffers and programs for a shape; all ranks make them together on first use.

    Ranks use shapes in the same order, and so let go of the same ones.
    """
    compare_shapes(comm, "ring_attention", shape)
    rings: dict[RingShape, RingAttention] = kept(comm, RingAttention, dict)
    captured, found = is_captured(comm), rings.pop(shape, None)
    if found is None:
        if not captured:
            outside = [one for one, ring in rings.items() if not ring.is_in_graph]
            for least_recent in outside[: max(0, len(outside) + 1 - MOST_SHAPES)]:
                rings.pop(least_recent).close()
        with torch.inference_mode(False):
            found = RingAttention(comm, shape)
    found.is_in_graph |= captured
    rings[shape] = found
    return found


class RingAttention:
    """Buffers and programs of ring attention for a shape. Collective.

    A block is [positions, B, K, size + value_size], so that its first positions are its first bytes.

    Args:
        comm: communicator of the ranks.
        shape: the shape.

    Attributes:
        is_in_graph: a graph has captured a call, and may be replayed at any time.
    """

    is_in_graph = False

    def __init__(self, comm: Communicator, shape: RingShape) -> None:
        self._comm, self._shape = comm, shape
        n = comm.world_size
        self._lengths = [own_length(shape.length, n, rank, shape.order) for rank in range(n)]
        self._row = shape.batch, shape.heads, shape.size + shape.value_size
        self._sum_dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
        self._own, *self._inboxes = (self._buffer() for _ in range(3))
        self._rotations = [
            self._load(turn, [self._part(rank, turn).count for rank in range(n)], self._own, self._inboxes)
            for turn in range(1, n)
        ]
        self._backs: list[BoundProgram] = []
        self._outboxes: list[Tensor] = []
        self._returned: list[Tensor] = []
        self._in_turn = in_turn(comm)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the attention of this rank's queries, [B, S, H, value_size], and the logarithms, [B, H, S]."""
        query = in_rows(q).transpose(1, 2)
        total = query.new_zeros(*query.shape[:3], self._shape.value_size, dtype=self._sum_dtype)
        logarithms = total.new_full(query.shape[:3], -torch.inf)
        with torch.no_grad(), _as_it_is(q), self._in_turn:
            self._fill(k, v)
            for turn, part, block in self._blocks():
                if part.count and query.numel():
                    key, value = self._keys_and_values(block, part)
                    found, logarithm = attend(query[:, :, part.first :], key, value, part.is_causal, scale)
                    _merge(total[:, :, part.first :], logarithms[:, :, part.first :], found, logarithm, turn == 0)
        return _copy(total.transpose(1, 2), q.dtype), logarithms

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, logarithms: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; ``result`` and ``logarithms`` are those of :meth:`forward`."""
        query, result, grad = (in_rows(tensor).transpose(1, 2) for tensor in (q, result, grad))
        of_query = torch.zeros_like(query, dtype=self._sum_dtype)
        of_block = self._own.new_zeros(self._lengths[self._comm.rank], *self._row, dtype=self._sum_dtype)
        with torch.no_grad(), _as_it_is(q), self._in_turn:
            if not self._outboxes:
                self._make_backs()
            self._fill(k, v)
            sent: Work | None = None
            for turn, part, block in self._blocks():
                if part.count and query.numel():
                    rows = slice(part.first, None)
                    found = gradients(
                        *(grad[:, :, rows], query[:, :, rows], result[:, :, rows], logarithms[:, :, rows]),
                        *self._keys_and_values(block, part),
                        is_causal=part.is_causal,
                        scale=scale,
                    )
                    of_query[:, :, rows] += found[0]
                    target = of_block if turn == 0 else self._outboxes[turn % 2]
                    for place, of_one in zip(self._keys_and_values(target, part), found[1:], strict=True):
                        place.copy_(of_one)
                if turn:
                    work = self._backs[turn - 1](async_op=True)
                    self._add(of_block, turn - 1, sent)
                    sent = work
            self._add(of_block, self._comm.world_size - 1, sent)
        of_both = self._keys_and_values(of_block, self._part(self._comm.rank, 0))
        of_q, of_k, of_v = (_copy(tensor.transpose(1, 2), q.dtype) for tensor in (of_query, *of_both))
        return of_q, of_k, of_v

    def close(self) -> None:
        """Release programs and buffers, once this rank's calls have ended."""
        for program in (*self._rotations, *self._backs):
            program.close()

    def _blocks(self) -> Iterator[tuple[int, Part, Tensor]]:
        """Iterate over turns, parts and blocks; the next block travels while the caller computes with one."""
        comm, work = self._comm, None
        for turn in range(comm.world_size):
            if work is not None:
                work.wait()
            if turn + 1 < comm.world_size:
                work = self._rotations[turn](async_op=True)
            yield turn, self._part(comm.rank, turn), self._inboxes[turn % 2] if turn else self._own

    def _add(self, of_block: Tensor, turn: int, work: Work | None) -> None:
        """Add what came back at a turn."""
        if work is None:
            return
        work.wait()
        n = self._comm.world_size
        count = self._part((self._comm.rank + turn) % n, turn).count
        of_block[:count] += self._returned[turn % 2][:count]

    def _make_backs(self) -> None:
        n = self._comm.world_size
        self._returned = [self._buffer() for _ in range(2)]
        self._outboxes = [self._buffer() for _ in range(2)]
        for turn in range(1, n):
            counts = [self._part((rank + turn) % n, turn).count for rank in range(n)]
            self._backs.append(self._load(-turn, counts, self._outboxes[turn % 2], self._returned))

    def _load(self, turn: int, counts: Sequence[int], sent: Tensor, inboxes: Sequence[Tensor]) -> BoundProgram:
        row_bytes = self._own[0].nbytes if len(self._own) else 0
        program = rotation_program(turn, [count * row_bytes for count in counts], self._own.nbytes)
        return self._comm.load(program, {"sent": sent, "came": inboxes[turn % 2]})

    def _buffer(self) -> Tensor:
        return self._comm.empty(max(self._lengths), *self._row, dtype=self._shape.dtype)

    def _part(self, rank: int, turn: int) -> Part:
        shape, n = self._shape, self._comm.world_size
        return part_of(shape.order, shape.is_causal, shape.length, n, rank, (rank - turn) % n)

    def _fill(self, k: Tensor, v: Tensor) -> None:
        own = Part(0, self._lengths[self._comm.rank])
        for place, given in zip(self._keys_and_values(self._own, own), (k, v), strict=True):
            place.copy_(given.transpose(1, 2))

    def _keys_and_values(self, block: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Return views [B, K, count, size] of a block's keys and values."""
        rows = block[: part.count].permute(1, 2, 0, 3)
        return rows[..., : self._shape.size], rows[..., self._shape.size :]


def _as_it_is(tensor: Tensor) -> torch.autocast:
    """Keep autocast from rounding: the operator has the dtype of its tensors, and sums that are wider."""
    return torch.autocast(tensor.device.type, enabled=False)


def _merge(total: Tensor, logarithms: Tensor, found: Tensor, logarithm: Tensor, is_first: bool) -> None:
    """Add the attention to a block to that of the blocks before, in place."""
    if is_first:
        total.copy_(found)
        logarithms.copy_(logarithm)
        return
    weight = torch.sigmoid(logarithm - logarithms)
    total.lerp_(found.to(total.dtype), weight.unsqueeze(-1))
    logarithms.copy_(torch.logaddexp(logarithms, logarithm))


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention to a block, and the logarithms of the sums of exponentials.

    Args:
        query: tensor [B, H, S, D].
        key: tensor [B, K, positions, D].
        value: tensor [B, K, positions, size].
        is_causal: the query of number i attends to positions up to i.
        scale: factor of the products.

    Returns:
        Tensors [B, H, S, size] and [B, H, S].
    """
    kernel, aten, given = kernel_for(query, key, value, is_causal, scale), torch.ops.aten, (query, key, value)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        found = aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, is_causal, False, scale=scale)
        return found[0], found[1].squeeze(-1)
    if kernel == SDPBackend.FLASH_ATTENTION:
        found = aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]
    products = _products(query, key, is_causal, scale)
    logarithms = products.logsumexp(-1)
    weights = (products - logarithms.unsqueeze(-1)).exp()
    return (weights @ _wide(value).unsqueeze(2)).flatten(1, 2), logarithms.flatten(1, 2)


def gradients(
    grad: Tensor,
    query: Tensor,
    result: Tensor,
    logarithms: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that a block gives query, key and value.

    ``result`` and ``logarithms`` are those of all blocks; shapes are those of :func:`attend`.
    """
    kernel, aten = kernel_for(query, key, value, is_causal, scale), torch.ops.aten
    given, lengths = (grad, query, key, value, result), (None, None, query.shape[2], key.shape[2])
    found: tuple[Tensor, Tensor, Tensor]
    # Without dropout the state of its generator is not read. None: no bias, and no parts of several lengths.
    if kernel == SDPBackend.CUDNN_ATTENTION:
        state = torch.empty((), dtype=torch.int64, device=query.device)
        found = aten._scaled_dot_product_cudnn_attention_backward(
            *(*given, logarithms.unsqueeze(-1).contiguous(), state, state, None, *lengths, 0.0, is_causal), scale=scale
        )
        return found
    if kernel == SDPBackend.FLASH_ATTENTION:
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            *(*given, logarithms.contiguous(), *lengths, 0.0, is_causal, state, state[0]), scale=scale
        )
        return found
    sharing = query.shape[1] // key.shape[1]
    grad, result, taken = (_wide(tensor).unflatten(1, (-1, sharing)) for tensor in (grad, result, query))
    weights = (_products(query, key, is_causal, scale) - logarithms.unflatten(1, (-1, sharing)).unsqueeze(-1)).exp()
    of_value = (weights.transpose(-1, -2) @ grad).sum(2)
    of_weights = grad @ _wide(value).unsqueeze(2).transpose(-1, -2)
    of_products = scale * weights * (of_weights - (grad * result).sum(-1, keepdim=True))
    of_query = (of_products @ _wide(key).unsqueeze(2)).flatten(1, 2)
    return of_query, (of_products.transpose(-1, -2) @ taken).sum(2), of_value


def _products(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return the scaled products of queries and keys, [B, K, H / K, S, positions], wide, -inf where masked."""
    taken = _wide(query).unflatten(1, (key.shape[1], -1))
    products: Tensor = scale * taken @ _wide(key).unsqueeze(2).transpose(-1, -2)
    if is_causal:
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).triu(1)
        products.masked_fill_(later, -torch.inf)
    return products


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor in memory of its own."""
    made: Tensor = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return made


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def kernel_for(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> SDPBackend:
    """Return what computes a block: cuDNN's attention where PyTorch would choose it, else flash attention where there
    is one for this dtype and size, else plain products, which hold the weights of a block in memory.
    """
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in _HALVES or size not in _FLASH_SIZES or value.shape[-1] != size:
        return SDPBackend.MATH
    shares = query.shape[1] > key.shape[1]
    options = (None, 0.0, is_causal)
    chosen = SDPBackend(torch._fused_sdp_choice(query, key, value, *options, scale=scale, enable_gqa=shares))
    if chosen == SDPBackend.CUDNN_ATTENTION and size in _CUDNN_SIZES:  # not "is": the call makes another object
        return chosen
    return SDPBackend.FLASH_ATTENTION if torch.backends.cuda.is_flash_attention_available() else SDPBackend.MATH

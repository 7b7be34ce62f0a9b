# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""combine_attention: the merge of attention over parts of the context, for decode context parallelism.

Each rank has attended to its part of the keys and values, for all heads, and gets the merged result of its own heads.

Equivalent: all-gather of ``lse``, ``partial`` times ``exp(lse - lse of all)``, and a reduce-scatter of its heads; here
one exchange of words that carry their own readiness (``device/flagged.py``), in one kernel without barriers::

    rank 0   rows of the others' heads, each with its lse -> cells of their owners | wait for rows of own heads -> merge
    rank 1   rows of the others' heads, each with its lse -> cells of their owners | wait for rows of own heads -> merge

A row is a head of a token. Two places for each sender, for even and odd generations, are enough (``kernels/ll.py``):
every rank has heads, so that it waits for rows of every other one in each launch. Cells are 0 before the first launch.

Legend: N ranks; T tokens, MT most tokens of the handle; H heads, HM of a rank at most; D elements of a row; W words of
4 bytes of a row, followed by the word of its lse, in P lanes; PITCH cells from row to row, an even number, so that they
are stored in pairs. ``partial`` int32 [T, H, W], ``lse`` float32 [T, H] with any strides, ``output`` int32 [T, heads of
the rank, W], ``output_lse`` float32 [T, heads of the rank]; ``cells`` int64 [2, N, MT, HM, PITCH]. ONE if no block has
more than one row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.device.context import begin_of, end_relaxed
from sidelane.device.flagged import put_flagged_relaxed, wait_flagged_relaxed
from sidelane.device.language import real
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import DTYPES
from sidelane.kernels.ll import elements_of, words_of
from sidelane.ops.handle import (
    FLOATS,
    KernelHandle,
    cached_object,
    check_tensor,
    compare_shapes,
    power_of_two,
    programs_of,
    register_limit,
)
from sidelane.ops.operands import apart_from
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall, ProblemSizes
from sidelane.program.resharding import even_parts
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "combine_attention"
MOST_TOKENS = 4096
MOST_ROW_BYTES = 8 << 10

CELLS_ELEMENTS = 8 << 20
"""Largest number of elements of ``partial`` that ``auto`` sends in cells: 64 tokens of 128 heads of 512 are half."""

PROGRAMS_A_UNIT = 16
"""Programs of one warp on a compute unit: all of a grid are there at once, since they wait for each other."""

_ARGUMENT_INDICES = 4, 5, 6, 7
"""Positions of both outputs, partial and lse among the kernel's arguments behind the context."""


def _too_large(sizes: ProblemSizes) -> str:
    return (
        ""
        if math.prod(sizes) <= CELLS_ELEMENTS
        else f"fused takes up to {CELLS_ELEMENTS} elements of the partial result"
    )


OPERATOR = FusedOperator(NAME, ("tokens", "heads", "elements of a head"), has_sum=True, too_large=_too_large)


class CombineAttention(KernelHandle):
    """Cells of :func:`combine_attention` for one shape. Collective: alike on all ranks.

    Args:
        comm: communicator of the ranks.
        tokens: largest number of tokens of a call.
        heads: number of heads of all ranks.
        size: number of elements of a head.
        dtype: dtype of partial results: float32, float16 or bfloat16.
    """

    def __init__(self, comm: Communicator, tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
        self.comm, self.tokens = comm, tokens
        self.heads_each = -(-heads // comm.world_size)
        words = size * dtype.itemsize // 4
        pitch = (words + 2) // 2 * 2  # cells in pairs are stored at once
        self.programs = programs_of(comm, tokens * self.heads_each, PROGRAMS_A_UNIT)
        self.options = {
            "N": comm.world_size,
            "HM": self.heads_each,
            "W": words,
            "P": power_of_two(words + 1),
            "PITCH": pitch,
            "ELEMENT_BYTES": dtype.itemsize,
            "DTYPE": real(DTYPES[str(dtype).removeprefix("torch.")]),
            "num_warps": 1,
            **register_limit(128, 1, PROGRAMS_A_UNIT),
        }
        self.cells = comm.empty(2 * comm.world_size * tokens * self.heads_each * pitch, dtype=torch.int64)
        self.cells.zero_()
        self.kernel = comm.load_kernel(_combine, flags=0)
        self._counters, self._addresses = self.kernel.counters, comm.peers(self.cells)  # before any capture
        comm.barrier()  # all cells are 0 before any is written

    def run(
        self,
        repeated: RepeatedLaunch | None,
        partial: Tensor,
        lse: Tensor,
        out: Tensor | None,
        out_lse: Tensor | None,
        base: float,
    ) -> tuple[Tensor, Tensor]:
        """Run the operator with checked arguments. ``repeated``: launch of calls with these layouts and base."""
        comm, (tokens, heads, size) = self.comm, partial.shape
        own = even_parts(heads, comm.world_size)[comm.rank]
        if out is None:
            out = partial.new_empty(tokens, own, size)
        elif (other := apart_from(out, partial)) is not partial:
            partial, repeated = other, None
        if out_lse is None:
            out_lse = lse.new_empty(tokens, own)
        elif (other := apart_from(out_lse, lse)) is not lse:
            lse, repeated = other, None
        tensors = out, out_lse, partial, lse
        if self._repeats(repeated, tensors):
            return out, out_lse
        rows = tokens * self.heads_each
        programs = min(self.programs, rows)
        self.kernel.launch(
            (programs,),
            self._counters,
            comm.rank,
            self._addresses,
            self.cells,
            out.view(-1).view(torch.int32),
            out_lse,
            partial.view(-1).view(torch.int32),
            lse,
            tokens,
            heads,
            *lse.stride(),
            self.tokens,
            math.log(base),
            repeated=None if repeated is None else (repeated, tensors),
            alike=f"{tokens} tokens",
            ONE=rows <= programs,
            **self.options,
        )
        return out, out_lse


def combine_attention(
    comm: Communicator,
    partial: Tensor,
    lse: Tensor,
    *,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
    base: float = math.e,
    method: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Merge the attention of all ranks to their parts of the context, for the heads of this rank. A call, no gradients.

    With ``w_i = base ** lse_i`` of rank i, the result is ``sum(w_i * partial_i) / sum(w_i)``, and its lse
    ``log(sum(w_i), base)``: in float32, in the order of the ranks, rounded once. The first call of a shape makes its
    resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        partial: attention of all heads to this rank's part of the context, [T, H, D]: float32, float16 or bfloat16. It
            is copied if it is not contiguous, or at no multiple of 4 bytes. T is the same on all ranks: a rank on which
            it changes compares it with its peers' hosts. H is N or more, and need not be a multiple of N.
        lse: logarithm of the sum of exponentials of each row, float32, [T, H], with any strides. -inf, inf and NaN
            say that there was nothing to attend to: the row is not read.
        out: tensor for the result, contiguous, at a multiple of 4 bytes; None makes one.
        out_lse: tensor for its lse, contiguous; None makes one.
        base: base of the logarithms, which FlashAttention has as e and FlashInfer as 2.
        method: ``fused`` (rows of whole words of 4 bytes, up to 8 KB), ``unfused`` (an all-to-all, and a merge by
            PyTorch), or ``auto``: unfused if that was measured to be faster (``ops.explain``), ``partial`` has more
            than 8,388,608 elements, or the ranks are CPU ranks without Triton's interpreter.

    Returns:
        Tensors [T, h, D] and [T, h] of this rank's h heads, those of ``torch.tensor_split``. A row without anything to
        attend to on any rank is 0, and its lse -inf.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        _check(comm, partial, lse, out, out_lse, base)
        tokens, heads, size = partial.shape
        most, row_bytes = power_of_two(tokens), size * partial.itemsize
        key = NAME, most, heads, size, partial.dtype
        is_whole = row_bytes % 4 == 0 and 4 <= row_bytes <= MOST_ROW_BYTES
        if method == FUSED and not is_whole:
            raise ValueError(
                f"{NAME}: bytes of a row of a fused call (value={row_bytes}, allowed=multiples of 4 in "
                f"4..{MOST_ROW_BYTES})"
            )

        def fused(pieces: int) -> CachedLaunch:
            handle = cached_object(comm, key, lambda: CombineAttention(comm, most, heads, size, partial.dtype))
            return functools.partial(handle.run, RepeatedLaunch(_ARGUMENT_INDICES))

        make: dict[str, Callable[[int], CachedLaunch]] = {
            FUSED: fused,
            UNFUSED: lambda pieces: functools.partial(_unfused, comm),
        }
        return OperatorCall(key, (most, heads, size), partial.itemsize, make, () if is_whole else (FUSED,))

    misaligned = isinstance(out, Tensor) and out.data_ptr() % 4  # it is refused, whatever was called before
    launch = OPERATOR.launch(comm, (base, misaligned), (partial, lse, out, out_lse), check, method)
    compare_shapes(comm, NAME, tuple(partial.shape))
    is_plain = partial.is_contiguous() and partial.data_ptr() % 4 == 0
    found: tuple[Tensor, Tensor] = launch(
        partial if is_plain else partial.clone(memory_format=torch.contiguous_format), lse, out, out_lse, base
    )
    return found


def _unfused(
    comm: Communicator, partial: Tensor, lse: Tensor, out: Tensor | None, out_lse: Tensor | None, base: float
) -> tuple[Tensor, Tensor]:
    """Exchange rows and merge them, of checked arguments."""
    with torch.no_grad():  # as the kernel
        (tokens, heads, size), n = partial.shape, comm.world_size
        own = even_parts(heads, n)[comm.rank]
        came = partial.new_empty(n, tokens, own, size), lse.new_empty(n, tokens, own, 1)
        given = [partial.detach()[None], lse.detach().contiguous()[None, :, :, None]]
        comm.all_to_all(list(came), given, scatter_dim=2, gather_dim=0)
        found = came[1].nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        of_rows = found if base == math.e else found * math.log(base)
        weights = of_rows.softmax(0)  # NaN where no rank has anything
        merged = torch.where(weights > 0, came[0] * weights, 0).sum(0)
        total = functools.reduce(torch.logaddexp, of_rows.unbind(0))[..., 0]
        result, of_result = merged.to(partial.dtype), total if base == math.e else total / math.log(base)
        return result if out is None else out.copy_(result), of_result if out_lse is None else out_lse.copy_(of_result)


def _check(comm: Communicator, partial: object, lse: object, out: object, out_lse: object, base: object) -> None:
    partial = check_tensor(NAME, "partial", partial, comm.device, FLOATS, (3,))
    lse = check_tensor(NAME, "lse", lse, comm.device, (torch.float32,), (2,))
    (tokens, heads, size), n = partial.shape, comm.world_size
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{NAME}: tokens (value={tokens}, allowed=1..{MOST_TOKENS})")
    if heads < n or not size:
        raise ValueError(f"{NAME}: heads, and elements of a head (value={heads}, {size}, allowed={n} and more, 1)")
    if lse.shape != partial.shape[:2]:
        raise ValueError(f"{NAME}: shape of lse (value={tuple(lse.shape)}, allowed={(tokens, heads)})")
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base < math.inf:
        raise ValueError(f"{NAME}: base (value={base!r}, allowed=a number above 1: e, 2)")
    own = even_parts(heads, n)[comm.rank]
    for name, given, shape, dtype in (
        ("out", out, (tokens, own, size), partial.dtype),
        ("out_lse", out_lse, (tokens, own), torch.float32),
    ):
        if given is None:
            continue
        tensor = check_tensor(NAME, name, given, comm.device, (dtype,), (len(shape),))
        for is_right, what, value, allowed in (
            (tensor.shape == shape, "shape", tuple(tensor.shape), shape),
            (tensor.is_contiguous(), "strides", tensor.stride(), torch.empty(shape, device="meta").stride()),
            (tensor.data_ptr() % 4 == 0, "address", hex(tensor.data_ptr()), "multiples of 4"),
        ):
            if not is_right:
                raise ValueError(f"{NAME}: {what} of {name} (value={value}, allowed={allowed})")


@triton.jit
def _combine(
    context, counters, rank, cells_of, cells, output, output_lse, partial, lse,
    tokens, heads, lse_token, lse_head, most_tokens, log_base,
    N: tl.constexpr, HM: tl.constexpr, W: tl.constexpr, P: tl.constexpr, PITCH: tl.constexpr, ONE: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
):  # fmt: skip
    generation = begin_of(counters)
    lane = tl.arange(0, P)
    turns = 1 if ONE else tl.cdiv(tokens * HM - tl.program_id(0), tl.num_programs(0))
    sent = ((generation & 1) * N + rank).to(tl.int64) * most_tokens * HM * PITCH
    for turn in range(turns):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        token, member = row // HM, row % HM
        for hop in tl.static_range(1, N):
            peer = (rank + hop) % N
            first, count = _heads_of(peer, heads, N)
            limit = _lanes_of(member, count, PITCH)
            words = _row_with_lse(partial, lse, token, first + member, heads, lse_token, lse_head, lane, limit, W)
            put_flagged_relaxed(cells_of, peer, sent + row * PITCH + lane, words, generation, lane < limit, True)

    end_relaxed(counters, generation)
    first, count = _heads_of(rank, heads, N)
    for turn in range(turns):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        token, member = row // HM, row % HM
        limit = _lanes_of(member, count, PITCH)
        total = tl.zeros_like(elements_of(lane, DTYPE, ELEMENT_BYTES, True))
        largest, weights = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
        for sender in range(N):
            if sender == rank:
                words = _row_with_lse(partial, lse, token, first + member, heads, lse_token, lse_head, lane, limit, W)
            else:
                at = ((generation & 1) * N + sender).to(tl.int64) * most_tokens * HM * PITCH + row * PITCH
                words = wait_flagged_relaxed(context, cells + at, sender, lane, lane < limit, generation)
            of_row = tl.sum(tl.where(lane == W, words, 0), axis=0).to(tl.float32, bitcast=True) * log_base
            of_row = tl.where((of_row != of_row) | (of_row == float("inf")), float("-inf"), of_row)
            now = tl.maximum(largest, of_row)
            shift = tl.where(now == float("-inf"), 0.0, now)
            before, weight = tl.exp(largest - shift), tl.exp(of_row - shift)
            part = elements_of(words, DTYPE, ELEMENT_BYTES, True)
            total = total * before + tl.where(weight > 0, part * weight, 0.0)
            weights, largest = weights * before + weight, now
        result = words_of(total / tl.where(weights > 0, weights, 1.0), DTYPE, ELEMENT_BYTES)
        place = token * count + member
        tl.store(output + place * W + lane, result, mask=lane < _at_most(limit, W))
        tl.store(output_lse + place, (largest + tl.log(weights)) / log_base, mask=limit > 0)


@triton.jit
def _heads_of(rank, heads, N: tl.constexpr):
    """Return the first head of a rank, and how many it has, as ``torch.tensor_split`` does."""
    least, larger = heads // N, heads % N
    return rank * least + tl.minimum(rank, larger), least + tl.minimum(rank + 1, larger) - tl.minimum(rank, larger)


@triton.jit
def _lanes_of(member, count, PITCH: tl.constexpr):
    """Return the number of lanes of a row; 0 for one that a rank with fewer heads does not have."""
    return tl.multiple_of(tl.where(member < count, PITCH, 0), 2)


@triton.jit
def _at_most(limit, W: tl.constexpr):
    """Return the smaller one, for masks of accesses as wide as W allows."""
    WIDTH: tl.constexpr = 4 if W % 4 == 0 else 2 if W % 2 == 0 else 1
    return tl.multiple_of(tl.minimum(limit, W), WIDTH)


@triton.jit
def _row_with_lse(partial, lse, token, head, heads, lse_token, lse_head, lane, limit, W: tl.constexpr):
    """Return the words of a row, and behind them the bits of its lse."""
    words = tl.load(partial + (token * heads + head).to(tl.int64) * W + lane, mask=lane < _at_most(limit, W), other=0)
    of_row = tl.load(lse + token * lse_token + head * lse_head, mask=limit > 0, other=0.0)
    return tl.where(lane == W, of_row.to(tl.int32, bitcast=True), words)


KERNEL = _combine

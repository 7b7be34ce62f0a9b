# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_reduce_rms_norm: what a tensor-parallel decoder does twice a layer, in one kernel, for few tokens.

Equivalent: ``comm.all_reduce(x); residual = x + residual; y = rms_norm(residual, weight)``
(``reference.all_reduce_rms_norm``), with float32 between the first addition and the last rounding.

Every word of data carries its own readiness (``device/flagged.py``), so that nobody meets anybody; a block of rank 0::

    rank 0   rows -> cells of all others | wait for the cells of a row -> add, residual, norm -> outputs | next row
    rank 1   rows -> cells of all others | wait for the cells of a row -> add, residual, norm -> outputs | next row

Block b of every rank has the same rows, and waits only for what blocks b send before they wait. A grid has no more
blocks than fit on the GPU. Every rank waits for something of every other one in each launch, so that two places for
each sender, for even and odd generations, are enough.

Legend: N ranks; T tokens, M most tokens of the handle; H hidden size; C words of 4 bytes of a row, in W lanes, a power
of two. ``x``, ``residual`` and outputs are int32 [T, C], ``weight`` int32 [C], ``cells`` int64 [2, N, M, C].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidelane.choice.fused import UNFUSED
from sidelane.collectives import Communicator
from sidelane.device.arithmetic import DTYPES
from sidelane.device.context import begin, end, rank_of, world_size_of
from sidelane.device.flagged import put_flagged_relaxed, wait_flagged_relaxed
from sidelane.device.reduce_cells import elements_of, words_of
from sidelane.ops import reference
from sidelane.ops.auto import AUTO, check_method, method_of
from sidelane.ops.handle import FLOATS, check_tensor, kept, power_of_two, programs_of, telling_refusals

NAME = "all_reduce_rms_norm"
MOST_TOKENS = 512
MOST_ROW_BYTES = 32 << 10
"""A block holds a row in registers."""


class AllReduceRmsNorm:
    """The workspace of :func:`all_reduce_rms_norm` for one shape. Collective: alike on all ranks.

    It takes ``4 * world_size`` times the bytes of the largest input, in symmetric memory.

    Args:
        comm: the ranks.
        tokens: most that a call has, 1 to 512.
        hidden: elements of a row.
        dtype: float32, float16 or bfloat16.

    Raises:
        ValueError, TypeError: a size or dtype that there is not.
        UnavailableError: inside a capture, or more than 8 ranks.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def __init__(self, comm: Communicator, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        with telling_refusals(comm, NAME):
            if dtype not in FLOATS:
                raise TypeError(f"{NAME}: dtype (value={dtype}, allowed={', '.join(map(str, FLOATS))})")
            _check_sizes(tokens, hidden, dtype)
        self.comm, self.tokens, self.hidden, self.dtype = comm, tokens, hidden, dtype
        self._words = hidden * dtype.itemsize // 4
        self._warps = 4 if self._words <= 1024 else 8 if self._words <= 4096 else 16
        self._programs = programs_of(comm, tokens, 1)
        self._cells = comm.empty(2, comm.world_size, tokens, self._words, dtype=torch.int64)
        self._cells.zero_()
        self._kernel = comm.load_kernel(_all_reduce_rms_norm, flags=0)
        comm.barrier()  # all cells are 0 before any is written

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run it. Arguments, results and errors as of :func:`all_reduce_rms_norm`."""
        with telling_refusals(self.comm, NAME):
            _check(self.comm, x, residual, weight, out, residual_out)
            if (x.shape[1], x.dtype) != (self.hidden, self.dtype) or x.shape[0] > self.tokens:
                given = f"{tuple(x.shape)}, {x.dtype}"
                allowed = f"up to {self.tokens} tokens of {self.hidden}, {self.dtype}"
                raise ValueError(f"{NAME}: a handle for another shape (value={given}, allowed={allowed})")
        y = torch.empty_like(x) if out is None else out
        total = torch.empty_like(x) if residual_out is None else residual_out
        words = [tensor.view(torch.int32) for tensor in (y, total, x, x if residual is None else residual, weight)]
        self._kernel.launch(
            (self._programs,),
            self.comm.peers(self._cells),
            self._cells,
            *words,
            x.shape[0],
            self.tokens,
            self._words,
            float(eps),
            alike=f"{x.shape[0]} tokens",
            W=power_of_two(self._words),
            DTYPE=DTYPES[str(self.dtype).removeprefix("torch.")],
            ELEMENT_BYTES=self.dtype.itemsize,
            HAS_RESIDUAL=residual is not None,
            num_warps=self._warps,
        )
        return y, total

    def close(self) -> None:
        """Let go of the workspace, once this rank's calls have ended. Idempotent, and no collective."""
        self._kernel.close()


def all_reduce_rms_norm(
    comm: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    method: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``comm.all_reduce(x); total = x + residual; y = rms_norm(total, weight, eps)`` in one kernel. A call.

    Sums are float32, in the order of the ranks, and what is normalised is not rounded before. The first call of a shape
    makes what it needs (:class:`AllReduceRmsNorm`), with all ranks; later ones may be captured into a graph.

    Args:
        comm: the ranks.
        x: this rank's part of the sum, [T, H], contiguous; 1 to 512 tokens; float32, float16 or bfloat16; rows of whole
            words of 4 bytes, up to 32 KB. It stays as it is.
        residual: [T, H], the same on all ranks, which nobody checks; None for nothing.
        weight: of the norm, [H].
        eps: added to the mean of the squares.
        out: for ``y``, contiguous; None makes one. It may be ``x``.
        residual_out: for ``total``, contiguous; None makes one. It may be ``residual``, or ``x``.
        method: ``fused``, ``unfused``, or ``auto``: unfused where that was measured to be faster (``ops.explain``).

    Returns:
        ``y`` and ``total``, [T, H]. The same bits on every rank.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        check_method(comm, NAME, method)
        _check(comm, x, residual, weight, out, residual_out)
    tokens, hidden = power_of_two(x.shape[0]), x.shape[1]
    key = (NAME, tokens, hidden, x.dtype)
    handle = kept(comm, key, lambda: AllReduceRmsNorm(comm, tokens, hidden, x.dtype))
    if method_of(comm, NAME, method, key, (tokens, hidden), x.element_size()).method == UNFUSED:
        y, total = reference.all_reduce_rms_norm(comm, x, residual, weight, eps=eps)
        given = (y, out), (total, residual_out)
        y, total = (made if place is None else place.copy_(made) for made, place in given)
        return y, total
    return handle(x, residual, weight, eps=eps, out=out, residual_out=residual_out)


def _check_sizes(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{NAME}: tokens (value={tokens}, allowed=1..{MOST_TOKENS})")
    nbytes = hidden * dtype.itemsize
    if nbytes % 4 or not 4 <= nbytes <= MOST_ROW_BYTES:
        allowed = f"whole words of 4 bytes, up to {MOST_ROW_BYTES} bytes"
        raise ValueError(f"{NAME}: bytes of a row (value={nbytes}, allowed={allowed})")


def _check(comm: Communicator, x: object, residual: object, weight: object, out: object, residual_out: object) -> None:
    check_tensor(NAME, "x", x, comm.device, FLOATS, (2,))
    assert isinstance(x, torch.Tensor)
    _check_sizes(x.shape[0], x.shape[1], x.dtype)
    shapes = {"x": (x, x.shape), "weight": (weight, x.shape[1:])}
    given = {"residual": residual, "out": out, "residual_out": residual_out}
    shapes |= {name: (tensor, x.shape) for name, tensor in given.items() if tensor is not None}
    for name, (tensor, shape) in shapes.items():
        check_tensor(NAME, name, tensor, comm.device, (x.dtype,), (len(shape),))
        assert isinstance(tensor, torch.Tensor)
        if tensor.shape != shape or not tensor.is_contiguous():
            allowed = f"{tuple(shape)}, contiguous"
            raise ValueError(f"{NAME}: shape of {name} (value={tuple(tensor.shape)}, allowed={allowed})")
        if tensor.data_ptr() % 4:
            raise ValueError(f"{NAME}: address of {name} (value={tensor.data_ptr():#x}, allowed=a multiple of 4)")


@triton.jit
def _all_reduce_rms_norm(
    context, cells_of, cells, output, total_output, x, residual, weight, tokens, most_tokens, words, eps,
    W: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, W)
    mask = lane < words
    place = (generation & 1) * ranks

    for row in range(program, tokens, programs):
        own = tl.load(x + row * words + lane, mask=mask, other=0)
        for turn in range(1, ranks):
            at = ((place + rank) * most_tokens + row).to(tl.int64) * words
            put_flagged_relaxed(cells_of, (rank + turn) % ranks, at + lane, own, generation, mask)

    tl.debug_barrier()  # what is written below may be what other threads have read above
    factors = elements_of(tl.load(weight + lane, mask=mask, other=0), DTYPE, ELEMENT_BYTES, True)
    for row in range(program, tokens, programs):
        own = tl.load(x + row * words + lane, mask=mask, other=0)
        total = tl.zeros_like(factors)
        for sender in range(ranks):
            if sender == rank:
                total += elements_of(own, DTYPE, ELEMENT_BYTES, True)
            else:
                at = ((place + sender) * most_tokens + row).to(tl.int64) * words
                came = wait_flagged_relaxed(context, cells + at, sender, lane, mask, generation)
                total += elements_of(came, DTYPE, ELEMENT_BYTES, True)
        if HAS_RESIDUAL:
            before = tl.load(residual + row * words + lane, mask=mask, other=0)
            total += elements_of(before, DTYPE, ELEMENT_BYTES, True)
        tl.debug_barrier()  # outputs may be inputs, which other threads have read
        tl.store(total_output + row * words + lane, words_of(total, DTYPE, ELEMENT_BYTES), mask=mask)
        mean = tl.sum(total * total) / (words * (4 // ELEMENT_BYTES))  # words may be a constant, which has no dtype
        y = total * (1.0 / tl.sqrt(mean + eps)) * factors
        tl.store(output + row * words + lane, words_of(y, DTYPE, ELEMENT_BYTES), mask=mask)
    end(context, generation)


KERNEL = _all_reduce_rms_norm

"""all_reduce_rms_norm: the all-reduce, residual and norm that a tensor-parallel decoder has twice a layer, for few
tokens.

Equivalent: ``comm.all_reduce(x); residual = x + residual; y = rms_norm(residual, weight)``, with float32 between the
first addition and the last rounding.

Two schedules: ``cells`` for few bytes, ``pushed`` for more (``rms_norm_kernels.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.device.language import real
from sidelane.errors import UnavailableError
from sidelane.kernels.arithmetic import DTYPES
from sidelane.memory.storage import persistent
from sidelane.ops import rms_norm_kernels
from sidelane.ops.handle import (
    FLOATS,
    KernelHandle,
    cached_object,
    check_choice,
    check_tensor,
    load_with_cells,
    power_of_two,
    programs_of,
    register_limit,
    reporting_refusals,
)
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall, host_objection
from sidelane.ops.timeline import stamps_of
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "all_reduce_rms_norm"
OPERATOR = FusedOperator(
    NAME,
    ("tokens", "hidden"),
    has_sum=True,
    through_host=lambda ranks, sizes, element_bytes: host_objection(ranks, sizes[0] * sizes[1] * element_bytes),
)
CELLS, PUSHED = "cells", "pushed"
SCHEDULES = (AUTO, CELLS, PUSHED)
MOST_TOKENS = 512
MOST_ROW_BYTES = 32 << 10
"""Largest size of a row in bytes: a block that gets pushed rows holds one in registers."""

PROGRAMS_A_UNIT = 16
"""Programs of one warp on a compute unit, in cells: all of a grid are there at once, since they wait for each other."""

HOST_WARPS = 2
"""Warps of a program in cells through host memory. A thread then has two words of a slice, whose cells are one load.
Four words are two loads, each of 16 bytes of every 32, so that all cells cross PCIe twice."""

_ARGUMENT_INDICES = 4, 5, 6, 7, 8, 14, 15, 16
"""Positions of both outputs, x, residual, weight, and of quantized and its scale, read or written, among the kernel's
arguments behind the context. In
cells, ``partials`` come before them."""

CELLS_BYTES = 1 << 20
"""Largest number of bytes of x that a rank sends to its peers in cells, if ``auto`` chooses. Between two H200s, cells
took 9.1 us for 1 MiB and 16.9 for 2, pushed rows 9.6 and 13.0."""


class AllReduceRmsNorm(KernelHandle):
    """Workspace of :func:`all_reduce_rms_norm` for one shape. Collective: alike on all ranks.

    It takes ``4 * world_size`` times the bytes of the largest input in cells, half of that pushed, in symmetric memory.

    Args:
        comm: communicator of the ranks.
        tokens: largest number of tokens of a call, 1 to 512.
        hidden: number of elements of a row.
        dtype: dtype of all tensors: float32, float16 or bfloat16.
        schedule: ``cells``, ``pushed`` or ``auto``.
    """

    def __init__(
        self, comm: Communicator, tokens: int, hidden: int, dtype: torch.dtype, *, schedule: str = AUTO
    ) -> None:
        self.comm, self.tokens, self.hidden, self.dtype = comm, tokens, hidden, dtype
        through_host = comm.backend.peers.through_host
        if schedule == PUSHED and through_host:
            raise UnavailableError(f"{NAME}: schedule through host memory (value={PUSHED}, allowed={AUTO}, {CELLS})")
        if schedule == AUTO:
            sent_bytes = tokens * hidden * dtype.itemsize * (comm.world_size - 1)
            schedule = CELLS if sent_bytes <= CELLS_BYTES or through_host else PUSHED
        self.schedule = schedule
        self.partials: tuple[torch.Tensor, ...] = ()  # of this rank: sums that the blocks of a row exchange, in cells
        slices = -(-hidden * dtype.itemsize // rms_norm_kernels.SLICE_BYTES)
        if schedule == CELLS:
            self._init_cells(slices)
        else:
            self._init_pushed(slices)
        self._counters = self.kernel.counters

    def _init_cells(self, slices: int) -> None:
        comm, tokens, nbytes = self.comm, self.tokens, self.dtype.itemsize
        self._width, slice_words = self.hidden * nbytes // 4, rms_norm_kernels.SLICE_BYTES // 4
        parts = slices_of_a_program(comm, slices)
        self._team = -(-slices // parts)
        warps = HOST_WARPS if comm.backend.peers.through_host else 1
        per_unit = PROGRAMS_A_UNIT // warps
        self.programs = programs_of(comm, tokens * self._team, per_unit) // self._team * self._team
        self.options: dict[str, Any] = {
            "N": comm.world_size,
            "W": slice_words,
            "SLICES": slices,
            "S": power_of_two(slices),
            "PARTS": parts,
            "WHOLE": self._width == self._team * parts * slice_words,
            "ELEMENT_BYTES": nbytes,
            "DTYPE": real(DTYPES[str(self.dtype).removeprefix("torch.")]),
            "num_warps": warps,
            **register_limit(128, warps, per_unit),
        }
        count = 2 * comm.world_size * tokens * self._width
        self.kernel, self.came, self.addresses = load_with_cells(comm, rms_norm_kernels.CELLS_KERNEL, count)
        words = 2 * tokens * power_of_two(slices)
        self.partials = (persistent(comm.device, lambda: torch.zeros(words, dtype=torch.int64, device=comm.device)),)

    def _init_pushed(self, slices: int) -> None:
        comm, nbytes = self.comm, self.dtype.itemsize
        words = self.hidden * nbytes // 4
        warps = 4 if words <= 1024 else 8 if words <= 4096 else 16
        programs_a_unit = 2 if warps <= 8 else 1
        self._width = self.hidden
        self.programs = programs_of(comm, self.tokens, programs_a_unit)
        self.options = {
            "N": comm.world_size,
            "HP": power_of_two(slices) * rms_norm_kernels.SLICE_BYTES // nbytes,
            "S": power_of_two(slices),
            "num_warps": warps,
            **register_limit(128, warps, programs_a_unit),  # of 16 warps a unit
        }
        self.came = comm.empty(2, comm.world_size, self.tokens, self._width, dtype=self.dtype)
        self.kernel = comm.load_kernel(rms_norm_kernels.PUSHED_KERNEL, flags=self.programs)
        self.addresses = comm.peers(self.came)  # now, as the first launch may be captured

    def run(
        self,
        repeated: RepeatedLaunch | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        residual_out: torch.Tensor | None,
        quantized: torch.Tensor | None,
        scale: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the operator with checked arguments. ``repeated``: launch of calls with these layouts and eps."""
        y = torch.empty_like(x) if out is None else out
        total = torch.empty_like(x) if residual_out is None else residual_out
        scales = scale is not None and scale.dim() == 2
        rows = y, total, x, x if residual is None else residual, weight
        tensors = *rows, quantized, None if scales else scale, scale if scales else None
        if self._repeats(repeated, tensors):
            return y, total
        # Without a row's stride, which may be odd if there is one only.
        words = [row.view(-1).view(torch.int32) for row in rows] if self.schedule == CELLS else rows
        if quantized is not None:
            in_pairs = self.schedule == CELLS and x.element_size() == 2
            quantized = quantized.view(-1).view(torch.int16 if in_pairs else torch.uint8)
        if self.schedule == CELLS:
            programs = min(self.programs, x.shape[0] * self._team)
            options = {**self.options, "ONE": x.shape[0] * self._team <= programs}
        else:
            programs, options = self.programs, self.options
        stamps, stamped = stamps_of(self.comm, programs)
        self.kernel.launch(
            (programs,),
            self._counters,
            self.comm.rank,
            self.addresses,
            self.came,
            *self.partials,
            *words,
            x.shape[0],
            self.tokens,
            self._width,
            eps,
            stamps,
            quantized,
            None if scales else scale,
            scale if scales else None,
            repeated=None if repeated is None or stamps is not None else (repeated, tensors),
            alike=f"{x.shape[0]} tokens{stamped}",
            HAS_RESIDUAL=residual is not None,
            **options,
        )
        return y, total


def all_reduce_rms_norm(
    comm: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    quantized: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    schedule: str = AUTO,
    method: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``comm.all_reduce(x); total = x + residual; y = rms_norm(total, weight, eps)`` in one kernel. A call.

    Sums are float32, in the order of the ranks, and are not rounded before they are normalised. The first call of a
    shape makes its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        x: this rank's part of the sum, [T, H], contiguous; 1 to 512 tokens; float32, float16 or bfloat16; rows of whole
            words of 4 bytes, up to 32 KB. It stays as it is.
        residual: tensor [T, H], the same on all ranks, which is not checked; None for none.
        weight: weight of the norm, [H].
        eps: number added to the mean of the squares.
        out: tensor for ``y``, contiguous; None makes one. It may be ``x``.
        residual_out: tensor for ``total``, contiguous; None makes one. It may be ``residual``, or ``x``.
        quantized: tensor [T, H] of float8_e4m3fn that gets ``y / scale`` as well, contiguous; None for none.
        scale: scale of ``quantized``, float32: one element (0 or 1 dimensions), which is read; or [T, 1], which is
            written: the largest absolute value of each row over 448, at least 1e-12. NaN if there is one in the row,
            which makes all of ``quantized``'s row NaN.
        schedule: ``cells`` (words carry their own readiness, at twice the bytes), ``pushed`` (rows unchanged, with a
            flag behind them), or ``auto``, by bytes.
        method: ``fused``, ``unfused``, or ``auto``: unfused if that was measured to be faster (``ops.explain``).

    Returns:
        Tensors ``y`` and ``total``, [T, H]. The same bits on every rank.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    tensors = x, residual, weight, out, residual_out, quantized, scale

    def check() -> OperatorCall:
        check_choice(NAME, "schedule", schedule, SCHEDULES)
        _check(comm, *tensors)
        tokens, hidden = power_of_two(x.shape[0]), x.shape[1]
        key = (NAME, tokens, hidden, x.dtype, schedule)

        def fused(pieces: int) -> CachedLaunch:
            handle = cached_object(
                comm, key, lambda: AllReduceRmsNorm(comm, tokens, hidden, x.dtype, schedule=schedule)
            )
            indices = [at + len(handle.partials) for at in _ARGUMENT_INDICES]
            return functools.partial(handle.run, RepeatedLaunch(indices))

        make: dict[str, Callable[[int], CachedLaunch]] = {
            FUSED: fused,
            UNFUSED: lambda pieces: functools.partial(unfused_norm, comm),
        }
        return OperatorCall(key, (tokens, hidden), x.element_size(), make)

    if type(eps) is not float:
        with reporting_refusals(comm, NAME):
            eps = _number(eps)
    words: tuple[object, ...] | None = schedule, eps
    try:
        for tensor in tensors:
            if tensor is not None and tensor.data_ptr() & 3:
                words = None  # checks refuse it
    except (AttributeError, TypeError, RuntimeError):
        words = None
    launch = OPERATOR.launch(comm, words, tensors, check, method)
    found: tuple[torch.Tensor, torch.Tensor] = launch(*tensors, eps)
    return found


def unfused_norm(
    comm: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    quantized: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``all_reduce``, an addition and ``rms_norm`` on checked arguments."""
    with torch.no_grad():  # as the kernels
        total = x.clone()
        comm.all_reduce(total)
        if residual is not None:
            total += residual
        y = functional.rms_norm(total, weight.shape, weight, eps).to(x.dtype)  # under autocast it is float32
        if quantized is not None and scale is not None:
            wide, most = y.float(), torch.finfo(quantized.dtype).max
            if scale.dim() == 2:
                scale.copy_((wide.abs().amax(1, keepdim=True) / most).clamp_min(1e-12))
            quantized.copy_((wide / scale).clamp(-most, most))
        return y if out is None else out.copy_(y), total if residual_out is None else residual_out.copy_(total)


def is_worth_it(comm: Communicator | None, x: torch.Tensor) -> bool:
    """Return False for a sum [tokens, hidden] whose size leaves it to separate calls, through host memory."""
    if comm is None or not comm.backend.peers.through_host:
        return True
    tokens, hidden = x.shape
    return not OPERATOR.through_host(comm.world_size, (power_of_two(tokens), hidden), x.itemsize)


def slices_of_a_program(comm: Communicator, slices: int) -> int:
    """Return the number of slices of a row that a program has, in cells, of so many: a power of two."""
    # Programs of CPU ranks run one after the other: none may wait for another one.
    return power_of_two(slices) if comm.device.type == "cpu" else 1


def _number(eps: Any) -> float:
    try:
        return float(eps)
    except (TypeError, ValueError) as problem:
        raise TypeError(f"{NAME}: eps (value={eps!r}, allowed=a number)") from problem


def _check(
    comm: Communicator,
    x: object,
    residual: object,
    weight: object,
    out: object,
    residual_out: object,
    quantized: object,
    scale: object,
) -> None:
    x = check_tensor(NAME, "x", x, comm.device, FLOATS, (2,))
    if not 1 <= x.shape[0] <= MOST_TOKENS:
        raise ValueError(f"{NAME}: tokens (value={x.shape[0]}, allowed=1..{MOST_TOKENS})")
    nbytes = x.shape[1] * x.itemsize
    if nbytes % 4 or not 4 <= nbytes <= MOST_ROW_BYTES:
        allowed = f"whole words of 4 bytes, up to {MOST_ROW_BYTES} bytes"
        raise ValueError(f"{NAME}: bytes of a row (value={nbytes}, allowed={allowed})")
    shapes = {"x": (x, x.shape, x.dtype), "weight": (weight, x.shape[1:], x.dtype)}
    given = {"residual": residual, "out": out, "residual_out": residual_out}
    shapes |= {name: (tensor, x.shape, x.dtype) for name, tensor in given.items() if tensor is not None}
    if quantized is not None:
        shapes["quantized"] = quantized, x.shape, torch.float8_e4m3fn
        scale = check_tensor(NAME, "scale", scale, comm.device, (torch.float32,), (0, 1, 2))
        shapes["scale"] = scale, torch.Size((x.shape[0], 1) if scale.dim() == 2 else (1,) * scale.dim()), torch.float32
    elif scale is not None:
        raise ValueError(f"{NAME}: scale needs quantized (value=a tensor)")
    for name, (one, shape, dtype) in shapes.items():
        tensor = check_tensor(NAME, name, one, comm.device, (dtype,), (len(shape),))
        if tensor.shape != shape or not tensor.is_contiguous():
            allowed = f"{tuple(shape)}, contiguous"
            raise ValueError(f"{NAME}: shape of {name} (value={tuple(tensor.shape)}, allowed={allowed})")
        if tensor.data_ptr() % 4:
            raise ValueError(f"{NAME}: address of {name} (value={tensor.data_ptr():#x}, allowed=a multiple of 4)")

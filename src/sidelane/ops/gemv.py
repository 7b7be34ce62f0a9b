# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""gemv_all_reduce: a row-parallel linear layer for few tokens, whose partial results leave as they are computed.

Equivalent: ``y = x @ weight.T; comm.all_reduce(y)``, with partial results in float32 that are rounded once. By default,
results larger than ``CELLS_BYTES`` are a product and an all-reduce.

Every rank adds up all partial results, and sums carry their own readiness (``device/flagged.py``): one pass, without
fences or barriers; block b of two ranks::

    rank 0   rows of b: weights in one stream, a tile's sums -> cells of all | wait for cells of b | add -> output
    rank 1   rows of b: weights in one stream, a tile's sums -> cells of all | wait for cells of b | add -> output

To keep memory busy, rows of a block are neighbours, and tiles and columns are one loop, so that loads of the next
tile are on their way while a tile is added up and sent; STAGES of them are copied to shared memory asynchronously. A
rank sends to itself, too, so that all its terms lie in one place.

Two places for each sender, for even and odd generations, are enough (``kernels/ll.py``): every rank waits for
cells of every other one in each launch. Cells are 0 before the first launch.

Legend: N ranks, R the power of two from N on; M rows of the weight; K columns, this rank's; T tokens, TP lanes of them:
1, or 16 in dots; a tile is ROWS rows of all tokens; COLS columns are loaded at a time. ``weight`` [M, K], ``x`` [T, K],
``scale`` [1] or [M], ``output`` [T, M]; ``cells`` int64 [2, N, M, TP]; a block has ``rows_each`` rows, of which it
waits for LANES cells at a time. EVEN: tiles are whole, and there are columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.device.context import begin, end, rank_of
from sidelane.device.flagged import put_flagged_relaxed, wait_flagged_of_ranks_relaxed
from sidelane.device.stamps import ADD, COMPUTE, END, SEND, WAIT, stamp
from sidelane.device.triton_language import tl, triton
from sidelane.ops.handle import (
    FLOAT8S,
    FLOATS,
    INTERPRETED,
    KernelHandle,
    cached_object,
    check_choice,
    check_tensor,
    check_tiles,
    load_with_cells,
    power_of_two,
    programs_of,
    refusing_tiles,
    register_limit,
)
from sidelane.ops.operands import apart_from, check_neighbours, product
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall, ProblemSizes, host_objection
from sidelane.ops.timeline import stamps_of
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "gemv_all_reduce"
MOST_ROWS = 1 << 20
_ARGUMENT_INDICES = 2, 3, 4, 5
"""Positions of output, weight, x and scale among the kernel's arguments behind the context."""

LANES = 256
"""Cells of each rank that a program waits for at a time."""

MOST_TOKENS = 16
CELLS_BYTES = 512 << 10
"""Largest number of bytes of a rank's float32 partial results that ``auto`` sends in cells; more was not measured
(results/notes/kernels.md)."""

MOST_STAGES = 8
EVICTIONS = ("", "evict_first")
UNIT_REGISTERS = 64 << 10
SCRATCH_BYTES = 4 << 10
"""Bytes of shared memory of a program for other things than loads: 2 KB and less, as Triton says when it compiles."""

RESERVED_BYTES = 1 << 10
"""Bytes of shared memory of each program that CUDA takes for itself."""

LEAST_SHARED_BYTES = 64 << 10
"""Bytes of shared memory of a compute unit, if the driver does not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes and resources of the kernel.

    Attributes:
        rows: number of rows of the weight in a tile, a power of two; for more than one token 16 and more.
        columns: number of columns loaded at a time, a power of two, 16 or more.
        warps: number of warps of a program.
        per_unit: number of programs on each compute unit; all of them have to fit at the same time.
        stages: number of turns whose loads are on their way, and the one under way, as far as shared memory has
            room. 1 leaves them in registers.
        evict: cache policy for weights, ``evict_first`` or empty.
    """

    rows: int = 16
    columns: int = 512
    warps: int = 4
    per_unit: int = 2
    stages: int = 4
    evict: str = "evict_first"

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("columns", self.columns, 16), ("warps", self.warps, 1)):
            if value < least or value != power_of_two(value):
                raise ValueError(f"Tiling: {name} (value={value}, allowed=a power of two from {least})")
        if not 1 <= self.per_unit <= self.most_per_unit:
            allowed = f"1..{self.most_per_unit} of {self.warps} warps"
            raise ValueError(f"Tiling: per_unit (value={self.per_unit}, allowed={allowed})")
        if not 1 <= self.stages <= MOST_STAGES:
            raise ValueError(f"Tiling: stages (value={self.stages}, allowed=1..{MOST_STAGES})")
        check_choice("Tiling", "evict", self.evict, EVICTIONS)

    @property
    def most_per_unit(self) -> int:
        """Largest number of programs on a compute unit: with 128 registers for each of 512 threads (``registers``)."""
        return max(1, 16 // self.warps)

    @property
    def registers(self) -> int:
        """Largest number of registers of a thread with which all programs fit on a compute unit at the same time."""
        return min(255, UNIT_REGISTERS // (32 * self.warps * self.per_unit) // 8 * 8)

    def stages_in(self, shared_bytes: int, weight_bytes: int, x_bytes: int, tokens: int) -> int:
        """Return the number of stages of a program that has so much shared memory.

        Args:
            shared_bytes: bytes that a program may have (:func:`shared_bytes_of`).
            weight_bytes: size of an element of the weight in bytes.
            x_bytes: size of an element of x in bytes.
            tokens: number of tokens whose x is loaded with each part of the weight, 1 or ``MOST_TOKENS``.

        >>> tiling = Tiling(16, 512, 4, 2, 4)  # 16 KB of a weight of 2 bytes, and 1 KB of x
        >>> [tiling.stages_in(kilobytes << 10, 2, 2, 1) for kilobytes in (113, 55, 49, 21, 20)]
        [4, 4, 3, 2, 1]
        """
        loaded = self.columns * (self.rows * weight_bytes + tokens * x_bytes)
        return max(1, min(self.stages, 1 + (shared_bytes - SCRATCH_BYTES) // loaded))

    def constants(self, *, ranks: int, padded: int, wide: bool, stages: int = 0) -> dict[str, Any]:
        """Return constants and options of the kernel.

        Args:
            ranks: number of ranks of the communicator.
            padded: TP, number of lanes for tokens.
            wide: WIDE: dots are of float32.
            stages: number of stages that fit; 0 for the tiling's.
        """
        return {
            "N": ranks,
            "R": power_of_two(ranks),
            "ROWS": self.rows,
            "COLS": self.columns,
            "TP": padded,
            "WIDE": wide,
            "STAGES": stages or self.stages,
            "EVICT": self.evict,
            "LANES": LANES,
            "num_warps": self.warps,
            **register_limit(self.registers, self.warps, self.per_unit),
        }


OF_DOTS = Tiling(32, 128, 4, 2, 5, "")
"""Tiling for more than one token, which tensor cores multiply."""

OF_FEW_ROWS, FEW_ROWS = Tiling(16, 256, 2, 2, 4, ""), 4096
"""Tiling for more than one token and up to so many rows, of which larger tiles would leave units idle."""


def tiling_of(tokens: int, rows: int) -> Tiling:
    """Return the fastest tiling in the measurements (results/notes/kernels.md, *GEMVs whose sums are cells*;
    results/h200x2/gemv-grid.txt).
    """
    return Tiling() if tokens == 1 else OF_FEW_ROWS if rows <= FEW_ROWS else OF_DOTS


def shared_bytes_of(device: torch.device, per_unit: int) -> int:
    """Return the shared memory in bytes that each of so many programs on a compute unit may have."""
    if device.type == "cpu":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    of_unit = getattr(properties, "shared_memory_per_multiprocessor", LEAST_SHARED_BYTES)
    return int(of_unit) // per_unit - RESERVED_BYTES  # for a single program that is CUDA's limit


def _too_large(sizes: ProblemSizes) -> str:
    is_large = 4 * sizes[0] * sizes[2] > CELLS_BYTES
    return f"fused takes up to {CELLS_BYTES // 4} elements of the result" if is_large else ""


OPERATOR = FusedOperator(
    NAME,
    ("rows", "columns of all ranks", "tokens"),
    has_sum=True,
    agreed=lambda columns: (max(columns[0]), sum(columns[1]), max(columns[2])),
    too_large=_too_large,
    # Cells of several tokens are padded: 8 rows of a decoding step took 37 us a call more than separate calls.
    through_host=lambda ranks, sizes, element_bytes: (
        "fused takes one token through host memory" if sizes[2] > 1 else host_objection(ranks, 4 * sizes[0])
    ),
)


class GemvAllReduce(KernelHandle):
    """Flags and workspace of :func:`gemv_all_reduce` for one shape. Collective: alike on all ranks.

    Args:
        comm: communicator of the ranks.
        rows: number of rows of the weight, the same on all ranks.
        tokens: largest number of tokens of a call, 1 to 16.
        dtype: dtype of x and result: float32, float16 or bfloat16.
        weight_dtype: dtype of the weight: float8_e4m3fn or float8_e5m2; None is ``dtype``.
        tiling: tile sizes of the kernel; None takes the fastest ones on an H200.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> None:
        self.weight_dtype = weight_dtype or dtype
        self.comm, self.rows, self.tokens, self.dtype = comm, rows, tokens, dtype
        self.tiling = tiling = tiling or tiling_of(tokens, rows)
        self.padded = 1 if tokens == 1 else MOST_TOKENS
        tiles = -(-rows // tiling.rows)
        programs = programs_of(comm, tiles, tiling.per_unit)
        self.rows_each = -(-tiles // programs) * tiling.rows
        self.programs = -(-rows // self.rows_each)
        self._stages = tiling.stages_in(
            shared_bytes_of(comm.device, tiling.per_unit), self.weight_dtype.itemsize, dtype.itemsize, self.padded
        )
        count = 2 * comm.world_size * rows * self.padded
        self.kernel, self.cells, self.addresses = load_with_cells(comm, _gemv_cells, count)

    def run(
        self,
        repeated: RepeatedLaunch | None,
        weight: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the operator with checked arguments. ``repeated``: launch of calls with these layouts."""
        comm, tiling = self.comm, self.tiling
        if out is None:
            out = x.new_empty(self.rows) if x.dim() == 1 else x.new_empty(x.shape[0], self.rows)
        elif (other := apart_from(out, x)) is not x:
            x, repeated = other, None  # of another layout, maybe
        tensors = out, weight, x, scale
        if self._repeats(repeated, tensors):
            return out
        tokens = 1 if x.dim() == 1 else x.shape[0]
        stamps, stamped = stamps_of(comm, self.programs)
        with refusing_tiles(NAME, tiling):
            self.kernel.launch(
                (self.programs,),
                self.addresses,
                self.cells,
                out,
                weight,
                x,
                scale,
                self.rows,
                weight.shape[1],
                weight.stride(0),
                x.stride(0) if x.dim() == 2 else 0,
                tokens,
                0 if scale is None or scale.numel() == 1 else 1,
                self.rows_each,
                stamps,
                self.rows % tiling.rows == 0 and weight.shape[1] % tiling.columns == 0 < weight.shape[1],  # EVEN, here
                repeated=None if repeated is None or stamps is not None else (repeated, tensors),
                alike=f"{tokens} tokens, {'no ' if scale is None else ''}scale{stamped}",
                **tiling.constants(
                    ranks=comm.world_size,
                    padded=self.padded,
                    wide=INTERPRETED or self.dtype == torch.float32,
                    stages=self._stages,
                ),
            )
        return out


def gemv_all_reduce(
    comm: Communicator,
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    method: str = AUTO,
) -> torch.Tensor:
    """Compute ``y = x @ weight.T; comm.all_reduce(y)`` for few tokens, in one kernel. A call of the communicator.

    Partial results are float32, added up in the order of the ranks and rounded once. The first call of a shape makes
    its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        weight: columns of this rank, [M, K]; float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; rows may lie
            apart. K may differ by rank.
        x: columns of this rank of 1 to 16 tokens, [T, K] or [K], of the weight's dtype; with a weight of 8 bits
            float32, float16 or bfloat16.
        scale: factor of a weight of 8 bits: float32, of one element, or of one a row, [M]. None for 1. On all ranks or
            on none; its values are this rank's own.
        out: tensor for the result, contiguous. None makes one.
        tiling: tile sizes of the kernel; None takes the fastest ones on an H200.
        method: ``fused``, ``unfused``, or ``auto``: unfused if that was measured to be faster (``ops.explain``), or
            T * M is more than 131,072. Fused, ranks have 16 bytes of symmetric memory for each element and rank.

    Returns:
        Tensor [T, M] or [M], the same bits on every rank.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it; a tiling that Triton cannot
            compile.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        _check(comm, weight, x, scale, out)
        check_tiles(NAME, "tiling", tiling, Tiling)
        rows, columns = weight.shape
        tokens, dtypes = power_of_two(1 if x.dim() == 1 else x.shape[0]), (x.dtype, weight.dtype)
        key = (NAME, rows, tokens, *dtypes, tiling)

        def fused(pieces: int) -> CachedLaunch:
            handle = cached_object(comm, key, lambda: GemvAllReduce(comm, rows, tokens, *dtypes, tiling=tiling))
            return functools.partial(handle.run, RepeatedLaunch(_ARGUMENT_INDICES))

        make: dict[str, Callable[[int], CachedLaunch]] = {
            FUSED: fused,
            UNFUSED: lambda pieces: functools.partial(unfused_gemv, comm),
        }
        return OperatorCall(key, (rows, columns, tokens), weight.element_size(), make)

    launch = OPERATOR.launch(comm, (tiling,), (weight, x, scale, out), check, method)
    found: torch.Tensor = launch(weight, x, scale, out)
    return found


def unfused_gemv(
    comm: Communicator,
    weight: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``all_reduce(x @ weight.T)`` of checked arguments."""
    with torch.no_grad():  # as the kernel
        if weight.dtype != x.dtype:  # of 8 bits
            wide = weight.float()
            weight = (wide if scale is None else wide * scale.view(-1, 1)).to(x.dtype)
        result = product(x, weight)
        comm.all_reduce(result)
        return result if out is None else out.copy_(result)


def _check(comm: Communicator, weight: object, x: object, scale: object, out: object) -> None:
    weight = check_tensor(NAME, "weight", weight, comm.device, FLOATS + FLOAT8S, (2,))
    x = check_tensor(NAME, "x", x, comm.device, FLOATS if weight.dtype in FLOAT8S else (weight.dtype,), (1, 2))
    rows, tokens = weight.shape[0], 1 if x.dim() == 1 else x.shape[0]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{NAME}: rows of the weight (value={rows}, allowed=1..{MOST_ROWS})")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{NAME}: tokens (value={tokens}, allowed=1..{MOST_TOKENS})")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{NAME}: columns of x (value={x.shape[-1]}, allowed={weight.shape[1]})")
    check_neighbours(NAME, weight=weight, x=x)
    if scale is not None:
        scale = check_tensor(NAME, "scale", scale, comm.device, (torch.float32,), (0, 1))
        if weight.dtype not in FLOAT8S:
            allowed = ", ".join(map(str, FLOAT8S))
            raise ValueError(f"{NAME}: scale of a weight (value={weight.dtype}, allowed={allowed})")
        if scale.numel() not in (1, weight.shape[0]) or not scale.is_contiguous():
            allowed = f"one element, or {weight.shape[0]}, contiguous"
            raise ValueError(f"{NAME}: shape of scale (value={tuple(scale.shape)}, allowed={allowed})")
    if out is not None:
        out = check_tensor(NAME, "out", out, comm.device, (x.dtype,), (x.dim(),))
        shape = (*x.shape[:-1], weight.shape[0])
        if out.shape != shape or not out.is_contiguous():
            raise ValueError(f"{NAME}: shape of out (value={tuple(out.shape)}, allowed={shape}, contiguous)")


@triton.jit
def _gemv_cells(
    context, cells_of, cells, output, weight, x, scale,
    rows, columns, weight_stride, x_stride, tokens, scale_stride, rows_each, stamps, EVEN: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank = rank_of(context)
    first = tl.program_id(0) * rows_each
    last = tl.minimum(first + rows_each, rows)
    lane, token, across = tl.arange(0, ROWS), tl.arange(0, TP)[None, :], tl.arange(0, COLS)
    place = (generation & 1) * N
    size = rows * TP  # cells of a sender
    steps = tl.maximum((columns + COLS - 1) // COLS, 1)  # peers wait for sums of no columns, too
    tiles = (tl.maximum(last - first, 0) + ROWS - 1) // ROWS
    xs = x + token.to(tl.int64) * x_stride
    kind = weight.dtype.element_ty
    if kind.primitive_bitwidth == 8:  # this dtype has no 0 for masked loads
        weight = weight.to(tl.pointer_type(tl.uint8), bitcast=True)

    stamp(stamps, COMPUTE)
    sums = tl.zeros([ROWS, COLS if TP == 1 else TP], tl.float32)
    for step in tl.range(0, tiles * steps, num_stages=STAGES):
        tile = step // steps
        column = (step - tile * steps) * COLS + across
        row = first + tile * ROWS + lane
        there = row < last
        places = weight + row[:, None].to(tl.int64) * weight_stride + column[None, :]
        if EVEN:
            w = tl.load(places, eviction_policy=EVICT)
        else:
            w = tl.load(places, mask=there[:, None] & (column[None, :] < columns), other=0, eviction_policy=EVICT)
        w = w.to(kind, bitcast=True)
        if TP == 1:
            v = tl.load(x + column) if EVEN else tl.load(x + column, mask=column < columns, other=0)
            sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
        else:
            known = (token < tokens) & (column[:, None] < columns)
            v = tl.load(xs + column[:, None], mask=known, other=0)
            if WIDE:  # also where kernels are interpreted, which takes bfloat16 for integers in a dot
                w, v = w.to(tl.float32), v.to(tl.float32)
            sums = tl.dot(w.to(v.dtype), v, sums, input_precision="ieee")  # 8 bits are exact in 16

        if step - tile * steps == steps - 1:
            part = tl.sum(sums, axis=1)[:, None] if TP == 1 else sums
            if scale is not None:
                part *= tl.load(scale + row * scale_stride, mask=there, other=0)[:, None]
            mask = there[:, None] & (token < tokens)
            if N == 1:
                tl.store(output + token * rows + row[:, None], part.to(output.dtype.element_ty), mask=mask)
            else:
                stamp(stamps, SEND, MEETS=False)
                words = part.to(tl.int32, bitcast=True)
                for turn in tl.static_range(N):
                    peer = (rank + 1 + turn) % N
                    at = (place + rank) * size + row[:, None] * TP + token
                    put_flagged_relaxed(cells_of, peer, at, words, generation, mask)
                stamp(stamps, COMPUTE, MEETS=False)
            sums = tl.zeros_like(sums)

    if N > 1:
        sender, inside = tl.arange(0, R)[:, None], tl.arange(0, LANES)
        for start in range(first * TP, last * TP, LANES):
            stamp(stamps, WAIT)
            index = start + inside
            mask = (index < last * TP) & (index % TP < tokens)
            at = place * size + sender * size + index[None, :]
            came = wait_flagged_of_ranks_relaxed(context, cells, at, mask[None, :] & (sender < N), generation)
            stamp(stamps, ADD)
            total = tl.zeros([LANES], tl.float32)
            for number in tl.static_range(N):  # in rank order; a sum of which all terms but one are 0 is that term
                words = tl.sum(tl.where(sender == number, came, 0), axis=0)
                total += words.to(tl.float32, bitcast=True)
            result = output + (index % TP) * rows + index // TP
            tl.store(result, total.to(output.dtype.element_ty), mask=mask)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _gemv_cells

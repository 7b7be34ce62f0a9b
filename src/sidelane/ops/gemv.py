# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""gemv_all_reduce: a row-parallel linear layer for few tokens, whose partial results leave as they are computed.

Equivalent: ``y = x @ weight.T; comm.all_reduce(y)`` (``reference.gemv_all_reduce``), with partial results in float32
that are rounded once.

Two phases, each rank adding up its share of the tiles (the fused operators paper, section III.B and Figure 7); block b
of two ranks::

    rank 0   tiles of 1 -> 1 | signal 1 | tiles of 0 | signal 0 | wait all | add tiles of 0 -> all | signal, wait all
    rank 1   tiles of 0 -> 0 | signal 0 | tiles of 1 | signal 1 | wait all | add tiles of 1 -> all | signal, wait all

One shot, each rank adding up everything::

    rank 0   tiles -> all | signal, wait all | add all tiles -> output
    rank 1   tiles -> all | signal, wait all | add all tiles -> output

Block b of every rank computes the same tiles, and waits for blocks b only, behind all that these wait for. A grid has
no more blocks than fit on the GPU, so that all of them run.

Why nobody has to say that he is ready. Two phases: a rank sends partial results again when its last call has ended, so
after every owner has sent results, having read its partial results; an owner stores results when it has partial results
of this call from every rank, whose streams have then passed all work in front of it. One shot: nothing says that a
peer has read, so that there are two places, for even and odd generations; two are enough (``device/cells.py``).

Legend: N ranks; M rows of the weight; K columns, this rank's; T tokens, TP lanes of them: 1, or 16 in dots; a tile is
ROWS rows of all tokens; COLS columns are loaded at a time; E tiles of each owner. ``weight`` [M, K], ``x`` [T, K],
``scale`` [1] or [M], ``output`` and ``results`` [T, M], ``partials`` float32 [places, N, tiles held, ROWS, TP].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from sidelane.choice.fused import UNFUSED
from sidelane.collectives import Communicator
from sidelane.device.context import (
    barrier_acq_rel,
    begin,
    end,
    put_weak,
    rank_of,
    signal_release,
    wait_all_acquire,
    world_size_of,
)
from sidelane.device.stamps import ADD, COMPUTE, COPY, END, SEND, WAIT, stamp
from sidelane.ops import gemv_cells, reference
from sidelane.ops.auto import check_method, method_of
from sidelane.ops.handle import (
    FLOAT8S,
    FLOATS,
    INTERPRETED,
    ORDERS,
    REMOTE_FIRST,
    check_choice,
    check_tensor,
    kept,
    power_of_two,
    programs_of,
    telling_refusals,
)
from sidelane.ops.timeline import stamps_of

NAME = "gemv_all_reduce"
AUTO, CELLS, ONE_SHOT, TWO_PHASE = "auto", "cells", "one_shot", "two_phase"
SCHEDULES = (AUTO, CELLS, ONE_SHOT, TWO_PHASE)
MOST_TOKENS = 16
MOST_ROWS = 1 << 20
MOST_DOT_COLUMNS = 128
MOST_STAGES = 8
EVICTIONS = ("", "evict_first")
UNIT_REGISTERS = 64 << 10
UNIT_SHARED_BYTES = 227 << 10
LANES = 256
"""Cells of each rank that a program waits for at a time."""
ONE_SHOT_BYTES = 256 << 10
"""Most partial results that a rank sends in one shot, if ``auto`` chooses. An estimate: two phases send 2/N of it, and
take one more trip of about a microsecond. Not measured yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel is cut.

    Attributes:
        rows: of the weight in a tile, a power of two; for more than one token 16 and more.
        columns: loaded at a time, a power of two, 16 or more.
        warps: of a program.
        per_unit: programs on each compute unit; all of them have to fit at the same time.
        stages: of ``cells``: loads of so many turns less one are on their way. 1 leaves them in registers.
        evict: of ``cells``: what the cache does with weights, ``evict_first`` or nothing.
    """

    rows: int = 16
    columns: int = 512
    warps: int = 4
    per_unit: int = 2
    stages: int = 3
    evict: str = ""

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("columns", self.columns, 16), ("warps", self.warps, 1)):
            if value < least or value != power_of_two(value):
                raise ValueError(f"Tiling: {name} (value={value}, allowed=a power of two from {least})")
        most = max(1, 16 // self.warps)  # with 128 registers for each of 512 threads (``registers``)
        if not 1 <= self.per_unit <= most:
            raise ValueError(f"Tiling: per_unit (value={self.per_unit}, allowed=1..{most} of {self.warps} warps)")
        if not 1 <= self.stages <= MOST_STAGES:
            raise ValueError(f"Tiling: stages (value={self.stages}, allowed=1..{MOST_STAGES})")
        check_choice("Tiling", "evict", self.evict, EVICTIONS)

    @property
    def registers(self) -> int:
        """Most that a thread may have, so that all programs fit on a compute unit at the same time."""
        return min(255, UNIT_REGISTERS // (32 * self.warps * self.per_unit) // 8 * 8)


OF_DOTS = Tiling(16, 128, 2, 4)
"""For more than one token, which tensor cores multiply: four took 112 us and more without, 56 with (8192 x 8192 on an
H100, docs/lab/kernels.md)."""


class GemvAllReduce:
    """The flags and workspace of :func:`gemv_all_reduce` for one shape. Collective: alike on all ranks.

    Args:
        comm: the ranks.
        rows: of the weight, the same on all ranks.
        tokens: most that a call has, 1 to 16.
        dtype: of x and result: float32, float16 or bfloat16.
        weight_dtype: float8_e4m3fn or float8_e5m2; None is ``dtype``.
        schedule: ``one_shot``, ``two_phase`` or ``auto``.
        tiling: how the kernel is cut; None takes what was fastest on an H100.

    Raises:
        ValueError, TypeError: a size or dtype that there is not.
        UnavailableError: inside a capture, or more than 8 ranks.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        weight_dtype: torch.dtype | None = None,
        schedule: str = AUTO,
        tiling: Tiling | None = None,
    ) -> None:
        tiling = tiling or (Tiling() if tokens == 1 else OF_DOTS)
        with telling_refusals(comm, NAME):
            check_choice(NAME, "schedule", schedule, SCHEDULES)
            _check_sizes(rows, tokens)
            if dtype not in FLOATS:
                raise TypeError(f"{NAME}: dtype (value={dtype}, allowed={', '.join(map(str, FLOATS))})")
            if weight_dtype not in (None, dtype, *FLOAT8S):
                allowed = f"{dtype}, {', '.join(map(str, FLOAT8S))}"
                raise TypeError(f"{NAME}: dtype of weight (value={weight_dtype}, allowed={allowed})")
        self.weight_dtype = weight_dtype or dtype
        self.comm, self.rows, self.tokens, self.dtype, self.tiling = comm, rows, tokens, dtype, tiling
        n = comm.world_size
        self._padded = 1 if tokens == 1 else MOST_TOKENS
        tiles = -(-rows // tiling.rows)
        if schedule == AUTO:
            schedule = ONE_SHOT if 4 * rows * tokens <= ONE_SHOT_BYTES else TWO_PHASE
        self.schedule = schedule
        if schedule == CELLS:
            self._make_cells()
            return
        two_phase = schedule == TWO_PHASE
        self._tiles_each = -(-tiles // n) if two_phase else tiles
        self._programs = programs_of(comm, self._tiles_each, tiling.per_unit)
        places = 1 if two_phase else 2
        self._partials = comm.empty(places * n * self._tiles_each * tiling.rows * self._padded)
        self._results = comm.empty(tokens * rows if two_phase else 1, dtype=dtype)
        self._kernel = comm.load_kernel(_gemv_all_reduce, flags=2 * self._programs)

    def _make_cells(self) -> None:
        comm, tiling, n = self.comm, self.tiling, self.comm.world_size
        tiles = -(-self.rows // tiling.rows)
        self._programs = programs_of(comm, tiles, tiling.per_unit)
        self._rows_each = -(-tiles // self._programs) * tiling.rows
        self._programs = -(-self.rows // self._rows_each)
        self._cells = comm.empty(2 * n * self.rows * self._padded, dtype=torch.int64)
        self._cells.zero_()
        self._kernel = comm.load_kernel(gemv_cells.KERNEL, flags=0)
        comm.barrier()  # all cells are 0 before any is written

    def __call__(
        self,
        weight: torch.Tensor,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        order: str = REMOTE_FIRST,
    ) -> torch.Tensor:
        """Run it. Arguments, result and errors as of :func:`gemv_all_reduce`."""
        comm = self.comm
        with telling_refusals(comm, NAME):
            _check(comm, weight, x, scale, out, order)
            tokens = 1 if x.dim() == 1 else x.shape[0]
            kinds = weight.shape[0], weight.dtype, x.dtype
            if kinds != (self.rows, self.weight_dtype, self.dtype) or tokens > self.tokens:
                given = f"{weight.shape[0]} rows, {tokens} tokens, {weight.dtype}, {x.dtype}"
                allowed = f"{self.rows} rows, up to {self.tokens} tokens, {self.weight_dtype}, {self.dtype}"
                raise ValueError(f"{NAME}: a handle for another shape (value={given}, allowed={allowed})")
            place = None if out is None or self.schedule != TWO_PHASE else comm.place(out)
        output = x.new_empty((*x.shape[:-1], self.rows)) if out is None else out
        if self.schedule == CELLS:
            self._launch_cells(weight, x, scale, output, tokens)
            return output
        results = self._results if place is None else output
        stamps, stamped = stamps_of(comm, self._programs)
        self._kernel.launch(
            (self._programs,),
            comm.peers(self._partials),
            self._partials,
            comm.peers(results),
            results,
            output,
            weight,
            x,
            scale,
            self.rows,
            weight.shape[1],
            weight.stride(0),
            x.stride(0) if x.dim() == 2 else 0,
            tokens,
            0 if scale is None or scale.numel() == 1 else 1,
            self._tiles_each,
            stamps,
            alike=f"{tokens} tokens, {'no ' if scale is None else ''}scale, output at {place}{stamped}",
            ROWS=self.tiling.rows,
            COLS=min(self.tiling.columns, MOST_DOT_COLUMNS) if self.tokens > 1 else self.tiling.columns,
            TP=self._padded,  # where partial results lie must not change between calls
            WIDE=INTERPRETED or self.dtype == torch.float32,
            PHASES=2 if self.schedule == TWO_PHASE else 1,
            REMOTE_FIRST=order == REMOTE_FIRST,
            COPIES=place is None,
            num_warps=self.tiling.warps,
            maxnreg=self.tiling.registers,
        )
        return output

    def _launch_cells(
        self, weight: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, output: torch.Tensor, tokens: int
    ) -> None:
        comm = self.comm
        stamps, stamped = stamps_of(comm, self._programs)
        self._kernel.launch(
            (self._programs,),
            comm.peers(self._cells),
            self._cells,
            output,
            weight,
            x,
            scale,
            self.rows,
            weight.shape[1],
            weight.stride(0),
            x.stride(0) if x.dim() == 2 else 0,
            tokens,
            0 if scale is None or scale.numel() == 1 else 1,
            self._rows_each,
            stamps,
            self.rows % self.tiling.rows == 0 and weight.shape[1] % self.tiling.columns == 0,  # EVEN, of this rank
            alike=f"{tokens} tokens, {'no ' if scale is None else ''}scale{stamped}",
            **constants_of_cells(
                self.tiling,
                ranks=comm.world_size,
                padded=self._padded,
                wide=INTERPRETED or self.dtype == torch.float32,
            ),
        )

    def close(self) -> None:
        """Let go of flags and workspace, once this rank's calls have ended. Idempotent, and no collective."""
        self._kernel.close()


def constants_of_cells(tiling: Tiling, *, ranks: int, padded: int, wide: bool) -> dict[str, Any]:
    """Constants and options of the kernel of cells (``ops/gemv_cells.py``)."""
    return {
        "N": ranks,
        "R": power_of_two(ranks),
        "ROWS": tiling.rows,
        "COLS": tiling.columns,
        "TP": padded,
        "WIDE": wide,
        "STAGES": tiling.stages,
        "EVICT": tiling.evict,
        "LANES": LANES,
        "num_warps": tiling.warps,
        "maxnreg": tiling.registers,
    }


def gemv_all_reduce(
    comm: Communicator,
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    schedule: str = AUTO,
    order: str = REMOTE_FIRST,
    tiling: Tiling | None = None,
    method: str = AUTO,
) -> torch.Tensor:
    """``y = x @ weight.T; comm.all_reduce(y)`` for few tokens, in one kernel. A call of the communicator.

    Partial results are float32, added up in the order of the ranks and rounded once. The first call of a shape makes
    what it needs (:class:`GemvAllReduce`), with all ranks; later ones may be captured into a graph.

    Args:
        comm: the ranks.
        weight: this rank's columns, [M, K]; float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; rows may lie
            apart. K may differ by rank.
        x: this rank's columns of 1 to 16 tokens, [T, K] or [K], of the weight's dtype; with a weight of 8 bits
            float32, float16 or bfloat16.
        scale: what a weight of 8 bits is multiplied by: float32, of one element, or of one a row, [M]. None for 1. On
            all ranks or on none; its values are this rank's own.
        out: for the result, contiguous. Symmetric memory (``comm.empty``), at one place on all ranks, saves a copy in
            two phases. None makes an ordinary tensor.
        schedule: ``cells`` and ``one_shot`` (every rank adds up everything; words carry their own readiness, or blocks
            meet), ``two_phase`` (each rank its share), or ``auto``.
        order: ``remote_first``: what peers add up is computed first; ``oblivious``: tiles in their order. In one shot
            all tiles go to all, and both are the same.
        tiling: how the kernel is cut; None takes what was fastest on an H100.
        method: ``fused``, ``unfused``, or ``auto``: unfused where that was measured to be faster (``ops.explain``).

    Returns:
        [T, M] or [M], the same bits on every rank.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        check_choice(NAME, "schedule", schedule, SCHEDULES)
        check_method(comm, NAME, method)
        _check(comm, weight, x, scale, out, order)
    tokens = power_of_two(1 if x.dim() == 1 else x.shape[0])
    rows = weight.shape[0]
    options: dict[str, Any] = {"weight_dtype": weight.dtype, "schedule": schedule, "tiling": tiling}
    key = (NAME, rows, tokens, x.dtype, *options.values())
    handle = kept(comm, key, lambda: GemvAllReduce(comm, rows, tokens, x.dtype, **options))
    sizes = rows, weight.shape[1], tokens
    if method_of(comm, NAME, method, key, sizes, weight.element_size()).method == UNFUSED:
        result = reference.gemv_all_reduce(comm, weight, x, scale=scale)
        return result if out is None else out.copy_(result)
    return handle(weight, x, scale=scale, out=out, order=order)


def _check_sizes(rows: int, tokens: int) -> None:
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{NAME}: rows of the weight (value={rows}, allowed=1..{MOST_ROWS})")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{NAME}: tokens (value={tokens}, allowed=1..{MOST_TOKENS})")


def _check(comm: Communicator, weight: object, x: object, scale: object, out: object, order: str) -> None:
    check_choice(NAME, "order", order, ORDERS)
    check_tensor(NAME, "weight", weight, comm.device, FLOATS + FLOAT8S, (2,))
    assert isinstance(weight, torch.Tensor)
    check_tensor(NAME, "x", x, comm.device, FLOATS if weight.dtype in FLOAT8S else (weight.dtype,), (1, 2))
    assert isinstance(x, torch.Tensor)
    _check_sizes(weight.shape[0], 1 if x.dim() == 1 else x.shape[0])
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{NAME}: columns of x (value={x.shape[-1]}, allowed={weight.shape[1]}, those of the weight)")
    for what, tensor in (("weight", weight), ("x", x)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{NAME}: neighbours in a row of {what} lie apart (value={tensor.stride()}, allowed=1)")
    if scale is not None:
        check_tensor(NAME, "scale", scale, comm.device, (torch.float32,), (0, 1))
        assert isinstance(scale, torch.Tensor)
        if weight.dtype not in FLOAT8S:
            allowed = ", ".join(map(str, FLOAT8S))
            raise ValueError(f"{NAME}: scale of a weight (value={weight.dtype}, allowed={allowed})")
        if scale.numel() not in (1, weight.shape[0]) or not scale.is_contiguous():
            allowed = f"one element, or {weight.shape[0]}, contiguous"
            raise ValueError(f"{NAME}: shape of scale (value={tuple(scale.shape)}, allowed={allowed})")
    if out is not None:
        check_tensor(NAME, "out", out, comm.device, (x.dtype,), (x.dim(),))
        assert isinstance(out, torch.Tensor)
        shape = (*x.shape[:-1], weight.shape[0])
        if out.shape != shape or not out.is_contiguous():
            raise ValueError(f"{NAME}: shape of out (value={tuple(out.shape)}, allowed={shape}, contiguous)")


@triton.jit
def _partial(
    weight, x, scale, tile, rows, columns, weight_stride, x_stride, tokens, scale_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32[ROWS, TP]: what this rank's columns add to a tile. Tokens that there are not are 0."""
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TP)
    lane = tl.arange(0, COLS)
    kind = weight.dtype.element_ty
    if kind.primitive_bitwidth == 8:  # of which there is no 0 to load in place of what there is not
        weight = weight.to(tl.pointer_type(tl.uint8), bitcast=True)
    weights = weight + row[:, None].to(tl.int64) * weight_stride
    if TP > 1:
        result = tl.zeros([ROWS, TP], tl.float32)
        for first in range(0, columns, COLS):
            column = first + lane
            there = (row[:, None] < rows) & (column[None, :] < columns)
            w = tl.load(weights + column[None, :], mask=there, other=0).to(kind, bitcast=True)
            known = (token[None, :] < tokens) & (column[:, None] < columns)
            v = tl.load(x + token[None, :] * x_stride + column[:, None], mask=known, other=0)
            if WIDE:  # also where kernels are interpreted, which takes bfloat16 for integers in a dot
                w, v = w.to(tl.float32), v.to(tl.float32)
            result = tl.dot(w.to(v.dtype), v, result, input_precision="ieee")  # 8 bits are exact in 16
    else:
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for first in range(0, columns, COLS):
            column = first + lane
            there = (row[:, None] < rows) & (column[None, :] < columns)
            w = tl.load(weights + column[None, :], mask=there, other=0).to(kind, bitcast=True).to(tl.float32)
            v = tl.load(x + column, mask=column < columns, other=0).to(tl.float32)
            sums += w * v[None, :]
        result = tl.sum(sums, axis=1)[:, None]
    if scale is not None:
        result *= tl.load(scale + row * scale_stride, mask=row < rows, other=0)[:, None]
    return result


@triton.jit
def _sum_of_ranks(partials, held, step, ranks, inside, mask):
    """float32[ROWS, TP]: a tile of every rank, added in their order."""
    result = tl.load(partials + held + inside, mask=mask, other=0)
    for sender in range(1, ranks):
        result += tl.load(partials + held + sender * step + inside, mask=mask, other=0)
    return result


@triton.jit
def _gemv_all_reduce(
    context, partials_of, partials, results_of, results, output, weight, x, scale,
    rows, columns, weight_stride, x_stride, tokens, scale_stride, tiles_each, stamps,
    ROWS: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr, WIDE: tl.constexpr,
    PHASES: tl.constexpr, REMOTE_FIRST: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane, token = tl.arange(0, ROWS)[:, None], tl.arange(0, TP)[None, :]
    inside = lane * TP + token
    each = tiles_each * ROWS * TP  # of what a rank sends to an owner
    is_token = token < tokens
    kind = output.dtype.element_ty

    if PHASES == 1:
        place = (generation & 1) * ranks
        for tile in range(program, tiles_each, programs):
            stamp(stamps, COMPUTE)
            part = _partial(weight, x, scale, tile, rows, columns, weight_stride, x_stride, tokens,
                            scale_stride, ROWS, COLS, TP, WIDE)  # fmt: skip
            mask = is_token & (tile * ROWS + lane < rows)
            stamp(stamps, SEND)
            for turn in range(ranks):
                peer = (rank + 1 + turn) % ranks
                put_weak(partials_of, peer, (place + rank) * each + tile * ROWS * TP + inside, part, mask)
        stamp(stamps, WAIT)
        barrier_acq_rel(context, program, generation)
        stamp(stamps, ADD)
        for tile in range(program, tiles_each, programs):
            mask = is_token & (tile * ROWS + lane < rows)
            total = _sum_of_ranks(partials, place * each + tile * ROWS * TP, each, ranks, inside, mask)
            tl.store(output + token * rows + tile * ROWS + lane, total.to(kind), mask=mask)
    else:
        for turn in range(ranks):
            owner = (rank + 1 + turn) % ranks if REMOTE_FIRST else turn
            for number in range(program, tiles_each, programs):
                tile = owner * tiles_each + number
                if tile * ROWS < rows:  # the last owners may have fewer
                    stamp(stamps, COMPUTE, owner)
                    part = _partial(weight, x, scale, tile, rows, columns, weight_stride, x_stride, tokens,
                                    scale_stride, ROWS, COLS, TP, WIDE)  # fmt: skip
                    mask = is_token & (tile * ROWS + lane < rows)
                    stamp(stamps, SEND, owner)
                    put_weak(partials_of, owner, rank * each + number * ROWS * TP + inside, part, mask)
            signal_release(context, owner, program, generation)
        stamp(stamps, WAIT)
        wait_all_acquire(context, program, generation)
        stamp(stamps, ADD)
        for number in range(program, tiles_each, programs):
            row = (rank * tiles_each + number) * ROWS + lane
            mask = is_token & (row < rows)
            total = _sum_of_ranks(partials, number * ROWS * TP, each, ranks, inside, mask).to(kind)
            for turn in range(ranks):
                put_weak(results_of, (rank + 1 + turn) % ranks, token * rows + row, total, mask)
        stamp(stamps, WAIT)
        barrier_acq_rel(context, programs + program, generation)
        if COPIES:
            stamp(stamps, COPY)
            for owner in range(ranks):
                for number in range(program, tiles_each, programs):
                    row = (owner * tiles_each + number) * ROWS + lane
                    mask = is_token & (row < rows)
                    value = tl.load(results + token * rows + row, mask=mask)
                    tl.store(output + token * rows + row, value, mask=mask)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _gemv_all_reduce

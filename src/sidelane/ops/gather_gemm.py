# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_gather_gemm: a column-parallel linear layer whose input lies spread over the ranks, in one kernel.

Equivalent: ``y = all_gather(x) @ weight.T`` (``reference.all_gather_gemm``); sums are float32, rounded once.

Any block of two ranks::

    rank 0   first: ready | rows that nobody sends yet -> 1, each with its flag | tiles of 0 | wait: tiles of 1
    rank 1   first: ready | rows that nobody sends yet -> 0, each with its flag | tiles of 1 | wait: tiles of 0

Blocks take what is to be sent from a common counter, so that each tile of rows is sent once, and a block that computes
knows that everything is sent or in the hands of a block that runs: hence it may wait, and any grid will do. ``ready``
says that the last launch has ended, which read what now comes. A launch needs no end together: every row that comes is
waited for by some tile.

Legend: N ranks; M rows of each rank; K columns of ``x``; H columns of the result, this rank's; a tile is ROWS rows and
COLS columns, of products over DEPTH columns of ``x`` at a time. ``x`` [M, K], ``weight`` [H, K], ``gathered`` [N, M, K]
without the own part, ``output`` [N * M, H].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sidelane.choice.fused import FUSED, SPLIT
from sidelane.collectives import Communicator
from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    put_weak,
    rank_of,
    signal_all_release,
    signal_release,
    wait_acquire,
    world_size_of,
)
from sidelane.device.stamps import COMPUTE, END, SEND, WAIT, stamp
from sidelane.memory.lasting import lasting
from sidelane.ops import reference
from sidelane.ops.auto import AUTO, check_method, method_of, options_of
from sidelane.ops.gemm import TileSizes, tile_at, tile_product
from sidelane.ops.handle import FLOATS, kept, programs_of, telling_refusals
from sidelane.ops.operands import MOST_ELEMENTS, check_operands
from sidelane.ops.split_gather_gemm import handle_of, split_all_gather_gemm
from sidelane.ops.timeline import stamps_of

NAME = "all_gather_gemm"


class AllGatherGemm:
    """The flags, counters and workspace of :func:`all_gather_gemm` for one shape. Collective: alike on all ranks.

    It takes ``world_size`` times the bytes of ``x`` in symmetric memory.

    Args:
        comm: the ranks.
        rows: M, of each rank.
        depth: K, columns of x.
        columns: H, of the result.
        dtype: of x, weight and result: float32, float16 or bfloat16.
        tiles: how the product is cut.

    Raises:
        ValueError, TypeError: a size or dtype that there is not.
        UnavailableError: inside a capture, or more than 8 ranks.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        depth: int,
        columns: int,
        dtype: torch.dtype,
        *,
        tiles: TileSizes | None = None,
    ) -> None:
        with telling_refusals(comm, NAME):
            if min(rows, depth, columns) < 1 or comm.world_size * rows * max(depth, columns) > MOST_ELEMENTS:
                allowed = f"1 and more, {MOST_ELEMENTS} elements of a matrix"
                raise ValueError(f"{NAME}: rows, depth, columns (value={rows}, {depth}, {columns}, allowed={allowed})")
            if dtype not in FLOATS:
                raise TypeError(f"{NAME}: dtype (value={dtype}, allowed={', '.join(map(str, FLOATS))})")
        self.comm, self.shape = comm, (rows, depth, columns, dtype)
        self._tiles = tiles = tiles or TileSizes.of(dtype)
        row_tiles = -(-rows // tiles.rows)
        needed = comm.world_size * row_tiles * -(-columns // tiles.columns)
        self._programs = programs_of(comm, needed, tiles.per_unit)
        self._counters = lasting(comm.device, lambda: torch.zeros(3, dtype=torch.int32, device=comm.device))
        self._gathered = comm.empty(comm.world_size * rows, depth, dtype=dtype)
        self._kernel = comm.load_kernel(_all_gather_gemm, flags=1 + row_tiles)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run it. Arguments, result and errors as of :func:`all_gather_gemm`."""
        comm, tiles = self.comm, self._tiles
        with telling_refusals(comm, NAME):
            check_operands(NAME, comm, x, weight)
            given = (*x.shape, weight.shape[0], weight.dtype)
            if given != self.shape:
                raise ValueError(f"{NAME}: a handle for another shape (value={given}, allowed={self.shape})")
        rows, depth, columns, dtype = self.shape
        output = x.new_empty(comm.world_size * rows, columns)
        stamps, stamped = stamps_of(comm, self._programs)
        self._kernel.launch(
            (self._programs,),
            comm.peers(self._gathered),
            self._gathered,
            self._counters,
            x,
            weight,
            output,
            rows,
            depth,
            columns,
            x.stride(0),
            weight.stride(0),
            stamps,
            alike=f"{rows} rows, {depth} columns of x, {columns} of the result{stamped}",
            **tiles.constants(depth, depth, dtype),
        )
        return output

    def close(self) -> None:
        """Let go of flags, once this rank's calls have ended. Idempotent, and no collective."""
        self._kernel.close()


def all_gather_gemm(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    tiles: TileSizes | None = None,
    method: str = AUTO,
) -> torch.Tensor:
    """``all_gather(x) @ weight.T``, in one kernel that computes what has come. A call of the communicator.

    The first call of a shape makes what it needs (:class:`AllGatherGemm`), with all ranks; later ones may be captured
    into a graph.

    Args:
        comm: the ranks.
        x: this rank's rows, [M, K]; neighbours in a row are neighbours in memory. As many on each rank.
        weight: this rank's rows, [H, K], of x's dtype: float32, float16 or bfloat16. As many on each rank.
        tiles: how the product is cut.
        method: ``fused``; ``split``, that is :func:`split_all_gather_gemm`; ``unfused``; or ``auto``: the fastest one
            (``ops.explain`` says which, and why).

    Returns:
        Rows of all ranks, [N * M, H].

    Raises:
        ValueError, TypeError: wrong arguments; nothing has moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        check_method(comm, NAME, method)
        check_operands(NAME, comm, x, weight)
    (rows, depth), columns, dtype = x.shape, weight.shape[0], weight.dtype
    key = (NAME, rows, depth, columns, dtype, tiles)

    def handle(_: int = 0) -> AllGatherGemm:
        return kept(comm, key, lambda: AllGatherGemm(comm, rows, depth, columns, dtype, tiles=tiles))

    make: dict[str, Callable[[int], object]] = {FUSED: handle, SPLIT: lambda pieces: handle_of(comm, x, pieces)}
    found = method_of(comm, NAME, method, key, (rows, depth, columns), dtype.itemsize, make)
    if found.method == FUSED:
        return handle()(x, weight)
    if found.method == SPLIT:
        return split_all_gather_gemm(comm, x, weight, **options_of(found))
    return reference.all_gather_gemm(comm, x, weight)


@triton.jit
def put_rows(gathered_of, peer, x, row, place, row_mask, depth, x_stride, DEPTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows of ``x`` become rows ``place`` of what a peer gathers, DEPTH columns at a time. Weak stores."""
    lane = tl.arange(0, DEPTH)
    source, target = row.to(tl.int64)[:, None] * x_stride, place.to(tl.int64)[:, None] * depth
    for first in range(0, depth, DEPTH):
        column = first + lane[None, :]
        mask = row_mask[:, None] & (column < depth)
        put_weak(gathered_of, peer, target + column, tl.load(x + source + column, mask=mask), mask, ALIGNED)


@triton.jit
def _all_gather_gemm(
    context, gathered_of, gathered, counters, x, weight, output, rows, depth, columns, x_stride, weight_stride, stamps,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
    row_tiles, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLS)
    parts = (ranks - 1) * row_tiles
    part = tl.atomic_add(counters + 2, 1, sem="relaxed", scope="gpu")
    while part < parts:
        peer, row_tile = (rank + 1 + part // row_tiles) % ranks, part % row_tiles
        stamp(stamps, WAIT, peer)
        wait_acquire(context, peer, 0, generation)
        stamp(stamps, SEND, peer)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        put_rows(gathered_of, peer, x, row, rank * rows + row, row < rows, depth, x_stride, DEPTH, ALIGNED)
        signal_release(context, peer, 1 + row_tile, generation)
        part = tl.atomic_add(counters + 2, 1, sem="relaxed", scope="gpu")

    tiles = row_tiles * across
    number = program  # of a tile, among those of one rank's rows
    for turn in range(ranks):
        source = (rank + ranks - turn) % ranks  # in the order in which they come
        while number < tiles:
            row_tile, column_tile = tile_at(number, row_tiles, across, GROUP)
            row = row_tile * ROWS + tl.arange(0, ROWS)
            column = column_tile * COLS + tl.arange(0, COLS)
            rows_of, stride = x, x_stride
            if turn > 0:
                rows_of, stride = gathered + (source * rows).to(tl.int64) * depth, depth
                stamp(stamps, WAIT, source)
                wait_acquire(context, source, 1 + row_tile, generation)
            stamp(stamps, COMPUTE, source)
            # One product for both: each in the text has shared memory of its own.
            values = tile_product(rows_of, weight, row, column, row < rows, depth, stride, weight_stride, columns,
                                  ROWS, COLS, DEPTH, WHOLE, WIDE)  # fmt: skip
            place = (source * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
            tl.store(output + place, values.to(DTYPE), mask=(row < rows)[:, None] & (column < columns)[None, :])
            number += programs
        number -= tiles
    stamp(stamps, WAIT)
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        tl.store(counters + 2, 0)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _all_gather_gemm

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""gemm_reduce_scatter and gemm_all_reduce: row-parallel linear layers whose tiles leave as they are finished.

Equivalent: ``y = x @ weight.T``, then a reduce-scatter of its rows, or an all-reduce (``reference``). Partial results
are rounded to the dtype of ``x`` to travel, added in float32 in the order of the ranks, and rounded again.

Every rank adds up its share of the rows. Block b of two ranks, ``remote_first``::

    rank 0   tiles of 1 -> 1 | signal 1 | tiles of 0 | signal 0 | wait all | add tiles of 0 [-> all | signal, wait all]
    rank 1   tiles of 0 -> 0 | signal 0 | tiles of 1 | signal 1 | wait all | add tiles of 1 [-> all | signal, wait all]

Block b of every rank computes the same tiles, and waits for blocks b only, behind all that these wait for. A grid has
no more blocks than fit on the GPU, so that all of them run. Tiles are counted through all owners, so that no owner's
last round leaves blocks idle.

Why partial results of one call do not run into those of the last: a call of ``gemm_all_reduce`` ends when every owner
has added up and stored; a block of ``gemm_reduce_scatter`` says that its launch has begun, behind the last one, before
others send to it. An owner stores results where all ranks have begun: it has their partial results.

Example: 2 ranks, 5 rows: rank 0 owns rows 0 to 2, rank 1 rows 3 and 4. With 2 tiles each and 3 blocks, block 0 has the
tiles 0 and 3, block 1 the tile 1, block 2 the tile 2.

Legend: N ranks; M rows; K columns of ``x``, this rank's; H columns of the result; E rows of an owner, of which the last
may have fewer; a tile is ROWS rows and COLS columns, of products over DEPTH columns of ``x`` at a time. ``x`` [M, K],
``weight`` [H, K], ``partials`` [N, E, H], ``output`` [E, H] or, of an all-reduce, [M, H].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import triton
import triton.language as tl

from sidelane.choice.fused import FUSED, SPLIT, MethodChoice
from sidelane.choice.fused_order import REMOTE_FIRST
from sidelane.collectives import Communicator
from sidelane.device.context import (
    barrier_acq_rel,
    begin,
    end,
    put_weak,
    rank_of,
    signal_all_release,
    signal_release,
    wait_acquire,
    wait_all_acquire,
    world_size_of,
)
from sidelane.device.stamps import ADD, COMPUTE, END, SEND, WAIT, stamp
from sidelane.ops import reference
from sidelane.ops.auto import AUTO, asked_of, check_method, method_of, options_of, recalled, remember
from sidelane.ops.gemm import TileSizes, tile_at, tile_product
from sidelane.ops.handle import FLOATS, kept, programs_of, telling_refusals
from sidelane.ops.operands import check_operands, check_sizes
from sidelane.ops.routings import DEFAULT_PIECES
from sidelane.ops.split_gemm_reduce import handle_of, split_gemm_all_reduce, split_gemm_reduce_scatter
from sidelane.ops.timeline import stamps_of

SCATTER, ALL = "gemm_reduce_scatter", "gemm_all_reduce"


class GemmReduce:
    """Flags and workspace of :func:`gemm_reduce_scatter` or :func:`gemm_all_reduce` for one shape. Collective.

    It takes the bytes of the whole result in symmetric memory, and with ``gathers`` twice as many.

    Args:
        comm: the ranks.
        rows: M, of the whole result.
        columns: H, of the result.
        dtype: of x, weight and result: float32, float16 or bfloat16.
        gathers: every rank gets everything: an all-reduce.
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
        columns: int,
        dtype: torch.dtype,
        *,
        gathers: bool,
        tiles: TileSizes | None = None,
    ) -> None:
        self._name = ALL if gathers else SCATTER
        with telling_refusals(comm, self._name):
            check_sizes(self._name, comm, rows, columns, scatters=not gathers)
            if dtype not in FLOATS:
                raise TypeError(f"{self._name}: dtype (value={dtype}, allowed={', '.join(map(str, FLOATS))})")
        self.comm, self.rows, self.columns, self.dtype, self.gathers = comm, rows, columns, dtype, gathers
        self._tiles = tiles = tiles or TileSizes.of(dtype)
        n = comm.world_size
        self._each = -(-rows // n)
        needed = n * -(-self._each // tiles.rows) * -(-columns // tiles.columns)
        self._programs = programs_of(comm, needed, tiles.per_unit)
        self._partials = comm.empty(n, self._each, columns, dtype=dtype)
        self._results = comm.empty(rows, columns, dtype=dtype) if gathers else None
        self._kernel = comm.load_kernel(_gemm_reduce, flags=2 * self._programs)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *, order: str = REMOTE_FIRST) -> torch.Tensor:
        """Run it. Arguments, result and errors as of :func:`gemm_reduce_scatter` and :func:`gemm_all_reduce`."""
        comm = self.comm
        with telling_refusals(comm, self._name):
            check_operands(self._name, comm, x, weight, order, scatters=not self.gathers)
            given = x.shape[0], weight.shape[0], weight.dtype
            if given != (self.rows, self.columns, self.dtype):
                allowed = self.rows, self.columns, self.dtype
                raise ValueError(f"{self._name}: a handle for another shape (value={given}, allowed={allowed})")
        return self.run(x, weight, order)

    def run(self, x: torch.Tensor, weight: torch.Tensor, order: str) -> torch.Tensor:
        """The same, of arguments that were checked."""
        comm, tiles = self.comm, self._tiles
        output = x.new_empty(self._each, self.columns) if self._results is None else self._results
        stamps, stamped = stamps_of(comm, self._programs)
        self._kernel.launch(
            (self._programs,),
            comm.peers(self._partials),
            self._partials,
            comm.peers(self._partials if self._results is None else self._results),
            output,
            x,
            weight,
            self.rows,
            x.shape[1],
            self.columns,
            x.stride(0),
            weight.stride(0),
            self._each,
            stamps,
            alike=stamped.strip(),
            REMOTE_FIRST=order == REMOTE_FIRST,
            GATHERS=self.gathers,
            **tiles.constants(x.shape[1], self.columns, self.dtype),
        )
        return output

    def close(self) -> None:
        """Let go of flags and workspace, once this rank's calls have ended. Idempotent, and no collective."""
        self._kernel.close()


def gemm_reduce_scatter(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    order: str = REMOTE_FIRST,
    tiles: TileSizes | None = None,
    method: str = AUTO,
) -> torch.Tensor:
    """``x @ weight.T`` whose rows are added up, each rank its share, in one kernel. A call of the communicator.

    The first call of a shape makes what it needs (:class:`GemmReduce`), with all ranks; later ones may be captured
    into a graph.

    Args:
        comm: the ranks.
        x: this rank's columns, [M, K]; M is a multiple of the ranks, K the same on all.
        weight: this rank's columns, [H, K], of x's dtype: float32, float16 or bfloat16.
        order: ``remote_first``: tiles for peers come first; ``oblivious``: tiles in the order of ranks.
        tiles: how the product is cut.
        method: ``fused``; ``split``, that is :func:`split_gemm_reduce_scatter` or :func:`split_gemm_all_reduce`;
            ``unfused``; or ``auto``: the fastest one (``ops.explain`` says which, and why).

    Returns:
        This rank's rows, [M / N, H].

    Raises:
        ValueError, TypeError: wrong arguments; nothing has moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    return _reduced(comm, x, weight, order, tiles, method, gathers=False)


def gemm_all_reduce(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    order: str = REMOTE_FIRST,
    tiles: TileSizes | None = None,
    method: str = AUTO,
) -> torch.Tensor:
    """``y = x @ weight.T; comm.all_reduce(y)``, in one kernel: for more tokens than ``gemv_all_reduce`` takes.

    Arguments and errors as of :func:`gemm_reduce_scatter`, with any number of rows.

    Returns:
        [M, H], the same bits on every rank. The next call of this shape writes it again.
    """
    return _reduced(comm, x, weight, order, tiles, method, gathers=True)


def _reduced(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    order: str,
    tiles: TileSizes | None,
    method: str,
    *,
    gathers: bool,
) -> torch.Tensor:
    name = ALL if gathers else SCATTER
    asked = asked_of((name, method, order, tiles), x, weight)
    found = recalled(comm, asked)
    if found is None:
        found = _found(comm, x, weight, order, tiles, method, asked, gathers=gathers)
    if found.method == FUSED:
        handle: GemmReduce = comm.kept[name, x.shape[0], weight.shape[0], weight.dtype, tiles]
        return handle.run(x, weight, order)
    if found.method == SPLIT:
        split = split_gemm_all_reduce if gathers else split_gemm_reduce_scatter
        return split(comm, x, weight, **options_of(found))
    return (reference.gemm_all_reduce if gathers else reference.gemm_reduce_scatter)(comm, x, weight)


def _found(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    order: str,
    tiles: TileSizes | None,
    method: str,
    asked: Hashable,
    *,
    gathers: bool,
) -> MethodChoice:
    """How a call goes that is new, checked, and with all that it needs."""
    name = ALL if gathers else SCATTER
    with telling_refusals(comm, name):
        check_method(comm, name, method)
        check_operands(name, comm, x, weight, order, scatters=not gathers)
    rows, columns, dtype = x.shape[0], weight.shape[0], weight.dtype
    key = (name, rows, columns, dtype, tiles)

    def handle(_: int = 0) -> GemmReduce:
        return kept(comm, key, lambda: GemmReduce(comm, rows, columns, dtype, gathers=gathers, tiles=tiles))

    make: dict[str, Callable[[int], object]]
    make = {
        FUSED: handle,
        SPLIT: lambda pieces: handle_of(comm, x, weight, gathers=gathers).make(pieces or DEFAULT_PIECES),
    }
    found = method_of(comm, name, method, key, (rows, x.shape[1], columns), dtype.itemsize, make)
    remember(comm, asked, name, key, found, method)
    if found.method == FUSED:
        handle()
    return found


@triton.jit
def _gemm_reduce(
    context, partials_of, partials, results_of, output, x, weight,
    rows, depth, columns, x_stride, weight_stride, each, stamps,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr, REMOTE_FIRST: tl.constexpr,
    GATHERS: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    across = tl.cdiv(columns, COLS)
    tiles_each = tl.cdiv(each, ROWS) * across
    if not GATHERS:
        signal_all_release(context, programs + program, generation)  # the last launch has added up
    for turn in range(ranks):
        owner = (rank + 1 + turn) % ranks if REMOTE_FIRST else turn
        owned = tl.minimum(tl.maximum(rows - owner * each, 0), each)
        row_tiles = tl.cdiv(owned, ROWS)
        if not GATHERS:
            stamp(stamps, WAIT, owner)
            wait_acquire(context, owner, programs + program, generation)
        first = (program + programs - owner * tiles_each % programs) % programs
        for number in range(first, row_tiles * across, programs):
            row_tile, column_tile = tile_at(number, row_tiles, across, GROUP)
            row = row_tile * ROWS + tl.arange(0, ROWS)
            column = column_tile * COLS + tl.arange(0, COLS)
            stamp(stamps, COMPUTE, owner)
            values = tile_product(x, weight, owner * each + row, column, row < owned, depth, x_stride, weight_stride,
                                  columns, ROWS, COLS, DEPTH, WHOLE, WIDE)  # fmt: skip
            place = (rank * each + row).to(tl.int64)[:, None] * columns + column[None, :]
            stamp(stamps, SEND, owner)
            put_weak(partials_of, owner, place, values.to(DTYPE), (row < owned)[:, None] & (column < columns)[None, :],
                     ALIGNED)  # fmt: skip
        signal_release(context, owner, program, generation)
    stamp(stamps, WAIT)
    wait_all_acquire(context, program, generation)
    stamp(stamps, ADD)
    owned = tl.minimum(tl.maximum(rows - rank * each, 0), each)
    row_tiles = tl.cdiv(owned, ROWS)
    first = (program + programs - rank * tiles_each % programs) % programs
    for number in range(first, row_tiles * across, programs):
        row_tile, column_tile = tile_at(number, row_tiles, across, GROUP)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        column = column_tile * COLS + tl.arange(0, COLS)
        inside = row.to(tl.int64)[:, None] * columns + column[None, :]
        mask = (row < owned)[:, None] & (column < columns)[None, :]
        total = tl.load(partials + inside, mask=mask, other=0).to(tl.float32)
        for sender in range(1, ranks):
            step = (sender * each).to(tl.int64) * columns
            total += tl.load(partials + step + inside, mask=mask, other=0).to(tl.float32)
        if GATHERS:
            step = (rank * each).to(tl.int64) * columns
            for turn in range(ranks):
                put_weak(results_of, (rank + 1 + turn) % ranks, step + inside, total.to(DTYPE), mask, ALIGNED)
        else:
            tl.store(output + inside, total.to(DTYPE), mask=mask)
    if GATHERS:
        stamp(stamps, WAIT)
        barrier_acq_rel(context, programs + program, generation)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _gemm_reduce

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""gemm_all_to_all among several nodes: tiles for this node go straight to its ranks, others leave by rows of tiles.

Equivalent: as of ``ops.gemm`` (the fused operators paper, section III). Without a weight rows go unchanged.

Any block of rank 0, on a node with rank 1; ranks 2 and 3 are on another node::

    first: ready, open | tiles for 2, 3 -> send buffer; last of a row of tiles: descriptor -> ring | wait for 1 | tiles
    for 1 -> 1 | tiles for 0 | last: done, end -> ring, wait for the node, for the ends of 2 and 3, and for its own

A slice is a row of tiles, ROWS rows of the result, which are contiguous there as they are here. Only the kernel knows
how many there are; the end of a call, which comes behind them, tells the others. For what blocks wait for see
``embedding``.

Legend: as in ``ops.gemm``. ``sends`` [rows, H]; NP lanes, one for each rank.
"""

from __future__ import annotations

from typing import Any

import torch

from sidelane.choice.fused_heuristic import REMOTE_FIRST
from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    signal_all_release,
    wait_acquire,
    wait_all_acquire,
)
from sidelane.device.memory import pointer
from sidelane.device.triton_language import tl, triton
from sidelane.memory.persistent import lasting
from sidelane.ops.gemm import NAME, ROW_TILES, TileSizes, tile_at, tile_product
from sidelane.ops.handle import check_dtype, kept, power_of_two, programs_of, telling_refusals
from sidelane.ops.operands import apart_from, check_most_rows, check_rows, check_weight, experts_of
from sidelane.ops.scale_out.device import finish_acq_rel, near_of, open_release, send_release
from sidelane.ops.scale_out.ranks import FarKernel, ScaleOut


class GemmAcrossNodes:
    """Flags, buffers and output of :func:`gemm_all_to_all` for one shape. Collective: alike on all ranks.

    Args:
        ranks: ranks of all nodes.
        most_rows: largest number of rows that any rank gets in a call.
        columns: H, number of columns of the result.
        dtype: dtype of x, weight and result: float32, float16 or bfloat16.
        tiles: tile sizes of the product, or of the rows.

    Raises:
        ValueError, TypeError: a size or dtype is not allowed.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """

    def __init__(
        self, ranks: ScaleOut, most_rows: int, columns: int, dtype: torch.dtype, *, tiles: TileSizes | None = None
    ) -> None:
        comm: Any = ranks
        with telling_refusals(comm, NAME):
            check_most_rows(NAME, most_rows, columns)
            check_dtype(NAME, dtype)
        self.ranks, self.most_rows, self.columns, self.dtype = ranks, most_rows, columns, dtype
        self._tiles = tiles or TileSizes.of(dtype)
        needed = (ranks.world_size - 1 + -(-most_rows // self._tiles.rows)) * -(-columns // self._tiles.columns)
        self._programs, device = programs_of(comm, needed, self._tiles.per_unit), ranks.device
        self._order = lasting(device, lambda: torch.tensor(ranks.order, dtype=torch.int32, device=device))
        self._sends = torch.empty(0, columns, dtype=dtype, device=device)
        self._counters = torch.empty(0, dtype=torch.int32, device=device)
        with ranks.naming():
            self._output = ranks.near.empty(most_rows, columns, dtype=dtype)
        self._kernel = FarKernel(ranks, _gemm_all_to_all, flags=2)
        ranks.agree(NAME, (most_rows, columns, str(dtype)))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, counts: torch.Tensor) -> torch.Tensor:
        """Run the operator with arguments that were checked; without a weight it sends rows unchanged."""
        ranks, tiles, experts = self.ranks, self._tiles, experts_of(weight, counts)
        x = apart_from(self._output, x)
        comm: Any = ranks
        groups = ranks.world_size * (experts or 1)
        row_tiles = -(-x.shape[0] // tiles.rows) + groups  # at most
        with telling_refusals(comm, NAME):
            self._kernel.require_room(NAME, row_tiles if ranks.fars else 0)
            self._make_room(x.shape[0], row_tiles)
        self._kernel.launch(
            (self._programs,),
            ranks.near.peers(self._output),
            self._sends,
            self._counters,
            x,
            weight,
            counts,
            self._order,
            ranks.world_size,
            x.shape[0],
            x.shape[1],
            self.columns,
            x.stride(0),
            0 if weight is None else weight.stride(-2),
            experts or 1,
            weight.stride(0) if weight is not None and experts else 0,
            self.most_rows,
            x.shape[1] % tiles.depth == 0,  # WHOLE, of this rank
            source=self._sends,
            landing=self._output,
            stride=0,
            alike=f"{experts or 1} experts",
            EP=power_of_two(experts or 1),
            NP=power_of_two(ranks.world_size),
            **tiles.constants(self.columns, self.dtype),
        )
        return self._output

    def _make_room(self, rows: int, row_tiles: int) -> None:
        """Let the send buffer hold so many rows, and the counters so many rows of tiles."""
        device = self.ranks.device
        if self._sends.shape[0] < rows:
            shape = power_of_two(rows), self.columns
            self._sends = lasting(device, lambda: torch.empty(shape, dtype=self.dtype, device=device))
        if self._counters.numel() < 2 + row_tiles:
            count = power_of_two(2 + row_tiles)
            self._counters = lasting(device, lambda: torch.zeros(count, dtype=torch.int32, device=device))


def gemm_all_to_all(
    ranks: ScaleOut,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    *,
    most_rows: int,
    tiles: TileSizes | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and send its rows to the ranks of ``counts`` on all nodes, in one kernel.

    Sums are float32, rounded once. The first call of a shape makes its resources (:class:`GemmAcrossNodes`), with all
    ranks.

    Args:
        ranks: ranks of all nodes.
        x: see ``ops.gemm_all_to_all``, as the following.
        weight: matrix [H, K], or matrices of up to 64 experts, [E, H, K].
        counts: number of rows from rank i to rank j in row i, column j, [N, N], or with several experts, [N, N, E];
            int32 or int64, on the device, the same on all ranks.
        most_rows: largest number of rows that any rank gets. Rows beyond it are left out.
        tiles: tile sizes of the product.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on; the rows behind them are unchanged. The next
        call of this shape overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; on the other ranks PeerError, and there are no more calls.
        UnavailableError: inside of a capture; a device that cannot run it.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """
    comm: Any = ranks
    ranks.require_open()
    with telling_refusals(comm, NAME):
        check_rows(NAME, comm, x, counts, most_rows, REMOTE_FIRST, experts_of(weight))
        check_weight(NAME, comm, x, weight, most_rows)
    columns, dtype = weight.shape[-2], weight.dtype
    key = (NAME, most_rows, columns, dtype, tiles)
    return kept(comm, key, lambda: GemmAcrossNodes(ranks, most_rows, columns, dtype, tiles=tiles))(x, weight, counts)


def all_to_all_rows(ranks: ScaleOut, x: torch.Tensor, counts: torch.Tensor, *, most_rows: int) -> torch.Tensor:
    """Send rows unchanged to the ranks of ``counts`` on all nodes, as :func:`gemm_all_to_all` does with its results.

    With ``counts.transpose(0, 1).contiguous()`` it brings rows back: the gradient of a GEMM's results, for example.

    Args:
        ranks: see :func:`gemm_all_to_all`, as the following.
        x: rows for rank 0, for rank 1, and so on, [rows, H].
        counts: number of rows from rank i to rank j, [N, N].
        most_rows: largest number of rows that any rank gets.

    Returns:
        Tensor [most_rows, H], which the next call of this shape overwrites.

    Raises:
        Exception: as :func:`gemm_all_to_all`.
    """
    comm: Any = ranks
    ranks.require_open()
    with telling_refusals(comm, NAME):
        check_rows(NAME, comm, x, counts, most_rows, REMOTE_FIRST)
    columns, dtype = x.shape[1], x.dtype
    key = (NAME, "rows", most_rows, columns, dtype)
    made = kept(comm, key, lambda: GemmAcrossNodes(ranks, most_rows, columns, dtype, tiles=ROW_TILES))
    return made(x, None, counts)


@triton.jit
def _gemm_all_to_all(
    context, far, outputs, sends, counters, x, weight, counts, order, ranks, rows, depth, columns,
    x_stride, weight_stride, experts, expert_stride, most_rows, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr, EP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
        open_release(far, generation)
    rank = tl.load(order + ranks - 1)
    lane, kind = tl.arange(0, NP)[:, None], tl.arange(0, EP)[None, :]
    known = (lane < ranks) & (kind < experts)
    sent = tl.load(counts + (rank * ranks + lane) * experts + kind, mask=known, other=0).to(tl.int32)
    across = tl.cdiv(columns, COLS)
    number = program  # number of a tile, among those of one expert for one rank
    before_tiles = 0  # rows of tiles in front of these
    for turn in range(ranks):
        peer = tl.load(order + turn)
        near = near_of(far, peer)
        there = tl.where(near >= 0, tl.load(outputs + tl.maximum(near, 0)), sends.to(tl.int64))
        came = tl.load(counts + (lane * ranks + peer) * experts + kind, mask=known, other=0).to(tl.int32)
        for expert in range(experts):
            before = (lane == peer) & (kind < expert)
            count = tl.sum(tl.where((lane == peer) & (kind == expert), sent, 0))
            first = tl.sum(tl.where((lane < peer) | before, sent, 0))
            to = tl.sum(tl.where(lane < rank, came, 0)) + tl.sum(tl.where(before, sent, 0))
            count = tl.maximum(
                tl.minimum(tl.minimum(count, rows - first), most_rows - to), 0
            )  # what is there, and fits
            base = tl.where(near >= 0, to, first)
            row_tiles = tl.cdiv(count, ROWS)
            tiles = row_tiles * across
            if (number < tiles) & (near >= 0):
                wait_acquire(context, near, 0, generation)
            while number < tiles:
                row_tile, column_tile = tile_at(number, row_tiles, across, GROUP)
                top = row_tile * ROWS
                row = top + tl.arange(0, ROWS)
                column = column_tile * COLS + tl.arange(0, COLS)
                inside = (row < count)[:, None] & (column < columns)[None, :]
                if weight is None:
                    values = tl.load(x + (first + row).to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside)
                else:
                    own = weight + (peer.to(tl.int64) * 0 + expert) * expert_stride
                    values = tile_product(x, own, first + row, column, row < count, depth, x_stride, weight_stride,
                                          columns, ROWS, COLS, DEPTH, WHOLE, WIDE)  # fmt: skip
                # One store for both: two would hold the addresses of both in registers.
                place = (base + row).to(tl.int64)[:, None] * columns + column[None, :]
                tl.store(pointer(there, DTYPE, ALIGNED) + place, values.to(DTYPE), mask=inside)
                if near < 0:  # noqa: SIM102  # both sides of an `and` would run
                    if arrive_acq_rel(counters + 2 + before_tiles + row_tile, across):
                        some = tl.minimum(ROWS, count - top)
                        source, target = (first + top).to(tl.int64) * columns, (to + top).to(tl.int64) * columns
                        send_release(far, generation, peer, -1, source, target, 1, some * columns)
                number += programs
            number -= tiles
            before_tiles += row_tiles
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        signal_all_release(context, 1, generation)  # done
        wait_all_acquire(context, 1, generation)
        finish_acq_rel(far, generation)
    end(context, generation)


KERNEL = _gemm_all_to_all

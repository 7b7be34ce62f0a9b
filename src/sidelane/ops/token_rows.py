# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Rows that travel to other ranks and on into memory of the caller's own, in one kernel: the way of DeepEP's tokens.

Equivalent: ``all_to_all_rows`` with one term a row, and a copy of what came. Here each tile of rows has a flag, and the
program that sends tiles copies those that come for it in the meantime, so that the copy takes the memory while the link
takes the tiles::

    program p of rank 0   wait: 1 is ready | tile p -> 1, flag | tile p + P -> 1, flag | tile p of 1: wait, copy | ...
    program p of rank 1   wait: 0 is ready | tile p -> 0, flag | tile p + P -> 0, flag | tile p of 0: wait, copy | ...

A program waits for tiles of the program with its number only, and for the first program of a rank, so that any grid
will do (``embedding``). A rank is ready when its launch begins, since the one before has copied all that came; nobody
waits at the end. Rows that stay are copied at once; half of the programs begin with these.

On few compute units the link is idle while a program waits for its tile to arrive, or copies. There the last program
says that all tiles have been sent and waits for its peers, as in ``gemm``, and copies follow the kernel.

Two tensors may travel side by side, such as values and their scales: a tile has columns of either.

Example: 2 ranks, 3 tiles from rank 0 to rank 1, 2 programs. Program 0 sends tiles 0 and 2, program 1 tile 1, and then
its tiles of rows that stay are 1, 3 and so on, since 3 tiles have been dealt out. Programs 0 and 1 of rank 1 copy the
same tiles.

Legend: N ranks; P programs; R rows that leave; C rows that an output has room for; H columns of ``x``, S of ``beside``,
of 2 bytes each; a tile is ROWS rows and COLS columns, GROUP rows of tiles are moved column by column. ``x`` [any, H],
``beside`` [any, S], ``leaving`` int32[R, 1] has the row of each that leaves; ``output`` [C, H], and behind it
[C, S]. Widths and strides are in UNIT elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidelane.device import layout
from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    rank_of,
    signal_all_release,
    signal_release,
    wait_acquire,
    wait_all_acquire,
    world_size_of,
)
from sidelane.device.triton_language import tl, triton
from sidelane.memory.storage import persistent
from sidelane.ops.gemm import ROW_TILES, TileSizes, tile_at
from sidelane.ops.handle import KernelHandle, buffer_lock, programs_of, register_limit
from sidelane.session import Communicator

MAX_RANKS = tl.constexpr(layout.MAX_RANKS)

LEAST_UNITS = 64
"""Least number of compute units on which the kernel copies. With 64 that takes 2 to 9% less than copies after the
kernel, with 32 it took 21 to 29% more; nothing between was measured (results/h200x2/deep_ep.txt)."""

WIDE = 8
"""Number of columns of which widths are multiples where 16 bytes are loaded and stored at a time."""

WIDE_BESIDE = 16 * WIDE
"""Number of columns beside of whose multiples Triton makes one kernel: a capture may be the first call without any."""


class TokenRows(KernelHandle):
    """Flags and buffer of rows that travel, for one width and what is beside. Collective: alike on all ranks.

    Args:
        comm: communicator of the ranks.
        most_rows: C, largest number of rows that any rank gets in a call.
        columns: H, number of columns of the rows.
        room: largest S, number of columns of the tensor beside them, of any call.
        tiles: sizes of its tiles.
    """

    def __init__(
        self,
        comm: Communicator,
        most_rows: int,
        columns: int,
        room: int,
        *,
        tiles: TileSizes = ROW_TILES,
    ) -> None:
        self.comm, self.most_rows, self.columns, self._tiles = comm, most_rows, columns, tiles
        self._limit: dict[str, Any] = register_limit(64, tiles.warps, tiles.per_unit)
        across = -(-columns // tiles.columns) + -(-room // tiles.columns)
        most_tiles = -(-most_rows // (tiles.rows * tiles.group)) * tiles.group * across
        needed = most_tiles + (comm.world_size - 1) * across
        self.programs, self._turn = programs_of(comm, needed, tiles.per_unit), buffer_lock(comm)
        self._counters = persistent(comm.device, lambda: torch.zeros(2, dtype=torch.int32, device=comm.device))
        self.output = comm.empty(most_rows * (columns + room), dtype=torch.int16)
        self._addresses = comm.peers(self.output)  # now, as the first launch may be captured
        self.kernel = comm.load_kernel(_exchange_rows, flags=1 + most_tiles)

    def run(
        self,
        x: Tensor,
        beside: Tensor,
        leaving: Tensor,
        counts: Tensor,
        received: int,
        stays: tuple[int, int],
        units: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that come from rank 0, from rank 1, and so on, [received, H], and those of ``beside``.

        Args:
            x: rows, int16, neighbours in a row are neighbours in memory.
            beside: more rows like them, of S columns; 0 columns for none.
            leaving: numbers of the rows for rank 0, for rank 1, and so on, int32[R, 1]; all of ``counts`` are there.
            counts: number of rows from rank i to rank j in row i, column j, int32[N, N].
            received: number of rows that come here, the sum of its column.
            stays: first one of these that was here before, and the row behind the last one.
            units: largest number of compute units of the kernel, the same on all ranks.
        """
        into, beside_into = (x.new_empty(received, part.shape[1]) for part in (x, beside))
        widths = x.stride(0), beside.shape[1] and beside.stride(0), self.columns, beside.shape[1]
        unit = 1 if any(width % WIDE for width in widths) or (x.data_ptr() | beside.data_ptr()) % 16 else WIDE
        programs, copies = min(self.programs, units * self._tiles.per_unit), units >= LEAST_UNITS
        with self._turn:  # until rows have been copied
            self.kernel.launch(
                (programs,),
                self._addresses,
                self._counters,
                x,
                beside,
                leaving,
                counts,
                into,
                beside_into,
                *(number // unit for number in widths),
                len(leaving),
                self.most_rows,
                unit,
                ROWS=self._tiles.rows,
                COLS=self._tiles.columns,
                GROUP=self._tiles.group,
                COPIES=int(copies),
                num_warps=self._tiles.warps,
                **self._limit,
            )
            if not copies:
                for to, first in ((into, 0), (beside_into, self.most_rows * self.columns)):
                    rows = self.output[first:][: self.most_rows * to.shape[1]].view(self.most_rows, to.shape[1])
                    to[: stays[0]] = rows[: stays[0]]
                    to[stays[1] :] = rows[stays[1] : received]
        return into, beside_into


@triton.jit
def _exchange_rows(
    context, outputs, counters, x, beside, leaving, counts, into, beside_into, x_stride, beside_stride, columns,
    beside_columns, rows, most_rows, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    programs = tl.num_programs(0)
    columns, beside_columns = columns * UNIT, beside_columns * UNIT
    x_stride, beside_stride = x_stride * UNIT, beside_stride * UNIT
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
    lane = tl.arange(0, MAX_RANKS)
    sent = tl.load(counts + rank * ranks + lane, mask=lane < ranks, other=0)
    came = tl.load(counts + lane * ranks + rank, mask=lane < ranks, other=0)
    main = tl.cdiv(columns, COLS)
    across = main + tl.cdiv(beside_columns, COLS)
    here = tl.load(outputs + rank)
    for turn in range(ranks):
        hop = (turn + 1 - tl.program_id(0) % 2) % ranks  # rows that stay do not use the link: half begin with them
        peer, source = (rank + hop) % ranks, (rank + ranks - hop) % ranks
        to = tl.sum(tl.where(lane < rank, tl.load(counts + lane * ranks + peer, mask=lane < ranks, other=0), 0))
        first, count = tl.sum(tl.where(lane < peer, sent, 0)), tl.sum(tl.where(lane == peer, sent, 0))
        begins, coming = tl.sum(tl.where(lane < source, came, 0)), tl.sum(tl.where(lane == source, came, 0))
        tiles, arrivals = tl.cdiv(count, ROWS) * across, tl.where(hop == 0, 0, tl.cdiv(coming, ROWS) * across * COPIES)
        number = _first_tile(counts, rank, hop, ranks, across, ROWS)
        arriving = _first_tile(counts, source, hop, ranks, across, ROWS)
        if (number < tiles) & (hop != 0):
            wait_acquire(context, peer, 0, generation)
        ahead = tl.full((), 0, tl.int32)  # tiles sent, less tiles that came
        while (number < tiles) | (arriving < arrivals):
            sends = tl.where((number < tiles) & ((ahead < 2) | (arriving >= arrivals)), 1, 0)
            tile, high = tl.where(sends == 1, number, arriving), tl.where(sends == 1, count, coming)
            row_tile, column_tile = tile_at(tile, tl.cdiv(high, ROWS), across, GROUP)
            row, begin_at = row_tile * ROWS + tl.arange(0, ROWS), tl.where(sends == 1, to, begins)
            last = tl.minimum(tl.where(sends == 1, tl.minimum(count, rows - first), coming), most_rows - begin_at)
            token = tl.load(leaving + first + row, mask=row < tl.where(sends == 1, last, 0), other=-1)
            token = tl.where(sends == 1, token, begin_at + row)
            moves = (row < last) & (token >= 0)
            is_beside = column_tile >= main
            own, mine, stride, width = x.to(tl.int64), into.to(tl.int64), x_stride, columns
            if beside is not None:
                own = tl.where(is_beside, beside.to(tl.int64), own)
                mine = tl.where(is_beside, beside_into.to(tl.int64), mine)
                stride, width = tl.where(is_beside, beside_stride, stride), tl.where(is_beside, beside_columns, width)
            # Behind the rows of a buffer are those beside them.
            behind = tl.where(is_beside, 2 * most_rows.to(tl.int64) * columns, 0)
            source_at = tl.where(sends == 1, own, here + behind)
            target_at = tl.where((sends == 1) & (hop != 0), tl.load(outputs + peer) + behind, mine)
            stride = tl.where(sends == 1, stride, width)
            if (sends == 0) & (row_tile * ROWS < last):  # others have no flag, maybe
                wait_acquire(context, source, 1 + arriving, generation)
            _copy(source_at, stride, token, target_at, width, begin_at + row, moves,
                  column_tile - tl.where(is_beside, main, 0), COLS, UNIT)  # fmt: skip
            if COPIES and (sends == 1) & (hop != 0):
                signal_release(context, peer, 1 + number, generation)
            number += sends * programs
            arriving += (1 - sends) * programs
            ahead += 2 * sends - 1
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        if not COPIES:
            signal_all_release(context, 1, generation)  # done
            wait_all_acquire(context, 1, generation)
    end(context, generation)


@triton.jit
def _first_tile(counts, sender, hop, ranks, across, ROWS: tl.constexpr):
    """Return the number of this program's first tile among those of a sender for the rank ``hop`` ranks on: tiles are
    dealt out to the programs in turn, those for the next rank first, those that stay last.
    """
    lane, programs = tl.arange(0, MAX_RANKS), tl.num_programs(0)
    sent = tl.load(counts + sender * ranks + lane, mask=lane < ranks, other=0)
    distance = (lane + ranks - sender) % ranks
    earlier = (distance > 0) & (distance < tl.where(hop == 0, ranks, hop)) & (lane < ranks)
    before = tl.sum(tl.where(earlier, tl.cdiv(sent, ROWS), 0)) * across
    return (tl.program_id(0) + programs - before % programs) % programs


@triton.jit
def _copy(source_at, stride, source, target_at, width, row, moves, column_tile, COLS: tl.constexpr, UNIT: tl.constexpr):
    """Copy a tile of rows ``source`` at an address to rows ``row`` at another one. They are at multiples of
    UNIT elements.
    """
    source_of, target_of = source_at.to(tl.pointer_type(tl.int16)), target_at.to(tl.pointer_type(tl.int16))
    source_of, target_of = tl.multiple_of(source_of, 2 * UNIT), tl.multiple_of(target_of, 2 * UNIT)
    column = column_tile * COLS + tl.arange(0, COLS)
    inside = moves[:, None] & (column < width)[None, :]
    values = tl.load(source_of + source.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0)
    tl.store(target_of + row.to(tl.int64)[:, None] * width + column[None, :], values, mask=inside)


KERNEL = _exchange_rows

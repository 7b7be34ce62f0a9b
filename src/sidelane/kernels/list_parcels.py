# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Lists of tensors, some hundred kilobytes together, as parcels: one kernel and one handshake for all of them.

    rank 0   inputs -> parcels 0 of every rank | signal, wait: all there | own parcels -> outputs, or reduce -> outputs
    rank 1   inputs -> parcels 1 of every rank | signal, wait: all there | own parcels -> outputs, or reduce -> outputs

Equivalent: ``exchange_cells`` or ``reduce_cells`` for each tensor. In place is fine: a block sends all that lies where
it writes before it writes.

Legend: N ranks; PIECES and WORDS as in ``list_table``; NARROW the bytes of an access in tiles that are not wide; UNIT
and TILE as in ``memory``; OP is empty for what only moves.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import count_of, get, pointer, put
from sidelane.kernels.arithmetic import combine, reduction_constants
from sidelane.kernels.list_table import (
    INPUT,
    INPUT_STRIDE,
    OUTPUT,
    OUTPUT_STRIDE,
    PLACE,
    ListTable,
    ends_of,
    find_tile,
    value,
)
from sidelane.kernels.parcels import WARPS, place
from sidelane.program.collective import Reduction


def arrange(site: LaunchSite, table: ListTable, address: int, reduction: Reduction | None, *, distinct: bool) -> Launch:
    """Make the launch that moves or reduces the pieces of a table, whose places end within ``PARCEL_BYTES``.

    Args:
        site: rank, arenas and blocks of the launch.
        table: table of tiles of ``parcels.TILE_BYTES``.
        address: address of its values in device memory.
        reduction: operation and dtype; None for what only moves.
        distinct: each peer gets its own part (all_to_all, reduce_scatter), else all get the same.
    """
    constants = {
        "N": site.world_size,
        "DISTINCT": distinct,
        **table.constants,
        **reduction_constants(reduction),
    }
    tiles = table.tiles
    arguments = (address, tiles, site.rank, site.board, *padded(site.rotated(site.arenas)))
    return Launch(KERNEL, site.blocks(tiles), WARPS, arguments, constants)


@triton.jit
def _list_parcels(
    table, tiles, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, DISTINCT: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, NARROW: tl.constexpr,
    TILE: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    ends = ends_of(table, PIECES)
    first = tl.program_id(0).to(tl.int64)
    tile = first
    while tile < tiles:
        row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
        if wide:
            _send(row, offset, nbytes, peers, rank, generation, N, DISTINCT, 16, TILE)
        else:
            _send(row, offset, nbytes, peers, rank, generation, N, DISTINCT, NARROW, TILE)
        tile += tl.num_programs(0)
    signal(addresses_of(peers, N), rank, generation, 0, N)
    wait(p0, generation, board, tl.full((), 0, tl.int32), 0, N)

    tile = first
    while tile < tiles:
        row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
        if wide:
            _take(row, offset, nbytes, p0, generation, N, 16, TILE, OP, DTYPE, ELEMENT_BYTES, FLOAT)
        else:
            _take(row, offset, nbytes, p0, generation, N, NARROW, TILE, OP, DTYPE, ELEMENT_BYTES, FLOAT)
        tile += tl.num_programs(0)
    end_generation(p0, generation)


@triton.jit
def _send(
    row, offset, nbytes, peers, rank, generation,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Send one tile of each part, also to this rank itself, so that all received tiles are in one place."""
    input, there = value(row, INPUT) + offset, value(row, PLACE) + offset
    if DISTINCT:
        stride = value(row, INPUT_STRIDE)
        for turn in tl.static_range(N):
            values = get(input + (rank + turn) % N * stride, 0, nbytes, UNIT, TILE, False)
            put(place(peers[turn], generation, rank, N) + there, values, 0, nbytes, UNIT, TILE, False)
    else:
        values = get(input, 0, nbytes, UNIT, TILE, False)
        for turn in tl.static_range(N):
            put(place(peers[turn], generation, rank, N) + there, values, 0, nbytes, UNIT, TILE, False)


@triton.jit
def _take(
    row, offset, nbytes, arena, generation,
    N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Copy or reduce one tile of every parcel; all loads before all stores, unless small units fill registers."""
    output, there = value(row, OUTPUT) + offset, value(row, PLACE) + offset
    tiles = ()
    if OP == "":
        stride = value(row, OUTPUT_STRIDE)
        for sender in tl.static_range(N):
            values = get(place(arena, generation, sender, N) + there, 0, nbytes, UNIT, TILE, False)
            if UNIT == 16:
                tiles = tiles + (values,)
            else:
                put(output + sender * stride, values, 0, nbytes, UNIT, TILE, False)
        if UNIT == 16:
            for sender in tl.static_range(N):
                put(output + sender * stride, tiles[sender], 0, nbytes, UNIT, TILE, False)
    else:
        offsets = tl.arange(0, TILE // ELEMENT_BYTES)
        mask = offsets < count_of(nbytes, UNIT, ELEMENT_BYTES)
        for sender in tl.static_range(N):
            source = pointer(place(arena, generation, sender, N) + there, DTYPE, True)
            tiles = tiles + (tl.load(source + offsets, mask=mask),)
        result = combine(tiles, N, OP, FLOAT).to(DTYPE)
        tl.store(pointer(output, DTYPE, UNIT == 16) + offsets, result, mask=mask)


KERNEL = _list_parcels

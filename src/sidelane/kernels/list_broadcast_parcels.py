# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""broadcasts of a list of tensors, some hundred kilobytes together, as parcels: one kernel and one handshake.

    root    tensors -> its parcel on every peer | signal, wait: all there
    others                                        signal, wait: all there | the root's parcel -> tensors

Equivalent: ``broadcast_parcels`` for each tensor.

Legend: N ranks; PIECES and WORDS as in ``list_table``; NARROW the bytes of an access in tiles that are not wide; UNIT
and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import get, put
from sidelane.kernels.list_table import INPUT, PLACE, ListTable, ends_of, find_tile, value
from sidelane.kernels.parcels import WARPS, place


def arrange(site: LaunchSite, table: ListTable, address: int, root: int) -> Launch:
    """Make the launch that sends the pieces of a table, whose places end within ``PARCEL_BYTES``.

    Args:
        site: rank, arenas and blocks of the launch.
        table: table of tiles of ``parcels.TILE_BYTES``; inputs are the tensors.
        address: address of its values in device memory.
        root: rank whose bytes all ranks get.
    """
    constants = {"N": site.world_size, **table.constants}
    tiles = table.tiles
    arguments = (address, tiles, site.rank, root, site.board, *padded(site.rotated(site.arenas)))
    return Launch(KERNEL, site.blocks(tiles), WARPS, arguments, constants)


@triton.jit
def _list_broadcast_parcels(
    table, tiles, rank, root, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    ends = ends_of(table, PIECES)
    first = tl.program_id(0).to(tl.int64)
    if rank == root:
        tile = first
        while tile < tiles:
            row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
            if wide:
                _send(row, offset, nbytes, peers, rank, generation, N, 16, TILE)
            else:
                _send(row, offset, nbytes, peers, rank, generation, N, NARROW, TILE)
            tile += tl.num_programs(0)
    signal(addresses_of(peers, N), rank, generation, 0, N)
    wait(p0, generation, board, tl.full((), 0, tl.int32), 0, N)
    if rank != root:
        parcel = place(p0, generation, root, N)
        tile = first
        while tile < tiles:
            row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
            if wide:
                _take(row, offset, nbytes, parcel, 16, TILE)
            else:
                _take(row, offset, nbytes, parcel, NARROW, TILE)
            tile += tl.num_programs(0)
    end_generation(p0, generation)


@triton.jit
def _send(row, offset, nbytes, peers, rank, generation, N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    there = value(row, PLACE) + offset
    values = get(value(row, INPUT) + offset, 0, nbytes, UNIT, TILE, False)
    for turn in tl.static_range(1, N):
        put(place(peers[turn], generation, rank, N) + there, values, 0, nbytes, UNIT, TILE, False)


@triton.jit
def _take(row, offset, nbytes, parcel, UNIT: tl.constexpr, TILE: tl.constexpr):
    values = get(parcel + value(row, PLACE) + offset, 0, nbytes, UNIT, TILE, False)
    put(value(row, INPUT) + offset, values, 0, nbytes, UNIT, TILE, False)


KERNEL = _list_broadcast_parcels

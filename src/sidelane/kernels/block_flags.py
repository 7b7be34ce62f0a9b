# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Collectives of some hundred kilobytes by block flags: data in the arena of the receiver, then one flag a block.

    rank 0   input -> slot 0 of every rank | signal, wait: all there | own slots -> output, or reduce -> output
    rank 1   input -> slot 1 of every rank | signal, wait: all there | own slots -> output, or reduce -> output

A broadcast has one sender::

    root     data -> its slot on every peer | signal, wait: all there
    others                                    signal, wait: all there | the root's slot -> data

Block flags take half of the bytes of the LL protocol, and one handshake where pushes into an output need two: no rank
has to signal that it is ready, since there are two slots for each sender, for even and odd generations (``ll`` explains
why two suffice).

Equivalent: see ``ll``. In place is allowed: a block sends all bytes that it overwrites before it writes.

Legend: N ranks; DISTINCT if each rank gets its own part; OP is empty where bytes only move; UNIT and TILE as in
``memory``; TABLE and the other constants of tiles as in ``tile_table``.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import count_in, get, pointer, put
from sidelane.kernels.arithmetic import load_combined, reduction_constants
from sidelane.kernels.tile_table import Tiles, call_of, each_tile, ends_of, fetch_tile
from sidelane.program.collective import Reduction

LL_OFFSET = tl.constexpr(layout.LL_OFFSET)
LL_SLOT_BYTES = tl.constexpr(layout.LL_SLOT_BYTES)
BLOCK_SLOT_BYTES = tl.constexpr(layout.BLOCK_SLOT_BYTES)

TILE_BYTES = 4096
WARPS = 8


def arrange(site: LaunchSite, tiles: Tiles, reduction: Reduction | None, *, distinct: bool) -> Launch:
    """Make the launch that moves or reduces one part for each pair of ranks, of each piece.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``TILE_BYTES``; inputs are one part, or one for each rank if ``distinct``.
        reduction: operation and dtype; None where bytes only move.
        distinct: each peer gets its own part (all_to_all, reduce_scatter), else all get the same.

    Raises:
        ValueError: there are too many bytes, or none.
    """
    constants = {"N": site.world_size, "DISTINCT": distinct, **tiles.constants, **reduction_constants(reduction)}
    arguments = (*tiles.arguments, site.rank, site.status, site.counters, *padded(site.rotated(site.arenas)))
    return Launch(_block_flags, blocks_of(site, tiles.count, tiles.nbytes), WARPS, arguments, constants)


def arrange_broadcast(site: LaunchSite, tiles: Tiles, root: int) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``TILE_BYTES``; input and output of a piece are its data.
        root: rank whose bytes all ranks get.

    Raises:
        ValueError: there are too many bytes, or none.
    """
    constants = {"N": site.world_size, **tiles.constants}
    arguments = (*tiles.arguments, site.rank, root, site.status, site.counters, *padded(site.rotated(site.arenas)))
    return Launch(_block_flags_broadcast, blocks_of(site, tiles.count, tiles.nbytes), WARPS, arguments, constants)


def blocks_of(site: LaunchSite, tiles: int, nbytes: int) -> int:
    """Return the number of thread blocks for ``tiles``, of ``nbytes`` to each peer.

    Raises:
        ValueError: there are too many bytes, or none.
    """
    if not 1 <= nbytes <= layout.BLOCK_SLOT_BYTES:
        raise ValueError(f"block_flags: bytes to a peer (value={nbytes}, allowed=1..{layout.BLOCK_SLOT_BYTES})")
    return site.blocks(tiles)


@triton.jit
def block_slot(arena, generation, sender, N: tl.constexpr):
    """Return the address of the slot for ``sender`` in an arena of N ranks, a multiple of 16."""
    slots = arena + LL_OFFSET + 2 * N * LL_SLOT_BYTES
    return slots + ((generation & 1) * N + sender).to(tl.int64) * BLOCK_SLOT_BYTES


@triton.jit
def _block_flags(
    table, tiles, input, output, nbytes, input_stride, output_stride, rank, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, DISTINCT: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(counters)
    ends = ends_of(table, TABLE)
    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, nbytes, TILE)
    each_tile(_send, (peers, rank, generation, 0, N, DISTINCT), call, 0, 1,
              TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
    signal(addresses_of(peers, N), rank, generation, 0, N)
    wait(p0, generation, status, tl.full((), 0, tl.int32), 0, N)
    if OP == "":
        each_tile(_copy, (p0, generation, N, TABLE), call, 0, 1, TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)
    else:
        each_tile(_reduce, (p0, generation, N, OP, DTYPE, ELEMENT_BYTES, FLOAT), call, 0, 1,
                  TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
    end_generation(counters, generation)


@triton.jit
def _block_flags_broadcast(
    table, tiles, input, output, nbytes, input_stride, output_stride, rank, root, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(counters)
    ends = ends_of(table, TABLE)
    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, nbytes, TILE)
    if rank == root:
        each_tile(_send, (peers, rank, generation, 1, N, False), call, 0, 1,
                  TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
    signal(addresses_of(peers, N), rank, generation, 0, N)
    wait(p0, generation, status, tl.full((), 0, tl.int32), 0, N)
    if rank != root:
        each_tile(fetch_tile, (block_slot(p0, generation, root, N),), call, 0, 1,
                  TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
    end_generation(counters, generation)


@triton.jit
def _send(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    peers, rank, generation, FIRST: tl.constexpr, N: tl.constexpr, DISTINCT: tl.constexpr,
):  # fmt: skip
    """Send a tile of each part to peers ``FIRST`` to N - 1; the first is this rank itself, so that all lie together."""
    input, _, sent_offset, stride, _, _, _ = part
    if DISTINCT:
        for turn in tl.static_range(FIRST, N):
            values = get(input + (rank + turn) % N * stride, tile, nbytes, UNIT, TILE, WHOLE)
            put(block_slot(peers[turn], generation, rank, N) + sent_offset, values, tile, nbytes, UNIT, TILE, WHOLE)
    else:
        values = get(input, tile, nbytes, UNIT, TILE, WHOLE)
        for turn in tl.static_range(FIRST, N):
            put(block_slot(peers[turn], generation, rank, N) + sent_offset, values, tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _copy(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    arena, generation, N: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of every slot, all loads before all stores.

    With a table, whose ends are in registers, units of one or two bytes would take too many of them.
    """
    _, output, sent_offset, _, stride, _, _ = part
    tiles = ()
    for sender in tl.static_range(N):
        values = get(block_slot(arena, generation, sender, N) + sent_offset, tile, nbytes, UNIT, TILE, WHOLE)
        if UNIT >= 4 or not TABLE:
            tiles = tiles + (values,)
        else:
            put(output + sender * stride, values, tile, nbytes, UNIT, TILE, WHOLE)
    if UNIT >= 4 or not TABLE:
        for sender in tl.static_range(N):
            put(output + sender * stride, tiles[sender], tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _reduce(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    arena, generation, N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of every slot, in the order of the ranks."""
    _, output, sent_offset, _, _, _, _ = part
    lanes = tl.arange(0, TILE // ELEMENT_BYTES)
    mask = None if WHOLE else lanes < count_in(tile, nbytes, UNIT, ELEMENT_BYTES, TILE)
    slots = ()
    for sender in tl.static_range(N):
        slots = slots + (block_slot(arena, generation, sender, N) + sent_offset + tile * TILE,)
    result = load_combined(slots, lanes, mask, N, OP, DTYPE, FLOAT, True)
    tl.store(pointer(output + tile * TILE, DTYPE, ALIGNED) + lanes, result, mask=mask)


KERNELS = (_block_flags, _block_flags_broadcast)

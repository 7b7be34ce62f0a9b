# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Lists of tensors of many bytes: one kernel that stages all of them, and reads from the peers' staging.

    moving     inputs -> own staging | there? | staging of every peer -> outputs | read?
    one shot   inputs -> own staging | there? | shard r of all stagings -> reduce -> outputs | read?
    two shot   inputs -> own staging | there? | own tiles of all stagings -> reduce -> outputs, own staging
                                     | done?  | other tiles of the stagings of their owners -> outputs | read?

``there``, ``done`` and ``read`` are waits for the blocks of the same number on all peers, which handle the same tiles.
Two shots use staging twice: a tile of all inputs is read by its owner alone, which may put the result there. A block
has tiles of every owner in turn.

Equivalent: ``exchange_cells`` or ``reduce_cells`` for each tensor. In place is fine: a block stages all that lies where
it writes before it writes.

Legend: N ranks; SHARDS shards in the staging (1 or N); GATHER: two shots; PIECES and WORDS as in ``list_table``;
NARROW the bytes of an access in tiles that are not wide; UNIT and TILE as in ``memory``; OP is empty for what only
moves. Stagings are in the order of the ranks.
"""

from __future__ import annotations

from sidelane.device.flags import address_of, addresses_of, end_generation, next_generation, signal, wait
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
from sidelane.program.collective import Reduction

MOVED_TILE_BYTES, REDUCED_TILE_BYTES = 16384, 8192
WARPS = 16


def tile_bytes(reduction: Reduction | None) -> int:
    """Return the size of a tile in bytes."""
    return MOVED_TILE_BYTES if reduction is None else REDUCED_TILE_BYTES


def arrange(
    site: LaunchSite,
    table: ListTable,
    address: int,
    stagings: tuple[int, ...],
    staged_bytes: int,
    reduction: Reduction | None,
    *,
    distinct: bool,
    gather: bool = False,
) -> Launch:
    """Make the launch that moves or reduces the pieces of a table.

    Args:
        site: rank, arenas and blocks of the launch.
        table: table of tiles of ``tile_bytes(reduction)``.
        address: address of its values in device memory.
        stagings: address of each rank's staging, aligned to 16 bytes.
        staged_bytes: where the places end, a multiple of 16; staging has as much for each shard.
        reduction: operation and dtype; None for what only moves.
        distinct: each peer gets its own part (all_to_all, reduce_scatter), else all get the same.
        gather: every rank reduces some tiles, and gets the results of all (all_reduce in two shots).
    """
    n = site.world_size
    constants = {
        "N": n,
        "SHARDS": n if distinct else 1,
        "GATHER": gather,
        **table.constants,
        **reduction_constants(reduction),
    }
    tiles = table.tiles
    arguments = (address, tiles, staged_bytes, site.rank, site.board)
    addresses = padded(site.rotated(site.arenas)) + padded(stagings)
    return Launch(KERNEL, site.blocks(-(-tiles // n) if gather else tiles), WARPS, arguments + addresses, constants)


@triton.jit
def _list_pull(
    table, tiles, staged, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    N: tl.constexpr, SHARDS: tl.constexpr, GATHER: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
    NARROW: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    own = address_of(stagings, rank, N)
    generation = next_generation(p0)
    ends = ends_of(table, PIECES)
    spent = tl.full((), 0, tl.int32)
    first = tl.program_id(0).to(tl.int64)

    tile = first
    while tile < tiles:
        row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
        if wide:
            _stage(row, offset, nbytes, own, staged, rank, SHARDS, OP == "", 16, TILE)
        else:
            _stage(row, offset, nbytes, own, staged, rank, SHARDS, OP == "", NARROW, TILE)
        tile += tl.num_programs(0)
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    shard = rank * staged if SHARDS > 1 else rank * 0
    tile = first
    owner = rank * 0
    while tile < tiles:
        if (not GATHER) | (owner == rank):
            row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
            if wide:
                if OP == "":
                    _fetch(row, offset, nbytes, stagings, shard, rank, N, 16, TILE)
                else:
                    _reduce(row, offset, nbytes, own, stagings, shard,
                            N, GATHER, 16, TILE, OP, DTYPE, ELEMENT_BYTES, FLOAT)  # fmt: skip
            elif OP == "":
                _fetch(row, offset, nbytes, stagings, shard, rank, N, NARROW, TILE)
            else:
                _reduce(row, offset, nbytes, own, stagings, shard,
                        N, GATHER, NARROW, TILE, OP, DTYPE, ELEMENT_BYTES, FLOAT)  # fmt: skip
        owner = (owner + 1) % N
        tile += tl.num_programs(0)
    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)

    if GATHER:
        tile = first
        owner = rank * 0
        while tile < tiles:
            if owner != rank:
                row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
                source = address_of(stagings, owner, N)
                if wide:
                    _fetch_result(row, offset, nbytes, source, 16, TILE)
                else:
                    _fetch_result(row, offset, nbytes, source, NARROW, TILE)
            owner = (owner + 1) % N
            tile += tl.num_programs(0)
        signal(arenas, rank, generation, 2, N)
        spent = wait(p0, generation, board, spent, 2, N)
    end_generation(p0, generation)


@triton.jit
def _stage(
    row, offset, nbytes, staging, staged, rank,
    SHARDS: tl.constexpr, MOVES: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stage one tile of each part; where bytes only move, the part that stays here is written to its place at once."""
    input, there = value(row, INPUT) + offset, value(row, PLACE) + offset
    output = value(row, OUTPUT) + rank * value(row, OUTPUT_STRIDE) + offset
    stride = value(row, INPUT_STRIDE)
    for shard in tl.static_range(SHARDS):
        values = get(input + shard * stride, 0, nbytes, UNIT, TILE, False)
        put(staging + shard * staged + there, values, 0, nbytes, UNIT, TILE, False)
        if MOVES and (SHARDS == 1 or shard == rank):
            put(output, values, 0, nbytes, UNIT, TILE, False)


@triton.jit
def _fetch(row, offset, nbytes, stagings, shard, rank, N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Read one tile of every peer, all loads before all stores, unless small units fill registers."""
    output, there = value(row, OUTPUT) + offset, value(row, PLACE) + offset + shard
    stride = value(row, OUTPUT_STRIDE)
    tiles = ()
    for turn in tl.static_range(1, N):
        peer = (rank + turn) % N
        values = get(address_of(stagings, peer, N) + there, 0, nbytes, UNIT, TILE, False)
        if UNIT == 16:
            tiles = tiles + (values,)
        else:
            put(output + peer * stride, values, 0, nbytes, UNIT, TILE, False)
    if UNIT == 16:
        for turn in tl.static_range(1, N):
            put(output + (rank + turn) % N * stride, tiles[turn - 1], 0, nbytes, UNIT, TILE, False)


@triton.jit
def _reduce(
    row, offset, nbytes, own, stagings, shard,
    N: tl.constexpr, GATHER: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of the stagings of all ranks, in the order of the ranks."""
    output, there = value(row, OUTPUT) + offset, value(row, PLACE) + offset + shard
    offsets = tl.arange(0, TILE // ELEMENT_BYTES)
    mask = offsets < count_of(nbytes, UNIT, ELEMENT_BYTES)
    values = ()
    for rank in tl.static_range(N):
        values = values + (tl.load(pointer(stagings[rank] + there, DTYPE, True) + offsets, mask=mask),)
    result = combine(values, N, OP, FLOAT).to(DTYPE)
    tl.store(pointer(output, DTYPE, UNIT == 16) + offsets, result, mask=mask)
    if GATHER:
        tl.store(pointer(own + there, DTYPE, True) + offsets, result, mask=mask)


@triton.jit
def _fetch_result(row, offset, nbytes, staging, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Read a tile's result from its owner."""
    values = get(staging + value(row, PLACE) + offset, 0, nbytes, UNIT, TILE, False)
    put(value(row, OUTPUT) + offset, values, 0, nbytes, UNIT, TILE, False)


KERNEL = _list_pull

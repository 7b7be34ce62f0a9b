# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Collectives of many bytes among ordinary tensors: peers read from each other's staging.

    moving     input -> own staging | there? | staging of every peer -> output | read?
    one shot   input -> own staging | there? | shard r of all stagings -> reduce -> output | read?
    two shot   input -> own staging | there? | shard r of all stagings -> reduce -> output, shard r of own staging
                                    | done?  | shard s of the staging of each rank s -> output | read?

``there``, ``done`` and ``read`` are waits for the blocks of the same number on all peers, which handle the same tiles.
Two shots use staging twice: only rank r reads its own shard r, so it may put the result there. In a table a rank has no
shard but every N-th tile of each block.

Equivalent: see ``ll``. For an all_reduce in one shot there is one shard, which every rank reduces. In place is fine: a
block stages all bytes that it overwrites before it writes. Symmetric tensors need no staging: ``direct``.

Legend: N ranks; SHARDS: shards in an input and in staging (1 or N); GATHER: two shots; OP is empty where bytes only
move; UNIT and TILE as in ``memory``; TABLE and the other constants of tiles as in ``tile_table``. Stagings are in the
order of the ranks where OP reduces, otherwise this rank's first.
"""

from __future__ import annotations

from sidelane.device.flags import address_of, addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import count_in, get, pointer, put
from sidelane.kernels.arithmetic import load_combined, reduction_constants
from sidelane.kernels.tile_table import Tiles, call_of, each_tile, ends_of, fetch_tile
from sidelane.program.collective import Reduction

MOVED_TILE_BYTES, REDUCED_TILE_BYTES = 16384, 8192
WARPS = 16


def tile_bytes(reduction: Reduction | None) -> int:
    """Return the size of a tile in bytes."""
    return MOVED_TILE_BYTES if reduction is None else REDUCED_TILE_BYTES


def arrange(
    site: LaunchSite,
    tiles: Tiles,
    stagings: tuple[int, ...],
    staged_bytes: int,
    total_bytes: int,
    reduction: Reduction | None,
    *,
    distinct: bool,
    gather: bool,
) -> Launch:
    """Make the launch that moves or reduces pieces.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``tile_bytes(reduction)``.
        stagings: address of each rank's staging, aligned to 16 bytes.
        staged_bytes: distance of shards in staging, a multiple of 16.
        total_bytes: size of an input; the last shards of a piece without a table may be shorter or empty.
        reduction: operation and dtype; None where bytes only move.
        distinct: inputs have a part for each rank (all_to_all, reduce_scatter; in two shots those of a piece without a
            table); otherwise all get the same.
        gather: every rank reduces some bytes, and gets the results of all (all_reduce in two shots).
    """
    n = site.world_size
    constants = {
        "N": n,
        "SHARDS": n if distinct else 1,
        "GATHER": gather,
        **tiles.constants,
        **reduction_constants(reduction),
    }
    arguments = (*tiles.arguments, total_bytes, staged_bytes, site.rank, site.status, site.counters)
    addresses = padded(site.rotated(site.arenas)) + padded(site.rotated(stagings) if reduction is None else stagings)
    owned = -(-tiles.count // n) if gather and constants["TABLE"] else tiles.count
    return Launch(_staged, site.blocks(owned), WARPS, arguments + addresses, constants)


@triton.jit
def _staged(
    table, tiles, input, output, nbytes, input_stride, output_stride, total, staged, rank, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    N: tl.constexpr, SHARDS: tl.constexpr, GATHER: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr,
    UNIT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    RAGGED: tl.constexpr = GATHER and not TABLE
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    own = s0 if OP == "" else address_of(stagings, rank, N)
    generation = next_generation(counters)
    spent = tl.full((), 0, tl.int32)
    ends = ends_of(table, TABLE)
    # The tiles that are full in every shard, of which the last is the shortest.
    full = tl.maximum(total - (N - 1) * nbytes, 0) if RAGGED else nbytes
    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, full, TILE)

    each_tile(_stage, (own, staged, rank, total, SHARDS, RAGGED, OP == ""), call, 0, 1,
              TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE, 1, RAGGED)  # fmt: skip
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, status, spent, 0, N)

    shard = rank * staged if SHARDS > 1 else rank * 0
    if OP == "":
        each_tile(_fetch, (stagings, shard, rank, N), call, 0, 1, TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)
    elif TABLE:
        each_tile(_reduce, (own, stagings, shard, N, GATHER, OP, DTYPE, ELEMENT_BYTES, FLOAT),
                  call, rank if GATHER else 0, N if GATHER else 1,
                  TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
    else:
        mine = tl.maximum(tl.minimum(total - rank * nbytes, nbytes), 0) if RAGGED else nbytes
        result = output + rank * output_stride
        reduced = call_of(table, ends, tl.cdiv(mine, TILE), input, result, mine, 0, 0, mine, TILE)
        each_tile(_reduce, (own, stagings, shard, N, GATHER, OP, DTYPE, ELEMENT_BYTES, FLOAT), reduced, 0, 1,
                  TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, status, spent, 1, N)

    if GATHER:
        if TABLE:
            for turn in tl.static_range(1, N):
                owner = (rank + turn) % N
                each_tile(fetch_tile, (address_of(stagings, owner, N),), call, owner, N,
                          TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
        else:
            results = ()
            for turn in tl.static_range(1, N):
                owner = (rank + turn) % N
                results = results + (address_of(stagings, owner, N) + owner * staged,)
            each_tile(_fetch_shards, (results, total, rank, N), call, 0, 1,
                      TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE, 1, RAGGED)  # fmt: skip
        signal(arenas, rank, generation, 2, N)
        spent = wait(p0, generation, status, spent, 2, N)
    end_generation(counters, generation)


@triton.jit
def _stage(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    staging, staged, rank, total, SHARDS: tl.constexpr, RAGGED: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Stage a tile of each part; where bytes only move, the part that stays here is written to its place at once."""
    input, output, sent_offset, stride, output_stride, _, _ = part
    for shard in tl.static_range(SHARDS):
        length = tl.minimum(total - shard * nbytes, nbytes) if RAGGED else nbytes
        values = get(input + shard * stride, tile, length, UNIT, TILE, WHOLE)
        put(staging + shard * staged + sent_offset, values, tile, length, UNIT, TILE, WHOLE)
        if MOVES and (SHARDS == 1 or shard == rank):
            put(output + rank * output_stride, values, tile, length, UNIT, TILE, WHOLE)


@triton.jit
def _fetch(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    stagings, shard, rank, N: tl.constexpr,
):  # fmt: skip
    """Read a tile of every peer, all loads before all stores: a load over the link has a long latency.

    With units of one or two bytes that would spill registers to local memory, which takes up to a gigabyte of the GPU.
    """
    _, output, sent_offset, _, stride, _, _ = part
    tiles = ()
    for turn in tl.static_range(1, N):
        values = get(stagings[turn] + shard + sent_offset, tile, nbytes, UNIT, TILE, WHOLE)
        if UNIT >= 4:
            tiles = tiles + (values,)
        else:
            put(output + (rank + turn) % N * stride, values, tile, nbytes, UNIT, TILE, WHOLE)
    if UNIT >= 4:
        for turn in tl.static_range(1, N):
            put(output + (rank + turn) % N * stride, tiles[turn - 1], tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _reduce(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    own, stagings, shard, N: tl.constexpr, GATHER: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of the stagings of all ranks, in the order of the ranks."""
    _, output, sent_offset, _, _, _, _ = part
    begin = tile * TILE
    lanes = tl.arange(0, TILE // ELEMENT_BYTES)
    mask = None if WHOLE else lanes < count_in(tile, nbytes, UNIT, ELEMENT_BYTES, TILE)
    sources = ()
    for rank in tl.static_range(N):
        sources = sources + (stagings[rank] + shard + sent_offset + begin,)
    result = load_combined(sources, lanes, mask, N, OP, DTYPE, FLOAT, True)
    tl.store(pointer(output + begin, DTYPE, ALIGNED) + lanes, result, mask=mask)
    if GATHER:
        tl.store(pointer(own + shard + sent_offset + begin, DTYPE, True) + lanes, result, mask=mask)


@triton.jit
def _fetch_shards(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    results, total, rank, N: tl.constexpr,
):  # fmt: skip
    """Read a tile of every peer's result, all loads before all stores."""
    _, output, _, _, stride, _, _ = part
    tiles = ()
    for turn in tl.static_range(1, N):
        length = tl.minimum(total - (rank + turn) % N * nbytes, nbytes)
        tiles = tiles + (get(results[turn - 1], tile, length, UNIT, TILE, WHOLE),)
    for turn in tl.static_range(1, N):
        owner = (rank + turn) % N
        length = tl.minimum(total - owner * nbytes, nbytes)
        put(output + owner * stride, tiles[turn - 1], tile, length, UNIT, TILE, WHOLE)


KERNELS = (_staged,)

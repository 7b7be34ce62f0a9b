# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_gather and all_to_all of many bytes into ordinary outputs: peers read from each other's staging.

    rank 0   input -> own staging | there? | staging of every peer -> output | read?
    rank 1   input -> own staging | there? | staging of every peer -> output | read?

``there``: each block waits until the block of its number has staged its tiles on every peer. ``read``: until the peers
have read its own, so that the next call may stage.

Equivalent: see ``exchange_cells``. In place is allowed: a block stages all bytes that it overwrites before it writes.

Legend: N ranks, SHARDS parts in an input (1 or N); UNIT and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put

TILE_BYTES = 16384
WARPS = 16
STRIDE_ALIGNMENT = 16


def staging_bytes(part_bytes: int, world_size: int, *, distinct: bool) -> int:
    """Return the bytes of staging that each rank needs."""
    return aligned(part_bytes) * (world_size if distinct else 1)


def aligned(nbytes: int) -> int:
    """Return the distance of parts in staging in bytes."""
    return -(-nbytes // STRIDE_ALIGNMENT) * STRIDE_ALIGNMENT


def arrange(
    site: LaunchSite, output: int, input: int, stagings: tuple[int, ...], part_bytes: int, *, distinct: bool
) -> Launch:
    """Make the launch that moves one part for each pair of ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of ``world_size`` parts.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        stagings: address of each rank's staging (see :func:`staging_bytes`), aligned to 16 bytes.
        part_bytes: size of a part.
        distinct: each peer gets its own part (all_to_all), else all get the same (all_gather).
    """
    constants = {
        "N": site.world_size,
        "SHARDS": site.world_size if distinct else 1,
        "UNIT": unit_bytes(output, input, part_bytes),
        "TILE": TILE_BYTES,
    }
    arguments = (output, input, part_bytes, aligned(part_bytes), site.rank, site.board)
    addresses = padded(site.rotated(site.arenas)) + padded(site.rotated(stagings))
    return Launch(KERNEL, site.blocks(-(-part_bytes // TILE_BYTES)), WARPS, arguments + addresses, constants)


@triton.jit
def _pull(
    output, input, part_bytes, staged, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    N: tl.constexpr, SHARDS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    whole = part_bytes // TILE
    first = tl.program_id(0).to(tl.int64)
    has_rest = first == whole % tl.num_programs(0)

    tile = first
    while tile < whole:
        _stage(input, s0, output, tile, part_bytes, staged, rank, SHARDS, UNIT, TILE, True)
        tile += tl.num_programs(0)
    if has_rest:
        _stage(input, s0, output, whole, part_bytes, staged, rank, SHARDS, UNIT, TILE, False)
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    tile = first
    while tile < whole:
        _fetch(output, stagings, tile, part_bytes, staged, rank, N, SHARDS, UNIT, TILE, True)
        tile += tl.num_programs(0)
    if has_rest:
        _fetch(output, stagings, whole, part_bytes, staged, rank, N, SHARDS, UNIT, TILE, False)
    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)
    end_generation(p0, generation)


@triton.jit
def _stage(
    input, staging, output, tile, part_bytes, staged, rank,
    SHARDS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stage one tile of each part; the part that stays here is written to its place at once."""
    for shard in tl.static_range(SHARDS):
        values = get(input + shard * part_bytes, tile, part_bytes, UNIT, TILE, WHOLE)
        put(staging + shard * staged, values, tile, part_bytes, UNIT, TILE, WHOLE)
        if SHARDS == 1 or shard == rank:
            put(output + rank * part_bytes, values, tile, part_bytes, UNIT, TILE, WHOLE)


@triton.jit
def _fetch(
    output, stagings, tile, part_bytes, staged, rank,
    N: tl.constexpr, SHARDS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Read one tile of every peer, all loads before all stores: a load over the link has a long latency.

    With units of one or two bytes that would spill registers to local memory, which takes up to a gigabyte of the GPU.
    """
    offset = rank * staged if SHARDS > 1 else 0
    tiles = ()
    for turn in tl.static_range(1, N):
        values = get(stagings[turn] + offset, tile, part_bytes, UNIT, TILE, WHOLE)
        if UNIT >= 4:
            tiles = tiles + (values,)
        else:
            put(output + (rank + turn) % N * part_bytes, values, tile, part_bytes, UNIT, TILE, WHOLE)
    if UNIT >= 4:
        for turn in tl.static_range(1, N):
            put(output + (rank + turn) % N * part_bytes, tiles[turn - 1], tile, part_bytes, UNIT, TILE, WHOLE)


KERNEL = _pull

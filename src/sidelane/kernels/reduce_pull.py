# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""reduce_scatter and all_reduce of many bytes: every rank reduces what it reads from the staging of all ranks.

    one shot   input -> own staging | there? | shard r of all stagings -> reduce -> output | read?
    two shot   input -> own staging | there? | shard r of all stagings -> reduce -> output, shard r of own staging
                                    | done?  | shard s of the staging of each rank s -> output | read?

``there``, ``done`` and ``read`` are waits for the blocks of the same number on all peers: block b handles the same
tiles of each shard on every rank. Two shots use staging twice: only rank r reads its own shard r, so it may put the
result there. Symmetric tensors need no staging: ``reduce_direct``.

Equivalent: see ``reduce_cells``. For an all_reduce in one shot there is one shard, which every rank reduces. In place
is fine: the input has been staged before anything is written.

Legend: N ranks, SHARDS shards in an input (1 or N), TILE bytes a tile.
"""

from __future__ import annotations

from sidelane.device.flags import address_of, addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import pointer
from sidelane.kernels.arithmetic import combine, reduction_constants
from sidelane.program.collective import Reduction

TILE_BYTES = 8192
WARPS = 16
STRIDE_ALIGNMENT = 16


def aligned(nbytes: int) -> int:
    """Return the distance of shards in staging in bytes; a rank needs as much for each shard."""
    return -(-nbytes // STRIDE_ALIGNMENT) * STRIDE_ALIGNMENT


def arrange(
    site: LaunchSite,
    output: int,
    input: int,
    stagings: tuple[int, ...],
    shard_bytes: int,
    total_bytes: int,
    reduction: Reduction,
    *,
    gather: bool,
) -> Launch:
    """Make the launch that reduces shards.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of one shard, or of all of them with ``gather``.
        input: address of ``total_bytes``.
        stagings: address of each rank's staging, aligned to 16 bytes: ``aligned(shard_bytes)`` for each shard.
        shard_bytes: size of a shard, a whole number of elements; ``total_bytes`` if all ranks reduce everything.
        total_bytes: size of an input; its last shards may be shorter or empty.
        reduction: operation and dtype.
        gather: every rank gets the results of all (all_reduce in two shots).
    """
    n, element = site.world_size, reduction.element_bytes
    shards = 1 if shard_bytes >= total_bytes and not gather else n
    constants = {
        "N": n,
        "SHARDS": shards,
        "GATHER": gather,
        **reduction_constants(reduction),
        "INPUT_ALIGNED": input % 16 == 0 and (shards == 1 or shard_bytes % 16 == 0),
        "OUTPUT_ALIGNED": output % 16 == 0 and (not gather or shard_bytes % 16 == 0),
        "TILE": TILE_BYTES // element,
    }
    sizes = (shard_bytes // element, total_bytes // element, aligned(shard_bytes))
    arguments = (output, input, *sizes, site.rank, site.board)
    addresses = padded(site.rotated(site.arenas)) + padded(stagings)
    return Launch(KERNEL, site.blocks(-(-shard_bytes // TILE_BYTES)), WARPS, arguments + addresses, constants)


@triton.jit
def _reduce_pull(
    output, input, shard, total, staged, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    N: tl.constexpr, SHARDS: tl.constexpr, GATHER: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr, INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    own_staging = address_of(stagings, rank, N)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)

    for index in tl.static_range(SHARDS):
        length = tl.minimum(total - index * shard, shard)
        _copy(own_staging + index * staged, input + index * shard * ELEMENT_BYTES, length,
              DTYPE, True, INPUT_ALIGNED, TILE)  # fmt: skip
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    mine = rank if SHARDS > 1 else rank * 0
    length = tl.minimum(total - mine * shard, shard)
    target = output + mine * shard * ELEMENT_BYTES if GATHER else output
    whole = tl.maximum(length, 0) // TILE
    first = tl.program_id(0).to(tl.int64)
    tile = first
    while tile < whole:
        _reduce_tile(target, own_staging, stagings, mine * staged, tile, length,
                     N, GATHER, OP, DTYPE, FLOAT, OUTPUT_ALIGNED, TILE, True)  # fmt: skip
        tile += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        _reduce_tile(target, own_staging, stagings, mine * staged, whole, length,
                     N, GATHER, OP, DTYPE, FLOAT, OUTPUT_ALIGNED, TILE, False)  # fmt: skip
    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)

    if GATHER:
        results = ()
        for turn in tl.static_range(1, N):
            owner = (rank + turn) % N
            results = results + (address_of(stagings, owner, N) + owner * staged,)
        shortest = tl.maximum(total - (N - 1) * shard, 0) // TILE
        tile = first
        while tile < shortest:
            _fetch(output, results, tile, total, shard, rank, N, DTYPE, ELEMENT_BYTES, OUTPUT_ALIGNED, TILE, True)
            tile += tl.num_programs(0)
        while tile * TILE < shard:
            _fetch(output, results, tile, total, shard, rank, N, DTYPE, ELEMENT_BYTES, OUTPUT_ALIGNED, TILE, False)
            tile += tl.num_programs(0)
        signal(arenas, rank, generation, 2, N)
        spent = wait(p0, generation, board, spent, 2, N)
    end_generation(p0, generation)


@triton.jit
def _copy(
    dst, src, count, DTYPE: tl.constexpr, DST_ALIGNED: tl.constexpr, SRC_ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """Copy the tiles of this block."""
    target, source = pointer(dst, DTYPE, DST_ALIGNED), pointer(src, DTYPE, SRC_ALIGNED)
    whole = tl.maximum(count, 0) // TILE
    first = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    tile = first
    while tile < whole:
        tl.store(target + tile * TILE + lanes, tl.load(source + tile * TILE + lanes))
        tile += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        offsets = whole * TILE + lanes
        tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit
def _reduce_tile(
    target, own_staging, stagings, offset, tile, count,
    N: tl.constexpr, GATHER: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, FLOAT: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of the shards of all ranks, in the order of the ranks."""
    offsets = tile * TILE + tl.arange(0, TILE)
    mask = None if WHOLE else offsets < count
    values = ()
    for rank in tl.static_range(N):
        values = values + (tl.load(pointer(stagings[rank] + offset, DTYPE, True) + offsets, mask=mask),)
    result = combine(values, N, OP, FLOAT).to(DTYPE)
    tl.store(pointer(target, DTYPE, ALIGNED) + offsets, result, mask=mask)
    if GATHER:
        tl.store(pointer(own_staging + offset, DTYPE, True) + offsets, result, mask=mask)


@triton.jit
def _fetch(
    output, results, tile, total, shard, rank,
    N: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Read one tile of every peer's result, all loads before all stores."""
    offsets = tile * TILE + tl.arange(0, TILE)
    values = ()
    for turn in tl.static_range(1, N):
        first = (rank + turn) % N * shard
        mask = None if WHOLE else offsets < tl.minimum(total - first, shard)
        values = values + (tl.load(pointer(results[turn - 1], DTYPE, True) + offsets, mask=mask),)
    for turn in tl.static_range(1, N):
        first = (rank + turn) % N * shard
        mask = None if WHOLE else offsets < tl.minimum(total - first, shard)
        tl.store(pointer(output + first * ELEMENT_BYTES, DTYPE, ALIGNED) + offsets, values[turn - 1], mask=mask)


KERNEL = _reduce_pull

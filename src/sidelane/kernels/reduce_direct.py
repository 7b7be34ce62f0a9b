# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""reduce_scatter and all_reduce of many bytes in symmetric inputs: every rank reduces what it reads from all of them.

    rank 0   ready? | shard 0 of every input -> reduce -> output (two shots: every output) | done?
    rank 1   ready? | shard 1 of every input -> reduce -> output (two shots: every output) | done?

``ready``: each block waits until the block of its number runs on every peer, whose stream has then written the input
and passed all work that used the output before. ``done``: until that block has read and stored everything. Block b of
every rank handles the same tiles of each shard, so that blocks depend on blocks of their number only.

Equivalent: see ``reduce_cells``. For an all_reduce in one shot there is one shard, which every rank reduces. In place
is fine but for that: shard r of any input is read by rank r only, before shard r of any output is stored, by rank r.

Legend: N ranks, SHARDS shards in an input (1 or N), TARGETS outputs to store to (1 or N), TILE elements a tile,
STAGES tiles that a block has on their way or at hand.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import pointer
from sidelane.kernels.arithmetic import combine, reduction_constants
from sidelane.program.collective import Reduction

TILE_BYTES, WARPS = 4096, 8
PAIR_TILE_BYTES, PAIR_WARPS, PAIR_GATHER_WARPS = 8192, 16, 8
"""Tile bytes and warps for two ranks, so that a block has as many bytes in flight as with four. A reduce_scatter of
4 MiB takes 14.1 us, else 16.0. Results that are stored on both ranks need fewer warps: 21.9 us for 4 MiB on 128 blocks,
23.8 on 64 blocks with more."""

FEW_BLOCKS, FEW_TILE_BYTES, FEW_WARPS, MOST_STAGES = 24, 16384, 32, 6
FEW_SHARED_BYTES = 192 << 10
"""Bytes of shared memory for launches of few blocks, each of which needs more bytes in flight: the compiler prefetches
tiles into shared memory (``num_stages``). 13 blocks take 168 us for 64 MiB of four ranks, 232 without prefetching, and
416 with tiles of 4 KB (probes: docs/lab/probes.md)."""


def arrange(
    site: LaunchSite,
    outputs: tuple[int, ...],
    inputs: tuple[int, ...],
    shard_bytes: int,
    total_bytes: int,
    reduction: Reduction,
    *,
    gather: bool,
) -> Launch:
    """Make the launch that reduces shards.

    Args:
        site: rank, arenas and blocks of the launch.
        outputs: address of this rank's output of one shard; with ``gather`` of each rank's, of all shards.
        inputs: address of each rank's input of ``total_bytes``.
        shard_bytes: size of a shard, a whole number of elements; ``total_bytes`` if all ranks reduce everything.
        total_bytes: size of an input; its last shards may be shorter or empty.
        reduction: operation and dtype.
        gather: every rank gets the results of all (all_reduce in two shots).
    """
    n, element = site.world_size, reduction.element_bytes
    shards = n if gather or shard_bytes < total_bytes else 1
    tile_bytes, warps = TILE_BYTES, WARPS
    if n == 2:
        tile_bytes, warps = PAIR_TILE_BYTES, PAIR_GATHER_WARPS if gather else PAIR_WARPS
    stages = 1
    if site.most_blocks <= FEW_BLOCKS:
        tile_bytes, warps = FEW_TILE_BYTES // max(1, n // 4), FEW_WARPS
        stages = min(MOST_STAGES, 1 + min(FEW_SHARED_BYTES, site.shared_bytes) // (n * tile_bytes))
    aligned = shards == 1 or shard_bytes % 16 == 0
    constants = {
        "N": n,
        "SHARDS": shards,
        "TARGETS": len(outputs),
        **reduction_constants(reduction),
        "INPUT_ALIGNED": aligned and all(address % 16 == 0 for address in inputs),
        "OUTPUT_ALIGNED": (aligned or not gather) and all(address % 16 == 0 for address in outputs),
        "TILE": tile_bytes // element,
        "STAGES": stages,
    }
    arguments = (shard_bytes // element, total_bytes // element, site.rank, site.board)
    targets = site.rotated(outputs) if gather else outputs
    addresses = padded(site.rotated(site.arenas)) + padded(inputs) + padded(targets)
    return Launch(KERNEL, site.blocks(-(-shard_bytes // tile_bytes)), warps, arguments + addresses, constants)


@triton.jit
def _reduce_direct(
    shard, total, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    i0, i1, i2, i3, i4, i5, i6, i7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    N: tl.constexpr, SHARDS: tl.constexpr, TARGETS: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr, INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    inputs = (i0, i1, i2, i3, i4, i5, i6, i7)
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    own = rank * shard if SHARDS > 1 else rank * 0
    length = tl.minimum(total - own, shard)
    read = own * ELEMENT_BYTES
    stored = read if TARGETS > 1 else read * 0
    whole = tl.maximum(length, 0) // TILE
    first = tl.program_id(0).to(tl.int64)
    for tile in tl.range(first, whole, tl.num_programs(0), num_stages=STAGES):
        _reduce_tile(outputs, inputs, stored, read, tile, length, N, TARGETS,
                     OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE, True)  # fmt: skip
    if first == whole % tl.num_programs(0):
        _reduce_tile(outputs, inputs, stored, read, whole, length, N, TARGETS,
                     OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE, False)  # fmt: skip

    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)
    end_generation(p0, generation)


@triton.jit
def _reduce_tile(
    outputs, inputs, stored, read, tile, count,
    N: tl.constexpr, TARGETS: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
    FLOAT: tl.constexpr, INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr, TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of the shards of all ranks, in the order of the ranks."""
    offsets = tl.arange(0, TILE)
    mask = None if WHOLE else offsets < tl.minimum(count - tile * TILE, TILE).to(tl.int32)
    begin = tile * TILE * ELEMENT_BYTES
    values = ()
    for rank in tl.static_range(N):
        values = values + (tl.load(pointer(inputs[rank] + read + begin, DTYPE, INPUT_ALIGNED) + offsets, mask=mask),)
    result = combine(values, N, OP, FLOAT).to(DTYPE)
    for turn in tl.static_range(TARGETS):
        tl.store(pointer(outputs[turn] + stored + begin, DTYPE, OUTPUT_ALIGNED) + offsets, result, mask=mask)


KERNEL = _reduce_direct

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Collectives of many bytes among symmetric tensors, which peers reach where they lie.

    moving     ready? | input -> part r of every output | done?
    one shot   ready? | shard r of every input -> reduce -> output | done?
    two shot   ready? | shard r of every input -> reduce -> every output | done?

``ready``: each block waits until the block of its number runs on every peer, whose stream has then written the input
and passed all work that used the output before. ``done``: until that block has read and stored everything. Block b of
every rank handles the same tiles of each part, so that blocks depend on blocks of their number only. In a table and two
shots a rank has no shard but every N-th tile of each block.

Equivalent: see ``ll``. For an all_reduce in one shot there is one shard, which every rank reduces. In place is fine
but for that and for all_to_all, which would overwrite bytes that peers have to read: shard r of any input is read by
rank r only, before shard r of any output is stored, by rank r.

``two_shot_push`` stores instead of loading: every rank stores its part of a shard with its owner, who adds up the
parts::

    rank 0   ready? | chunk 0 of every shard -> stagings, signal | chunk 1 -> stagings, signal | ...
                                            chunk 0 from all? reduce -> every output | ...         | done?
    rank 1   the same, with its shard

It works in chunks (``program/kernel_chunks.py``): while those of its peers are on their way, it reduces the previous
ones from its own staging. NVLink carries requests one way and data the other way, so that ranks that load from each
other have less of both for what they store. An input may be an output: shard r is overwritten by rank r, in tiles that
all others have sent to it.

Legend: N ranks; DISTINCT if each rank gets its own part; GATHER: two shots; TARGETS: outputs to store to (1 or N);
UNIT and TILE as in ``memory``; TABLE and the other constants of tiles as in ``tile_table``; STAGES: tiles that a block
has on their way or at hand. Where the sender stores, TILE is a number of elements, and WHOLE is for tiles that end
inside of their shard.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import addresses_of, end_generation, next_generation, relaxed_signal, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import count_in, get, pointer, put
from sidelane.kernels.arithmetic import load_combined, reduction_constants
from sidelane.kernels.tile_table import FIRST_GROUP, SECOND_GROUP, Tiles, call_of, each_tile, ends_of, peer_address
from sidelane.program import kernel_chunks
from sidelane.program.collective import Reduction

MOVED_TILE_BYTES, WARPS = 16384, 16

LISTED_TILE_BYTES = 8192
"""Bytes of a tile of a reduction with a table."""

TILE_BYTES, REDUCING_WARPS = 4096, 8
PAIR_TILE_BYTES, PAIR_WARPS, PAIR_GATHER_WARPS = 8192, 16, 8
"""Tile bytes and warps for two ranks, so that a block has as many bytes in flight as with four. A reduce_scatter of
4 MiB takes 14.1 us, else 16.0. Results that are stored on both ranks need fewer warps: 21.9 us for 4 MiB on 128 blocks,
23.8 on 64 blocks with more."""

FEW_BLOCKS, FEW_TILE_BYTES, FEW_WARPS, MOST_STAGES = 24, 16384, 32, 6
FEW_SHARED_BYTES = 192 << 10
"""Bytes of shared memory for launches of few blocks, each of which needs more bytes in flight: the compiler prefetches
tiles into shared memory (``num_stages``). 13 blocks take 168 us for 64 MiB of four ranks, 232 without prefetching, and
416 with tiles of 4 KB (probes: results/notes/probes.md)."""

DONE = tl.constexpr(layout.PHASES - 1)
SLOTS = tl.constexpr(kernel_chunks.SLOTS)


def tile_bytes_at(site: LaunchSite, *, listed: bool) -> int:
    """Return the size of a tile of a reduction in bytes. ``listed``: it has a table."""
    if listed:
        return LISTED_TILE_BYTES
    if site.most_blocks <= FEW_BLOCKS:
        return FEW_TILE_BYTES // max(1, site.world_size // 4)
    return PAIR_TILE_BYTES if site.world_size == 2 else TILE_BYTES


def arrange_push(site: LaunchSite, tiles: Tiles, *, distinct: bool) -> Launch:
    """Make the launch that stores one part for each pair of ranks, of each piece.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``MOVED_TILE_BYTES``; the one group of a piece has the places of this rank's parts in the
            outputs of all ranks, its own first (``LaunchSite.rotated``).
        distinct: each peer gets its own part (all_to_all), else all get the same (all_gather).
    """
    constants = {"N": site.world_size, "DISTINCT": distinct, **tiles.constants}
    arguments = (
        *tiles.arguments,
        site.rank,
        site.status,
        site.counters,
        *padded(site.rotated(site.arenas)),
        *tiles.addresses(0),
    )
    return Launch(_direct_push, site.blocks(tiles.count), WARPS, arguments, constants)


def arrange(site: LaunchSite, tiles: Tiles, largest: int, reduction: Reduction, *, gather: bool) -> Launch:
    """Make the launch that reduces what this rank reads from all inputs.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``tile_bytes_at``. The first group of a piece has the inputs of all ranks in their order (the
            part that this rank reduces), with ``gather`` the second one their outputs for it, this rank's first
            (``LaunchSite.rotated``).
        largest: number of tiles of the rank that has most of them; ranks launch equally many blocks.
        reduction: operation and dtype.
        gather: every rank stores its results in everyone's outputs (all_reduce in two shots).
    """
    n, listed = site.world_size, bool(tiles.constants["TABLE"])
    warps, stages = REDUCING_WARPS, 1
    if listed:
        warps = WARPS
    elif site.most_blocks <= FEW_BLOCKS:
        warps = FEW_WARPS
        stages = min(MOST_STAGES, 1 + min(FEW_SHARED_BYTES, site.shared_bytes) // (n * tiles.constants["TILE"]))
    elif n == 2:
        warps = PAIR_GATHER_WARPS if gather else PAIR_WARPS
    constants = {"N": n, "GATHER": gather, **tiles.constants, **reduction_constants(reduction), "STAGES": stages}
    addresses = padded(site.rotated(site.arenas)) + tiles.addresses(0) + tiles.addresses(1)
    arguments = (*tiles.arguments, site.rank, site.status, site.counters, *addresses)
    return Launch(_direct_reduce, site.blocks(largest), warps, arguments, constants)


def arrange_send(
    site: LaunchSite,
    outputs: tuple[int, ...],
    input: int,
    stagings: tuple[int, ...],
    shard_bytes: int,
    total_bytes: int,
    reduction: Reduction,
) -> Launch:
    """Make the launch that reduces shards and stores the results on all ranks (``two_shot_push``).

    Args:
        site: rank, arenas and blocks of the launch.
        outputs: address of each rank's output of ``total_bytes``.
        input: address of as many.
        stagings: address of each rank's staging, aligned to 16 bytes: ``Chunks.peer_bytes`` for each of its peers.
        shard_bytes: size of a shard, a whole number of elements.
        total_bytes: size of an input; its last shards may be shorter or empty.
        reduction: operation and dtype.
    """
    chunks = kernel_chunks.chunks_of(shard_bytes, site.most_blocks)
    assert chunks.count < layout.PHASES - 1
    element = reduction.element_bytes
    aligned = shard_bytes % 16 == 0
    constants = {
        "N": site.world_size,
        **reduction_constants(reduction),
        "INPUT_ALIGNED": aligned and input % 16 == 0,
        "OUTPUT_ALIGNED": aligned and all(address % 16 == 0 for address in outputs),
        "TILE": kernel_chunks.TILE_BYTES // element,
    }
    sizes = (shard_bytes // element, total_bytes // element, chunks.peer_bytes, chunks.rounds)
    everyone = (site.arenas, stagings, outputs)
    addresses = tuple(address for each in everyone for address in padded(site.rotated(each)))
    return Launch(
        _direct_send,
        chunks.blocks,
        WARPS,
        (input, *sizes, site.rank, site.status, site.counters, *addresses),
        constants,
    )


@triton.jit
def _direct_push(
    table, tiles, input, output, nbytes, input_stride, output_stride, rank, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    N: tl.constexpr, DISTINCT: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7)
    generation = next_generation(counters)
    ends = ends_of(table, TABLE)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, status, spent, 0, N)

    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, nbytes, TILE)
    each_tile(_push_tile, (outputs, rank, N, DISTINCT, TABLE), call, 0, 1,
              TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip

    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, status, spent, 1, N)
    end_generation(counters, generation)


@triton.jit
def _push_tile(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    outputs, rank, N: tl.constexpr, DISTINCT: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Store a tile of each part in the outputs of all ranks."""
    input, _, _, stride, _, _, _ = part
    if not DISTINCT:
        values = get(input, tile, nbytes, UNIT, TILE, WHOLE)
    for turn in tl.static_range(N):
        if DISTINCT:
            values = get(input + (rank + turn) % N * stride, tile, nbytes, UNIT, TILE, WHOLE)
        target = peer_address(part, turn, FIRST_GROUP) if TABLE else outputs[turn]
        put(target, values, tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _direct_reduce(
    table, tiles, input, output, nbytes, input_stride, output_stride, rank, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    i0, i1, i2, i3, i4, i5, i6, i7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    N: tl.constexpr, GATHER: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    inputs = (i0, i1, i2, i3, i4, i5, i6, i7)
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7)
    generation = next_generation(counters)
    ends = ends_of(table, TABLE)
    spent = tl.full((), 0, tl.int32)
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, status, spent, 0, N)

    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, nbytes, TILE)
    each_tile(_reduce_tile, (inputs, outputs, N, GATHER, TABLE, OP, DTYPE, ELEMENT_BYTES, FLOAT),
              call, rank if GATHER and TABLE else 0, N if GATHER and TABLE else 1,
              TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE, STAGES)  # fmt: skip

    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, status, spent, 1, N)
    end_generation(counters, generation)


@triton.jit
def _reduce_tile(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    inputs, outputs, N: tl.constexpr, GATHER: tl.constexpr, TABLE: tl.constexpr, OP: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of every input, in the order of the ranks."""
    _, output, _, _, _, _, _ = part
    begin = tile * TILE
    lanes = tl.arange(0, TILE // ELEMENT_BYTES)
    mask = None if WHOLE else lanes < count_in(tile, nbytes, UNIT, ELEMENT_BYTES, TILE)
    sources = ()
    for rank in tl.static_range(N):
        sources = sources + ((peer_address(part, rank, FIRST_GROUP) if TABLE else inputs[rank]) + begin,)
    result = load_combined(sources, lanes, mask, N, OP, DTYPE, FLOAT, UNIT == 16)
    if GATHER:
        for turn in tl.static_range(N):
            target = peer_address(part, turn, SECOND_GROUP) if TABLE else outputs[turn]
            tl.store(pointer(target + begin, DTYPE, ALIGNED) + lanes, result, mask=mask)
    else:
        tl.store(pointer(output + begin, DTYPE, ALIGNED) + lanes, result, mask=mask)


@triton.jit
def _direct_send(
    input, shard, total, peer_bytes, rounds, rank, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
    INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7)
    generation = next_generation(counters)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, status, spent, 0, N)

    tiles = (shard + TILE - 1) // TILE
    step = tl.num_programs(0) * rounds
    chunks = (tiles + step - 1) // step
    chunk = rounds * 0
    while chunk < chunks:
        _send_chunk(stagings, input, chunk, rounds, shard, total, peer_bytes, rank,
                    N, DTYPE, ELEMENT_BYTES, INPUT_ALIGNED, TILE)  # fmt: skip
        signal(arenas, rank, generation, 1 + chunk, N)
        if chunk > 0:
            spent = wait(p0, generation, status, spent, chunk, N)
            _reduce_chunk(outputs, s0, input, chunk - 1, rounds, shard, total, peer_bytes, rank,
                          N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE)  # fmt: skip
        chunk += 1
    spent = wait(p0, generation, status, spent, chunks, N)
    _reduce_chunk(outputs, s0, input, chunks - 1, rounds, shard, total, peer_bytes, rank,
                  N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE)  # fmt: skip

    signal(arenas, rank, generation, DONE, N)
    spent = wait(p0, generation, status, spent, DONE, N)
    end_generation(counters, generation)


@triton.jit
def _in_slot(tile, chunk, rounds, source, owner, peer_bytes, TILE_BYTES: tl.constexpr):
    """Return the offset, in the staging of a tile's owner, of bytes that another rank, ``source``, sent in a chunk."""
    peer = source - (source > owner).to(tl.int64)
    slot = (chunk % SLOTS - chunk) * rounds * tl.num_programs(0)
    return peer * peer_bytes + (tile + slot) * TILE_BYTES


@triton.jit
def _send_chunk(
    stagings, input, chunk, rounds, shard, total, peer_bytes, rank,
    N: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store tiles of the peers' shards in their stagings."""
    tiles = (shard + TILE - 1) // TILE
    tile = tl.program_id(0).to(tl.int64) + chunk * rounds * tl.num_programs(0)
    end = tl.minimum(tiles, tile + rounds * tl.num_programs(0))
    while tile < end:
        for turn in tl.static_range(1, N):
            owner = (rank + turn) % N
            length = tl.minimum(total - owner * shard, shard)
            source = input + (owner * shard + tile * TILE) * ELEMENT_BYTES
            target = stagings[turn] + _in_slot(tile, chunk, rounds, rank, owner, peer_bytes, TILE * ELEMENT_BYTES)
            if (tile + 1) * TILE <= length:
                _send_tile(target, source, tile, length, DTYPE, ALIGNED, TILE, True)
            else:
                _send_tile(target, source, tile, length, DTYPE, ALIGNED, TILE, False)
        tile += tl.num_programs(0)


@triton.jit
def _send_tile(
    target, source, tile, length,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, TILE)
    mask = None if WHOLE else offsets < tl.minimum(tl.maximum(length - tile * TILE, 0), TILE).to(tl.int32)
    values = tl.load(pointer(source, DTYPE, ALIGNED) + offsets, mask=mask)
    tl.store(pointer(target, DTYPE, True) + offsets, values, mask=mask)


@triton.jit
def _reduce_chunk(
    outputs, staging, input, chunk, rounds, shard, total, peer_bytes, rank,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
    INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Reduce tiles of the own shard."""
    tiles = (shard + TILE - 1) // TILE
    tile = tl.program_id(0).to(tl.int64) + chunk * rounds * tl.num_programs(0)
    end = tl.minimum(tiles, tile + rounds * tl.num_programs(0))
    length = tl.minimum(total - rank * shard, shard)
    while tile < end:
        if (tile + 1) * TILE <= length:
            _reduce_sent(outputs, staging, input, tile, chunk, rounds, shard, length, peer_bytes, rank,
                         N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE, True)  # fmt: skip
        else:
            _reduce_sent(outputs, staging, input, tile, chunk, rounds, shard, length, peer_bytes, rank,
                         N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE, False)  # fmt: skip
        tile += tl.num_programs(0)


@triton.jit
def _reduce_sent(
    outputs, staging, input, tile, chunk, rounds, shard, length, peer_bytes, rank,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
    INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Reduce a tile over all ranks, in the order of the ranks."""
    offsets = tl.arange(0, TILE)
    mask = None if WHOLE else offsets < tl.minimum(tl.maximum(length - tile * TILE, 0), TILE).to(tl.int32)
    begin = (rank * shard + tile * TILE) * ELEMENT_BYTES
    sources = ()
    for source in tl.static_range(N):
        there = staging + _in_slot(tile, chunk, rounds, source, rank, peer_bytes, TILE * ELEMENT_BYTES)
        sources = sources + (tl.where(rank == source, input + begin, there),)
    result = load_combined(sources, offsets, mask, N, OP, DTYPE, FLOAT, INPUT_ALIGNED)
    for turn in tl.static_range(N):
        tl.store(pointer(outputs[turn] + begin, DTYPE, OUTPUT_ALIGNED) + offsets, result, mask=mask)


KERNELS = (_direct_push, _direct_reduce, _direct_send)

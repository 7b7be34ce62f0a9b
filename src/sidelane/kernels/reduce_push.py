# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""all_reduce of many bytes in two shots: every rank stores its part of a shard with its owner, who adds up the parts.

    rank 0   ready? | chunk 0 of every shard -> stagings, signal | chunk 1 -> stagings, signal | ...
                                            chunk 0 from all? reduce -> every output | ...         | done?
    rank 1   the same, with its shard

``ready``: each block waits until the block of its number runs on every peer, whose stream has then passed all work that
used its staging and its output before. Then it works in chunks (``program/reduce_chunks.py``): while those of its peers
are on their way, it reduces the previous ones from its own staging. Block b of every rank handles the same tiles of
each shard, so that blocks depend on blocks of their number only. ``done``: until all results have been stored.

An input may be an output: shard r is overwritten by rank r, in tiles that all others have sent to it.

NVLink carries requests one way and data the other way, so that ranks that load from each other have less of both for
what they store.

Equivalent: see ``reduce_cells``.

Legend: N ranks, TILE elements a tile, WHOLE for tiles that end inside of their shard.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import addresses_of, end_generation, next_generation, relaxed_signal, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import pointer
from sidelane.kernels.arithmetic import combine, reduction_constants
from sidelane.program import reduce_chunks
from sidelane.program.collective import Reduction

WARPS = 16

DONE = tl.constexpr(layout.PHASES - 1)
SLOTS = tl.constexpr(reduce_chunks.SLOTS)


def arrange(
    site: LaunchSite,
    outputs: tuple[int, ...],
    input: int,
    stagings: tuple[int, ...],
    shard_bytes: int,
    total_bytes: int,
    reduction: Reduction,
) -> Launch:
    """Make the launch that reduces shards and stores the results on all ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        outputs: address of each rank's output of ``total_bytes``.
        input: address of as many.
        stagings: address of each rank's staging, aligned to 16 bytes: ``Chunks.peer_bytes`` for each of its peers.
        shard_bytes: size of a shard, a whole number of elements.
        total_bytes: size of an input; its last shards may be shorter or empty.
        reduction: operation and dtype.
    """
    chunks = reduce_chunks.chunks_of(shard_bytes, site.most_blocks)
    assert chunks.count < layout.PHASES - 1
    element = reduction.element_bytes
    aligned = shard_bytes % 16 == 0
    constants = {
        "N": site.world_size,
        **reduction_constants(reduction),
        "INPUT_ALIGNED": aligned and input % 16 == 0,
        "OUTPUT_ALIGNED": aligned and all(address % 16 == 0 for address in outputs),
        "TILE": reduce_chunks.TILE_BYTES // element,
    }
    sizes = (shard_bytes // element, total_bytes // element, chunks.peer_bytes, chunks.rounds)
    everyone = (site.arenas, stagings, outputs)
    addresses = tuple(address for each in everyone for address in padded(site.rotated(each)))
    return Launch(KERNEL, chunks.blocks, WARPS, (input, *sizes, site.rank, site.board, *addresses), constants)


@triton.jit
def _reduce_push(
    input, shard, total, peer_bytes, rounds, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
    INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    tiles = (shard + TILE - 1) // TILE
    step = tl.num_programs(0) * rounds
    chunks = (tiles + step - 1) // step
    chunk = rounds * 0
    while chunk < chunks:
        _send_chunk(stagings, input, chunk, rounds, shard, total, peer_bytes, rank,
                    N, DTYPE, ELEMENT_BYTES, INPUT_ALIGNED, TILE)  # fmt: skip
        signal(arenas, rank, generation, 1 + chunk, N)
        if chunk > 0:
            spent = wait(p0, generation, board, spent, chunk, N)
            _reduce_chunk(outputs, s0, input, chunk - 1, rounds, shard, total, peer_bytes, rank,
                          N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE)  # fmt: skip
        chunk += 1
    spent = wait(p0, generation, board, spent, chunks, N)
    _reduce_chunk(outputs, s0, input, chunks - 1, rounds, shard, total, peer_bytes, rank,
                  N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE)  # fmt: skip

    signal(arenas, rank, generation, DONE, N)
    spent = wait(p0, generation, board, spent, DONE, N)
    end_generation(p0, generation)


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
            _reduce_tile(outputs, staging, input, tile, chunk, rounds, shard, length, peer_bytes, rank,
                         N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE, True)  # fmt: skip
        else:
            _reduce_tile(outputs, staging, input, tile, chunk, rounds, shard, length, peer_bytes, rank,
                         N, OP, DTYPE, ELEMENT_BYTES, FLOAT, INPUT_ALIGNED, OUTPUT_ALIGNED, TILE, False)  # fmt: skip
        tile += tl.num_programs(0)


@triton.jit
def _reduce_tile(
    outputs, staging, input, tile, chunk, rounds, shard, length, peer_bytes, rank,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
    INPUT_ALIGNED: tl.constexpr, OUTPUT_ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Reduce a tile over all ranks, in the order of the ranks."""
    offsets = tl.arange(0, TILE)
    mask = None if WHOLE else offsets < tl.minimum(tl.maximum(length - tile * TILE, 0), TILE).to(tl.int32)
    begin = (rank * shard + tile * TILE) * ELEMENT_BYTES
    values = ()
    for source in tl.static_range(N):
        there = staging + _in_slot(tile, chunk, rounds, source, rank, peer_bytes, TILE * ELEMENT_BYTES)
        address = tl.where(rank == source, input + begin, there)
        values = values + (tl.load(pointer(address, DTYPE, INPUT_ALIGNED) + offsets, mask=mask),)
    result = combine(values, N, OP, FLOAT).to(DTYPE)
    for turn in tl.static_range(N):
        tl.store(pointer(outputs[turn] + begin, DTYPE, OUTPUT_ALIGNED) + offsets, result, mask=mask)


KERNEL = _reduce_push

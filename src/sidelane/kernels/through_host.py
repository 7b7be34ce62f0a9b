# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Collectives of many bytes through host memory: a few thread blocks store, and the others load.

    block b of B of rank 0    input -> own staging, chunk 0 | signal all | chunk 1 | signal all | ...
    its LOADERS               own output <- chunk 0 of every peer's staging, once it is there | chunk 1 | ... | read?

Stagings are in host memory, at the other end of each GPU's PCIe link, which moves bytes in both directions at once. So
a chunk is loaded while the next ones are stored. A rank stores one copy for all peers, and its own part nowhere. The
blocks B + b, 2 B + b, ... load what blocks b of all ranks have stored. They wait for their own rank's block b as well:
in place they overwrite what it has sent by then. ``read?`` is a wait for the loaders of all ranks: the next launch
stores to the same staging.

Stores need few blocks, since they are posted, but each signal a fence (``flags.signal_blocks``), and fences wait for
each other. Loads need many blocks, and no fence; each loader polls a word of its own.

Equivalent: see ``ll``. In place is allowed. In a broadcast the root stores, and the others load.

Legend: N ranks; SHARDS: parts in an input and in staging (1 or N); ROOTED: a broadcast; OP is empty where bytes only
move; UNIT and TILE as in ``memory``; TABLE and the other constants of tiles as in ``tile_table``. Stagings are in the
order of the ranks where OP reduces, otherwise this rank's first.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import (
    address_of,
    addresses_of,
    end_generation,
    next_generation,
    signal_blocks,
    wait_for_block,
)
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import count_in, get, pointer, put
from sidelane.kernels.arithmetic import load_combined, reduction_constants
from sidelane.kernels.tile_table import Tiles, at_tile, call_of, ends_of, fetch_tile
from sidelane.program.collective import Reduction
from sidelane.program.kernel_chunks import MOST_CHUNKS

TILE_BYTES = 8192
WARPS = 16
SENDERS, LOADERS = 8, 4
"""Blocks that store, and blocks that load for each of these: 4 of an H200 store 43 GB/s, and 16 load as many; both ways
at once, 8 and 32 took 507 us for 16 MiB between two GPUs, 4 and 16 took 555 (results/notes/kernels.md)."""

TILES_OF_A_SENDER = 64
"""Tiles of an all-reduce between two ranks for each block that stores, of which two are the least: fences of one GPU
wait for each other. 512 KiB and 1 MiB take 30 and 48 us with 2 of them, 32 and 53 with 8; 2 MiB take 87 with 2 and 8,
80 are predicted with 4 (results/notes/no-peers.md). Reduce-scatters and lists were not timed, and have ``SENDERS``."""

LEAST_ROUNDS = 8
"""Smallest number of tiles that a block stores in a chunk, for which it fences once."""

DONE = tl.constexpr(layout.PHASES - 1)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)


def arrange(
    site: LaunchSite,
    tiles: Tiles,
    stagings: tuple[int, ...],
    staged_bytes: int,
    reduction: Reduction | None,
    *,
    distinct: bool,
    root: int | None,
) -> Launch:
    """Make the launch that moves or reduces one part for each pair of ranks, of each piece.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``TILE_BYTES``; inputs are one part, or one for each rank if ``distinct``.
        stagings: address of each rank's staging, aligned to 16 bytes.
        staged_bytes: distance of parts in staging, a multiple of 16.
        reduction: operation and dtype; None where bytes only move.
        distinct: each peer gets its own part (all_to_all, reduce_scatter), else all get the same.
        root: the only rank that sends; None if all do.
    """
    n = site.world_size
    most = (
        max(2, tiles.count // TILES_OF_A_SENDER)
        if n == 2 and reduction is not None and not (distinct or tiles.constants["TABLE"])
        else SENDERS
    )
    senders = max(1, min(SENDERS, most, tiles.count, site.most_blocks // (1 + LOADERS)))
    rounds = max(LEAST_ROUNDS, -(-tiles.count // (senders * MOST_CHUNKS)))
    constants = {
        "N": n,
        "SHARDS": n if distinct else 1,
        "ROOTED": root is not None,
        "LOADERS": LOADERS,
        **tiles.constants,
        **reduction_constants(reduction),
    }
    numbers = (staged_bytes, rounds, site.rank, root or 0, site.status, site.counters)
    addresses = padded(site.rotated(site.arenas)) + padded(site.rotated(stagings) if reduction is None else stagings)
    return Launch(_through_host, senders * (1 + LOADERS), WARPS, (*tiles.arguments, *numbers, *addresses), constants)


@triton.jit
def _through_host(
    table, tiles, input, output, nbytes, input_stride, output_stride, staged, rounds, rank, root, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    N: tl.constexpr, SHARDS: tl.constexpr, ROOTED: tl.constexpr, LOADERS: tl.constexpr, TABLE: tl.constexpr,
    WORDS: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
    OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    generation = next_generation(counters)
    ends = ends_of(table, TABLE)
    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, nbytes, TILE)
    blocks = tl.num_programs(0) // (1 + LOADERS)
    block, turn = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    step = blocks * rounds
    chunks = (tiles + step - 1) // step
    chunk = rounds * 0
    if turn == 0:
        if not ROOTED or rank == root:
            own = s0 if OP == "" else address_of(stagings, rank, N)
            while chunk < chunks:
                tile = chunk * step + block
                end = tl.minimum(tiles, (chunk + 1) * step)
                while tile < end:
                    at_tile(_store, (own, staged, rank, N, SHARDS), call, tile,
                            TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                    tile += blocks
                signal_blocks(arenas, rank, generation, 1 + chunk, block, blocks, N, LOADERS, True)
                chunk += 1
    else:
        loader = tl.program_id(0) - blocks
        spent = tl.full((), 0, tl.int32)
        lane = tl.arange(0, MAX_RANKS)
        if not ROOTED or rank != root:
            while chunk < chunks:
                senders = lane == root if ROOTED else lane < N
                spent = wait_for_block(p0, senders, generation, status, spent, 1 + chunk, loader)
                tile = chunk * step + block + (turn - 1) * blocks
                end = tl.minimum(tiles, (chunk + 1) * step)
                while tile < end:
                    if ROOTED:
                        at_tile(fetch_tile, (address_of(stagings, (root + N - rank) % N, N),), call, tile,
                                TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                    elif OP == "":
                        at_tile(_fetch, (stagings, staged, rank, N, SHARDS), call, tile,
                                TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                    else:
                        at_tile(_reduce, (stagings, staged, rank, N, SHARDS, OP, DTYPE, ELEMENT_BYTES, FLOAT), call,
                                tile, TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                    tile += blocks * LOADERS
                chunk += 1
        signal_blocks(arenas, rank, generation, DONE, loader, 0, N, 1, False)
        wait_for_block(p0, lane < N, generation, status, spent, DONE, loader)
    end_generation(counters, generation)


@triton.jit
def _store(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    staging, staged, rank, N: tl.constexpr, SHARDS: tl.constexpr,
):  # fmt: skip
    """Stage a tile for all peers, or a tile for each peer."""
    input, _, sent_offset, stride, _, _, _ = part
    if SHARDS == 1:
        values = get(input, tile, nbytes, UNIT, TILE, WHOLE)
        put(staging + sent_offset, values, tile, nbytes, UNIT, TILE, WHOLE)
    else:
        for turn in tl.static_range(1, N):
            peer = (rank + turn) % N
            values = get(input + peer * stride, tile, nbytes, UNIT, TILE, WHOLE)
            put(staging + peer * staged + sent_offset, values, tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _fetch(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    stagings, staged, rank, N: tl.constexpr, SHARDS: tl.constexpr,
):  # fmt: skip
    """Read a tile of every peer, and copy that of the part which stays here."""
    input, output, sent_offset, input_stride, stride, _, _ = part
    place = sent_offset + (rank * staged if SHARDS > 1 else rank * 0)
    for turn in tl.static_range(1, N):
        values = get(stagings[turn] + place, tile, nbytes, UNIT, TILE, WHOLE)
        put(output + (rank + turn) % N * stride, values, tile, nbytes, UNIT, TILE, WHOLE)
    own = input + (rank * input_stride if SHARDS > 1 else rank * 0)
    put(output + rank * stride, get(own, tile, nbytes, UNIT, TILE, WHOLE), tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _reduce(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    stagings, staged, rank, N: tl.constexpr, SHARDS: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of the own input and of the stagings of all peers, in the order of the ranks."""
    input, output, sent_offset, stride, _, _, _ = part
    begin = tile * TILE
    lanes = tl.arange(0, TILE // ELEMENT_BYTES)
    mask = None if WHOLE else lanes < count_in(tile, nbytes, UNIT, ELEMENT_BYTES, TILE)
    own = input + (rank * stride if SHARDS > 1 else rank * 0)
    place = sent_offset + (rank * staged if SHARDS > 1 else rank * 0)
    sources = ()
    for sender in tl.static_range(N):
        sources = sources + (tl.where(sender == rank, own, stagings[sender] + place) + begin,)
    result = load_combined(sources, lanes, mask, N, OP, DTYPE, FLOAT, UNIT == 16)
    tl.store(pointer(output + begin, DTYPE, ALIGNED) + lanes, result, mask=mask)


KERNELS = (_through_host,)

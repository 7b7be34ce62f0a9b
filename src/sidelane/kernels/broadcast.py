# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Broadcasts of many bytes: the root sends them once, and its peers relay them.

Pushed ones go into outputs or staging. Tiles have owners, the peers in turn. The root stores a tile in the target of
its owner, and the owner stores it in the targets of the others. A block does that in *chunks*, so that a chunk is
relayed while the root sends the next::

    root    ready? | chunk 0 -> owners, signal | chunk 1 -> owners, signal | ...
    others  ready? | wait: chunk 0 | -> others | wait: chunk 1 | -> others | ... | done?

All ranks wait until all are ready, though only the root depends on it: a rank that waited for the root's chunks alone
would blame the root if another peer is late.

With one peer nothing is relayed, and there is one chunk. Targets are symmetric outputs, or else staging, from where
each rank copies to its own output: its own tiles with each chunk, the others at the end. The floor is ``S / B`` for S
bytes over a link of B, and one chunk; without relays ``(N - 1) S / B``.

A megabyte or so among more than two ranks goes by block flags: each peer gets another part, and passes it on::

    root    part k of data -> its slot on peer k, signal |                             wait: all there
    others  wait for the root's                          | slot -> all others, signal, wait: all there | -> data

No rank has to signal that it is ready, which pushes require, at the cost of one more hop.

Equivalent: ``data = data of the root``, on every rank.

Legend: N ranks; STAGED: targets are staging; ``behind`` is the number of ranks from the root to this one; UNIT and TILE
as in ``memory``; TABLE and the other constants of tiles as in ``tile_table``.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import (
    address_of,
    addresses_of,
    end_generation,
    next_generation,
    relaxed_signal,
    signal,
    wait,
    wait_for_rank,
)
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put
from sidelane.kernels import block_flags
from sidelane.kernels.block_flags import block_slot
from sidelane.kernels.tile_table import FIRST_GROUP, Tiles, at_tile, call_of, ends_of, fetch_tile, peer_address
from sidelane.program.kernel_chunks import MOST_CHUNKS, broadcast_rounds

TILE_BYTES = 16384
WARPS = 16

RELAYED_TILE_BYTES = block_flags.TILE_BYTES
"""Bytes of a tile of relayed block flags."""

DONE = tl.constexpr(layout.PHASES - 1)
assert layout.PHASES - 2 == MOST_CHUNKS


def arrange_push(site: LaunchSite, tiles: Tiles, root: int, stagings: tuple[int, ...] | None) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        tiles: tiles of ``TILE_BYTES``; input and output of a piece are its data. Without staging, its one group has its
            addresses on all ranks, the root's first (``from_root``).
        root: rank whose bytes all ranks get.
        stagings: address of each rank's staging, aligned to 16 bytes; None where peers reach all tensors.
    """
    n, staged = site.world_size, stagings is not None
    constants = {"N": n, "STAGED": staged, **tiles.constants}
    blocks = site.blocks(tiles.count)  # the same on all ranks, as the tiles that each block moves in a chunk
    rounds = broadcast_rounds(tiles.count, blocks, n, staged=staged)
    arguments = (*tiles.arguments, rounds, site.rank, root, (site.rank - root) % n, site.status, site.counters)
    targets = tiles.addresses(0) if stagings is None else padded(from_root(stagings, root))
    addresses = padded(site.rotated(site.arenas)) + targets
    return Launch(_broadcast_push, blocks, WARPS, arguments + addresses, constants)


def arrange_relay(site: LaunchSite, data: int, nbytes: int, root: int) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks by block flags, through its peers.

    Args:
        site: rank, arenas and blocks of the launch, with more than two ranks.
        data: address of the bytes, on this rank.
        nbytes: 1 to ``BLOCK_SLOT_BYTES`` for each peer.
        root: rank whose bytes all ranks get.

    Raises:
        ValueError: there are too many bytes or none, or too few ranks.
    """
    n = site.world_size
    if n <= 2:
        raise ValueError(f"broadcast_relay: ranks (value={n}, allowed=3 and more)")
    part = -(-nbytes // ((n - 1) * RELAYED_TILE_BYTES)) * RELAYED_TILE_BYTES
    constants = {"N": n, "UNIT": unit_bytes(data, nbytes), "TILE": RELAYED_TILE_BYTES}
    blocks = block_flags.blocks_of(site, part // RELAYED_TILE_BYTES, part)
    arguments = (data, nbytes, part, site.rank, root, (site.rank - root) % n, site.status, site.counters)
    return Launch(_broadcast_relay, blocks, block_flags.WARPS, arguments + padded(site.rotated(site.arenas)), constants)


def from_root(addresses: tuple[int, ...], root: int) -> tuple[int, ...]:
    """Rotate addresses of all ranks to begin with the root's."""
    return addresses[root:] + addresses[:root]


@triton.jit
def _broadcast_push(
    table, tiles, input, output, nbytes, input_stride, output_stride, rounds, rank, root, behind, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    t0, t1, t2, t3, t4, t5, t6, t7,
    N: tl.constexpr, STAGED: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    targets = (t0, t1, t2, t3, t4, t5, t6, t7)
    generation = next_generation(counters)
    ends = ends_of(table, TABLE)
    call = call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, nbytes, TILE)
    spent = tl.full((), 0, tl.int32)
    if N > 1:
        step = tl.num_programs(0) * rounds
        chunks = (tiles + step - 1) // step
        tile = tl.program_id(0).to(tl.int64)
        turn = rounds * 0
        chunk = rounds * 0
        relaxed_signal(arenas, rank, generation, 0, N)
        spent = wait(p0, generation, status, spent, 0, N)
        if rank == root:
            while chunk < chunks:
                end = tl.minimum(tiles, (chunk + 1) * step)
                while tile < end:
                    at_tile(_send_tile, (targets, _owner_of(turn, N), N, STAGED, TABLE), call, tile,
                            TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                    turn += 1
                    tile += tl.num_programs(0)
                signal(arenas, rank, generation, 1 + chunk, N)
                chunk += 1
            relaxed_signal(arenas, rank, generation, DONE, N)
        else:
            while chunk < chunks:
                spent = wait_for_rank(p0, root, generation, status, spent, 1 + chunk)
                end = tl.minimum(tiles, (chunk + 1) * step)
                while tile < end:
                    if (N > 2 or STAGED) and _owner_of(turn, N) == behind:
                        at_tile(_relay_tile, (targets, behind, N, STAGED, TABLE), call, tile,
                                TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                    turn += 1
                    tile += tl.num_programs(0)
                chunk += 1
            if N > 2:
                signal(arenas, rank, generation, DONE, N)
                spent = wait(p0, generation, status, spent, DONE, N)
                if STAGED:
                    tile = tl.program_id(0).to(tl.int64)
                    turn = rounds * 0
                    while tile < tiles:
                        if _owner_of(turn, N) != behind:
                            at_tile(fetch_tile, (address_of(targets, behind, N),), call, tile,
                                    TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)  # fmt: skip
                        turn += 1
                        tile += tl.num_programs(0)
    end_generation(counters, generation)


@triton.jit
def _owner_of(turn, N: tl.constexpr):
    """Return the owner of the tile that this block moves as number ``turn``: 1 to N - 1 ranks behind the root.

    Blocks begin with different owners: if they have one tile each, all peers still relay equally many.
    """
    return 1 + (tl.program_id(0) + turn) % (N - 1)


@triton.jit
def _target(part, targets, index, N: tl.constexpr, STAGED: tl.constexpr, TABLE: tl.constexpr):
    """Return the address of a part on the rank that is ``index`` behind the root."""
    if TABLE and not STAGED:
        return peer_address(part, index, FIRST_GROUP)
    else:
        return address_of(targets, index, N) + part[2]


@triton.jit
def _send_tile(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    targets, owner, N: tl.constexpr, STAGED: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Store a tile in the target of its owner."""
    values = get(part[0], tile, nbytes, UNIT, TILE, WHOLE)
    put(_target(part, targets, owner, N, STAGED, TABLE), values, tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _relay_tile(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    targets, behind, N: tl.constexpr, STAGED: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Store a tile that this rank owns in the targets of all other ranks."""
    values = get(_target(part, targets, behind, N, STAGED, TABLE), tile, nbytes, UNIT, TILE, WHOLE)
    for other in tl.static_range(N - 2):
        peer = 1 + (behind + other) % (N - 1)
        put(_target(part, targets, peer, N, STAGED, TABLE), values, tile, nbytes, UNIT, TILE, WHOLE)
    if STAGED:
        put(part[1], values, tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _broadcast_relay(
    data, nbytes, part, rank, root, behind, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    arenas = addresses_of(peers, N)
    generation = next_generation(counters)
    spent = tl.full((), 0, tl.int32)
    tiles = part // TILE
    tile = tl.program_id(0).to(tl.int64)
    if rank == root:
        while tile < tiles:
            for peer in tl.static_range(1, N):
                start = (peer - 1) * part
                values = get(data + start, tile, nbytes - start, UNIT, TILE, False)
                put(block_slot(peers[peer], generation, rank, N), values, tile, nbytes - start, UNIT, TILE, False)
            tile += tl.num_programs(0)
        signal(arenas, rank, generation, 0, N)
    else:
        spent = wait_for_rank(p0, root, generation, status, spent, 0)
        there = nbytes - (behind - 1) * part
        while tile < tiles:
            values = get(block_slot(p0, generation, root, N), tile, there, UNIT, TILE, False)
            for turn in tl.static_range(1, N):
                if turn != N - behind:  # the root
                    put(block_slot(peers[turn], generation, rank, N), values, tile, there, UNIT, TILE, False)
            tile += tl.num_programs(0)
    signal(arenas, rank, generation, 1, N)
    wait(p0, generation, status, spent, 1, N)
    if rank != root:
        tile = tl.program_id(0).to(tl.int64)
        while tile < tiles:
            for peer in tl.static_range(1, N):
                sender = tl.where(peer == behind, root, (root + peer) % N)
                start = (peer - 1) * part
                values = get(block_slot(p0, generation, sender, N), tile, nbytes - start, UNIT, TILE, False)
                put(data + start, values, tile, nbytes - start, UNIT, TILE, False)
            tile += tl.num_programs(0)
    end_generation(counters, generation)


KERNELS = (_broadcast_push, _broadcast_relay)

"""Chunks of kernels, some tiles of every thread block each. This module needs no device.

In an all_reduce that stores shards in the staging of their owners, one chunk is added up while peers store the next.
Chunks take turns among ``SLOTS`` slots, so that staging need not have room for whole shards. In a broadcast peers relay
one chunk (``kernels/broadcast.py``) while the next arrives.
"""

from __future__ import annotations

import dataclasses
import math

TILE_BYTES = 16 << 10
"""Bytes that a thread block moves at a time: 16 MiB of two H200s take 54 us, in tiles of 8 KB 58
(results/notes/probes.md)."""

SLOTS = 4
"""Number of slots. A rank stores chunk c in the slot of chunk c - 4. Before that it has waited for each peer's signal
of chunk c - 2, which a peer gives after adding up its chunk c - 4: so slots need no signal of their own; with three
they would."""

MOST_CHUNKS = 32
"""Largest number of chunks: kernels have signals for so many (``device/layout.py``)."""

LEAST_ROUNDS = 2
"""Smallest number of tiles that a block moves in a chunk: a chunk's signal waits for all of its stores."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """Division of a shard into chunks.

    Attributes:
        tiles: number of tiles of a shard.
        blocks: number of thread blocks, each of which has every ``blocks``-th tile.
        rounds: number of tiles of a block in a chunk.
        tile_bytes: size of a tile in bytes.
    """

    tiles: int
    blocks: int
    rounds: int
    tile_bytes: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.tiles // (self.blocks * self.rounds))

    @property
    def peer_bytes(self) -> int:
        """Bytes of staging that an owner has for each of its peers."""
        return min(self.tiles, SLOTS * self.blocks * self.rounds) * self.tile_bytes

    def offset(self, tile: int, source: int, owner: int) -> int:
        """Return the offset in the owner's staging of the tile that ``source``, another rank, stores there."""
        chunk = tile // (self.blocks * self.rounds)
        slot = (chunk % SLOTS - chunk) * self.rounds * self.blocks
        return (source - (source > owner)) * self.peer_bytes + (tile + slot) * self.tile_bytes


def chunks_of(shard_bytes: int, most_blocks: int) -> Chunks:
    """Cut a shard into as many chunks as a block has tiles in each: a large chunk takes long to arrive before its sum
    can begin, and a block waits for each small one.

    Args:
        shard_bytes: size of the largest shard in bytes.
        most_blocks: largest number of thread blocks.

    >>> chunks_of(128 << 20, 128), chunks_of(128 << 20, 128).count
    (Chunks(tiles=8192, blocks=128, rounds=8, tile_bytes=16384), 8)
    >>> chunks_of(100, 128).peer_bytes
    16384
    """
    tiles = max(1, -(-shard_bytes // TILE_BYTES))
    blocks = min(tiles, most_blocks)
    of_a_block = -(-tiles // blocks)
    rounds = math.isqrt(of_a_block - 1) + 1
    return Chunks(tiles, blocks, max(LEAST_ROUNDS, rounds, -(-of_a_block // MOST_CHUNKS)), TILE_BYTES)


def broadcast_rounds(tiles: int, blocks: int, world_size: int, *, staged: bool) -> int:
    """Return the number of tiles that each block moves in a chunk. With one peer and no staging, there is one chunk.

    Args:
        tiles: number of tiles in the message.
        blocks: number of thread blocks of the launch.
        world_size: number of ranks.
        staged: peers copy the received bytes out of staging.

    >>> broadcast_rounds(640, 64, 2, staged=False), broadcast_rounds(640, 64, 2, staged=True)
    (10, 2)
    >>> broadcast_rounds(6400, 64, 8, staged=False)
    4
    """
    rounds = -(-tiles // blocks)
    if world_size <= 2 and not staged:
        return max(1, rounds)
    return max(LEAST_ROUNDS, -(-rounds // MOST_CHUNKS))

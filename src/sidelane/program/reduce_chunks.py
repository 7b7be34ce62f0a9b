"""How an all_reduce that stores shards with their owners goes through the owners' staging. No device in here.

In *chunks*, some tiles of every thread block each: while one is stored by the peers, the one before is added up. Chunks
take turns among ``SLOTS`` slots, so that staging need not have room for whole shards.
"""

from __future__ import annotations

import dataclasses
import math

TILE_BYTES = 16 << 10
"""What a thread block moves at a time: 16 MiB of two H200s take 54 us, in tiles of 8 KB 58 (docs/lab/probes.md)."""

SLOTS = 4
"""A rank stores chunk c where chunk c - 4 lay. Before that it has waited for each peer's signal of chunk c - 2, which a
peer gives when it has added up its chunk c - 4: so slots need no signal of their own, and three would."""

MOST_CHUNKS = 32
"""As many as kernels have signals for (``device/layout.py``)."""

LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """How a shard is cut.

    Attributes:
        tiles: of a shard.
        blocks: thread blocks, each of which has every ``blocks``-th tile.
        rounds: tiles of a block in a chunk.
        tile_bytes: of a tile.
    """

    tiles: int
    blocks: int
    rounds: int
    tile_bytes: int

    @property
    def count(self) -> int:
        """Chunks that there are."""
        return -(-self.tiles // (self.blocks * self.rounds))

    @property
    def peer_bytes(self) -> int:
        """Staging that an owner has for each of its peers."""
        return min(self.tiles, SLOTS * self.blocks * self.rounds) * self.tile_bytes

    def place(self, tile: int, source: int, owner: int) -> int:
        """Where in its staging the owner of a tile has what ``source``, another rank, has stored of it."""
        chunk = tile // (self.blocks * self.rounds)
        slot = (chunk % SLOTS - chunk) * self.rounds * self.blocks
        return (source - (source > owner)) * self.peer_bytes + (tile + slot) * self.tile_bytes


def chunks_of(shard_bytes: int, most_blocks: int, tile_bytes: int | None = None) -> Chunks:
    """Cut a shard, into as many chunks as a block has tiles in each: a large chunk takes long until it is there and its
    sum can begin, and behind a small one a block waits as long until it has arrived.

    Args:
        shard_bytes: of the largest shard.
        most_blocks: thread blocks that there may be.
        tile_bytes: of a tile; None for what kernels have.

    >>> chunks_of(128 << 20, 128), chunks_of(128 << 20, 128).count
    (Chunks(tiles=8192, blocks=128, rounds=8, tile_bytes=16384), 8)
    >>> chunks_of(100, 128).peer_bytes
    16384
    """
    tile_bytes = TILE_BYTES if tile_bytes is None else tile_bytes
    tiles = max(1, -(-shard_bytes // tile_bytes))
    blocks = min(tiles, most_blocks)
    of_a_block = -(-tiles // blocks)
    rounds = math.isqrt(of_a_block - 1) + 1
    return Chunks(tiles, blocks, max(LEAST_ROUNDS, rounds, -(-of_a_block // MOST_CHUNKS)), tile_bytes)

"""Chunks of a broadcast that peers relay (``kernels/broadcast.py``). This module needs no device."""

from __future__ import annotations

from sidelane.program.reduce_chunks import MOST_CHUNKS

LEAST_ROUNDS = 2
"""Smallest number of tiles that a block moves in a chunk: a chunk's signal waits for all of its stores."""


def rounds_of(tiles: int, blocks: int, world_size: int, *, staged: bool) -> int:
    """Return the number of tiles that each block moves in a chunk. With one peer and no staging, there is one chunk.
        tiles: number of tiles in the message.
        blocks: number of thread blocks of the launch.
        world_size: number of ranks.
        staged: peers copy the received bytes out of staging.

    >>> rounds_of(640, 64, 2, staged=False), rounds_of(640, 64, 2, staged=True), rounds_of(6400, 64, 8, staged=False)
    (10, 2, 4)
    """
    rounds = -(-tiles // blocks)
    if world_size <= 2 and not staged:
        return max(1, rounds)
    return max(LEAST_ROUNDS, -(-rounds // MOST_CHUNKS))

"""How a broadcast that peers relay is cut into chunks (``kernels/relay.py``). No device in here."""

from __future__ import annotations

from sidelane.program.reduce_chunks import MOST_CHUNKS

LEAST_ROUNDS = 2
"""Tiles of a block in a chunk: its signal waits for all that was stored."""


def rounds_of(tiles: int, blocks: int, world_size: int, *, staged: bool) -> int:
    """Tiles that each block moves in a chunk; with one peer and nothing to copy behind it, a chunk is all there is.

    Args:
        tiles: of the message.
        blocks: thread blocks of the launch.
        world_size: ranks.
        staged: peers copy what they get out of staging.

    >>> rounds_of(640, 64, 2, staged=False), rounds_of(640, 64, 2, staged=True), rounds_of(6400, 64, 8, staged=False)
    (10, 2, 4)
    """
    rounds = -(-tiles // blocks)
    if world_size <= 2 and not staged:
        return max(1, rounds)
    return max(LEAST_ROUNDS, -(-rounds // MOST_CHUNKS))

"""Where slots of the LL protocol and of block flags lie, which shadows have behind all staging (``device/layout.py``).

Each sender has two places with every receiver, for even and odd generations: so such a kernel has two shadows, whose
calls take turns, and that two places are enough is proved of both together.
"""

from __future__ import annotations

from shadows.blocks import BLOCK_FLAGS
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Flag
from sidelane.program.kernel import MOST_BLOCK_FLAG_BYTES, MOST_LL_BYTES

CELL_BYTES = 4
"""Of data, with a flag of their own."""

ARENA = 1 << 40
"""Where it begins in staging."""

_CELLS = MOST_LL_BYTES // CELL_BYTES


def arena_end(world_size: int) -> int:
    """Behind it."""
    return _cells(world_size) + 2 * world_size * MOST_LL_BYTES


def block_slot(rank: int, sender: int, parity: int, world_size: int, at: int, nbytes: int) -> Span:
    """Bytes of a sender's slot with a rank, of block flags."""
    place = parity * world_size + sender
    return Span(rank, Buffer.STAGING, ARENA + place * MOST_BLOCK_FLAG_BYTES + at, nbytes)


def ll_slot(rank: int, sender: int, parity: int, world_size: int, at: int, nbytes: int) -> Span:
    """Data of a sender's LL words with a rank."""
    slot = parity * world_size + sender
    return Span(rank, Buffer.STAGING, _cells(world_size) + slot * MOST_LL_BYTES + at, nbytes)


def cell_flag(rank: int, sender: int, parity: int, world_size: int, cell: int) -> Flag:
    """That of a cell, which holds the generation."""
    return Flag(rank, BLOCK_FLAGS + (parity * world_size + sender) * _CELLS + cell)


def loaded_flag(rank: int, peer: int, world_size: int, cell: int) -> Flag:
    """Not in memory: that a block has loaded what it sends as a cell, as its own threads know behind a barrier."""
    return Flag(rank, BLOCK_FLAGS + (2 * world_size + peer) * _CELLS + cell)


def once_flag(rank: int, sender: int, parity: int, world_size: int, cell: int) -> Flag:
    """That of a cell which all peers read where its sender has it: one for each of them, as flags have one reader."""
    return Flag(rank, BLOCK_FLAGS + ((3 + parity) * world_size + sender) * _CELLS + cell)


def once_slot(sender: int, world_size: int) -> tuple[int, int]:
    """Rank and number of the slot that all peers read."""
    return sender, (sender + 1) % world_size


def cell_flags(world_size: int) -> int:
    """Flags of a rank with these."""
    return BLOCK_FLAGS + 5 * world_size * _CELLS


def _cells(world_size: int) -> int:
    return ARENA + 2 * world_size * MOST_BLOCK_FLAG_BYTES

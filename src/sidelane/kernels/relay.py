# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Relays: how a broadcast of many bytes leaves the root once, not once for each peer.

Tiles have owners, the peers in turn. The root stores a tile where its owner wants it, and the owner stores it where the
others do. A block does that in *chunks*, so that a chunk is relayed while the root sends the next::

    root    ready? | chunk 0 -> owners, signal | chunk 1 -> owners, signal | ...
    others  ready? | wait: chunk 0 | -> others | wait: chunk 1 | -> others | ... | done?

All wait for all to be ready, though only the root depends on it: who waited for the root's chunks alone would name the
root where another peer is late.

With one peer nothing is relayed, and a chunk is all there is. Targets are symmetric outputs, or else staging, from
where each rank copies to its own output: its own tiles with each chunk, the others at the end.

The floor is ``S / B`` for S bytes over a link of B, and one chunk; without relays ``(N - 1) S / B``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device import layout
from sidelane.device.launch import LaunchSite
from sidelane.program.broadcast_chunks import rounds_of
from sidelane.program.reduce_chunks import MOST_CHUNKS

TILE_BYTES = 16384
WARPS = 16

DONE = tl.constexpr(layout.PHASES - 1)
assert layout.PHASES - 2 == MOST_CHUNKS


def blocks_and_rounds(site: LaunchSite, tiles: int, *, staged: bool) -> tuple[int, int]:
    """Thread blocks, and tiles that each of them moves in a chunk; the same on all ranks."""
    blocks = site.blocks(tiles)
    return blocks, rounds_of(tiles, blocks, site.world_size, staged=staged)


def from_root(addresses: tuple[int, ...], root: int) -> tuple[int, ...]:
    """One address a rank, beginning with the root's."""
    return addresses[root:] + addresses[:root]


@triton.jit
def chunks_of(tiles, rounds):
    """How many there are."""
    each = tl.num_programs(0) * rounds
    return (tiles + each - 1) // each


@triton.jit
def owner_of(turn, N: tl.constexpr):
    """Which peer owns the tile that this block moves as number ``turn``, 1 to N - 1 ranks behind the root.

    Blocks begin with different ones: if they have a tile each, all peers still relay as many.
    """
    return 1 + (tl.program_id(0) + turn) % (N - 1)

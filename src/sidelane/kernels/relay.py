# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Relays: in a broadcast of many bytes the root sends them once, not once for each peer.

Tiles have owners, the peers in turn. The root stores a tile in the target of its owner, and the owner stores it in the
targets of the others. A block does that in *chunks*, so that a chunk is relayed while the root sends the next::

    root    ready? | chunk 0 -> owners, signal | chunk 1 -> owners, signal | ...
    others  ready? | wait: chunk 0 | -> others | wait: chunk 1 | -> others | ... | done?

All ranks wait until all are ready, though only the root depends on it: a rank that waited for the root's chunks alone
would blame the root if another peer is late.

With one peer nothing is relayed, and there is one chunk. Targets are symmetric outputs, or else staging, from
where each rank copies to its own output: its own tiles with each chunk, the others at the end.

The floor is ``S / B`` for S bytes over a link of B, and one chunk; without relays ``(N - 1) S / B``.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.language import tl, triton
from sidelane.device.launch import LaunchSite
from sidelane.program.broadcast_chunks import rounds_of
from sidelane.program.reduce_chunks import MOST_CHUNKS

TILE_BYTES = 16384
WARPS = 16

DONE = tl.constexpr(layout.PHASES - 1)
assert layout.PHASES - 2 == MOST_CHUNKS


def blocks_and_rounds(site: LaunchSite, tiles: int, *, staged: bool) -> tuple[int, int]:
    """Return the number of thread blocks, and of tiles that each moves in a chunk; the same on all ranks."""
    blocks = site.blocks(tiles)
    return blocks, rounds_of(tiles, blocks, site.world_size, staged=staged)


def from_root(addresses: tuple[int, ...], root: int) -> tuple[int, ...]:
    """Rotate addresses of all ranks to begin with the root's."""
    return addresses[root:] + addresses[:root]


@triton.jit
def chunks_of(tiles, rounds):
    """Return the number of chunks."""
    each = tl.num_programs(0) * rounds
    return (tiles + each - 1) // each


@triton.jit
def owner_of(turn, N: tl.constexpr):
    """Return the owner of the tile that this block moves as number ``turn``: 1 to N - 1 ranks behind the root.

    Blocks begin with different owners: if they have one tile each, all peers still relay equally many.
    """
    return 1 + (tl.program_id(0) + turn) % (N - 1)

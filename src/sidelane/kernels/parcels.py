# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Parcels: plain data in the arena of the receiver, with one flag after the data of each block.

They take half of the bytes of cells, and one handshake where pushes into an output need two: no rank has to signal that
it is ready, since there are two places for each sender, for even and odd generations (``cells`` explains why two
suffice).
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import addresses_of, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put

CELLS_OFFSET = tl.constexpr(layout.CELLS_OFFSET)
SLOT_BYTES = tl.constexpr(layout.SLOT_BYTES)
PARCEL_BYTES = tl.constexpr(layout.PARCEL_BYTES)

TILE_BYTES = 4096
WARPS = 8


def blocks_of(site: LaunchSite, part_bytes: int) -> int:
    """Return the number of thread blocks for parcels of ``part_bytes``.

    Raises:
        ValueError: a part is too large or empty.
    """
    if not 1 <= part_bytes <= layout.PARCEL_BYTES:
        raise ValueError(f"parcels: part_bytes (value={part_bytes}, allowed=1..{layout.PARCEL_BYTES})")
    return site.blocks(-(-part_bytes // TILE_BYTES))


def arguments_of(site: LaunchSite, output: int, input: int, part_bytes: int, *, distinct: bool) -> tuple[int, ...]:
    """Return the arguments that kernels of parcels share, without the constants."""
    arguments = (output, input, part_bytes, part_bytes if distinct else 0, site.rank, site.board)
    return arguments + padded(site.rotated(site.arenas))


def constants_of(site: LaunchSite, output: int, input: int, part_bytes: int, *, distinct: bool) -> dict[str, object]:
    """Return the constants that kernels of parcels share."""
    return {
        "N": site.world_size,
        "DISTINCT": distinct,
        "UNIT": unit_bytes(output, input, part_bytes),
        "TILE": TILE_BYTES,
    }


@triton.jit
def place(arena, generation, sender, N: tl.constexpr):
    """Return the address of the parcel of ``sender`` in an arena of N ranks, a multiple of 16."""
    parcels = arena + CELLS_OFFSET + 2 * N * SLOT_BYTES
    return parcels + ((generation & 1) * N + sender).to(tl.int64) * PARCEL_BYTES


@triton.jit
def exchange(
    input, peers, part_bytes, stride, rank, generation, board,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Send the tiles of this block and wait until its tiles of all ranks have come."""
    whole = part_bytes // TILE
    first = tl.program_id(0).to(tl.int64)
    tile = first
    while tile < whole:
        _send_tile(input, peers, tile, part_bytes, stride, rank, generation, N, DISTINCT, UNIT, TILE, True)
        tile += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        _send_tile(input, peers, whole, part_bytes, stride, rank, generation, N, DISTINCT, UNIT, TILE, False)
    signal(addresses_of(peers, N), rank, generation, 0, N)
    wait(peers[0], generation, board, tl.full((), 0, tl.int32), 0, N)


@triton.jit
def _send_tile(
    input, peers, tile, part_bytes, stride, rank, generation,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Send one tile of each part, also to this rank itself, so that all received tiles are in one place."""
    if DISTINCT:
        for turn in tl.static_range(N):
            values = get(input + (rank + turn) % N * stride, tile, part_bytes, UNIT, TILE, WHOLE)
            put(place(peers[turn], generation, rank, N), values, tile, part_bytes, UNIT, TILE, WHOLE)
    else:
        values = get(input, tile, part_bytes, UNIT, TILE, WHOLE)
        for turn in tl.static_range(N):
            put(place(peers[turn], generation, rank, N), values, tile, part_bytes, UNIT, TILE, WHOLE)

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_gather and all_to_all of some hundred kilobytes, as parcels: one handshake, and a copy inside each rank.

    rank 0   input -> parcels 0 of every rank | signal, wait: all there | own parcels -> output
    rank 1   input -> parcels 1 of every rank | signal, wait: all there | own parcels -> output

Equivalent: see ``exchange_cells``. In place is allowed: a block sends all bytes that it overwrites before it writes.

Legend: N ranks; UNIT and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import end_generation, next_generation
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite
from sidelane.device.memory import get, put
from sidelane.kernels.parcels import WARPS, arguments_of, blocks_of, constants_of, exchange, place


def arrange(site: LaunchSite, output: int, input: int, part_bytes: int, *, distinct: bool) -> Launch:
    """Make the launch that moves one part for each pair of ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of ``world_size`` parts.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        part_bytes: 1 to ``PARCEL_BYTES``.
        distinct: each peer gets its own part (all_to_all), else all get the same (all_gather).

    Raises:
        ValueError: a part is too large or empty.
    """
    given = (site, output, input, part_bytes)
    blocks = blocks_of(site, part_bytes)
    return Launch(
        KERNEL, blocks, WARPS, arguments_of(*given, distinct=distinct), constants_of(*given, distinct=distinct)
    )


@triton.jit
def _exchange_parcels(
    output, input, part_bytes, stride, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    exchange(input, peers, part_bytes, stride, rank, generation, board, N, DISTINCT, UNIT, TILE)

    whole = part_bytes // TILE
    first = tl.program_id(0).to(tl.int64)
    tile = first
    while tile < whole:
        _unpack(output, p0, tile, part_bytes, generation, N, UNIT, TILE, True)
        tile += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        _unpack(output, p0, whole, part_bytes, generation, N, UNIT, TILE, False)
    end_generation(p0, generation)


@triton.jit
def _unpack(
    output, arena, tile, part_bytes, generation,
    N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Copy one tile of every parcel, all loads before all stores."""
    tiles = ()
    for sender in tl.static_range(N):
        tiles = tiles + (get(place(arena, generation, sender, N), tile, part_bytes, UNIT, TILE, WHOLE),)
    for sender in tl.static_range(N):
        put(output + sender * part_bytes, tiles[sender], tile, part_bytes, UNIT, TILE, WHOLE)


KERNEL = _exchange_parcels

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""broadcast of some hundred kilobytes, as a parcel for each peer.

    root    data -> its parcel on every peer | signal, wait: all there
    others                                     signal, wait: all there | the root's parcel -> data

Equivalent: ``data = data of the root``, on every rank.

Legend: N ranks; UNIT and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put
from sidelane.kernels.parcels import TILE_BYTES, WARPS, blocks_of, place


def arrange(site: LaunchSite, data: int, nbytes: int, root: int) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        data: address of the bytes, on this rank.
        nbytes: 1 to ``PARCEL_BYTES``.
        root: rank whose bytes all ranks get.

    Raises:
        ValueError: there are too many bytes, or none.
    """
    constants = {"N": site.world_size, "UNIT": unit_bytes(data, nbytes), "TILE": TILE_BYTES}
    arguments = (data, nbytes, site.rank, root, site.board, *padded(site.rotated(site.arenas)))
    return Launch(KERNEL, blocks_of(site, nbytes), WARPS, arguments, constants)


@triton.jit
def _broadcast_parcels(
    data, nbytes, rank, root, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    first = tl.program_id(0).to(tl.int64)
    tiles = (nbytes + TILE - 1) // TILE
    if rank == root:
        tile = first
        while tile < tiles:
            values = get(data, tile, nbytes, UNIT, TILE, False)
            for turn in tl.static_range(1, N):
                put(place(peers[turn], generation, rank, N), values, tile, nbytes, UNIT, TILE, False)
            tile += tl.num_programs(0)
    signal(addresses_of(peers, N), rank, generation, 0, N)
    wait(p0, generation, board, tl.full((), 0, tl.int32), 0, N)
    if rank != root:
        tile = first
        while tile < tiles:
            values = get(place(p0, generation, root, N), tile, nbytes, UNIT, TILE, False)
            put(data, values, tile, nbytes, UNIT, TILE, False)
            tile += tl.num_programs(0)
    end_generation(p0, generation)


KERNEL = _broadcast_parcels

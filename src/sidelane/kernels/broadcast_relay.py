# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""broadcast of a megabyte or so among more than two ranks: a parcel for each peer, which passes it on to the others.

    root    part k of data -> its parcel on peer k, signal |                               wait: all there
    others  wait for the root's                            | parcel -> all others, signal, wait: all there | -> data

The root sends the bytes once, not once for each peer, at the cost of one more hop. No rank has to signal that it is
ready, which pushes into outputs or staging require.

Equivalent: ``data = data of the root``, on every rank.

Legend: N ranks; UNIT and TILE as in ``memory``; PART bytes for each peer, the last ones fewer or none; ``behind`` is
the number of ranks from the root to this one.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait, wait_for_rank
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put
from sidelane.kernels.parcels import TILE_BYTES, WARPS, blocks_of, place


def arrange(site: LaunchSite, data: int, nbytes: int, root: int) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch, with more than two ranks.
        data: address of the bytes, on this rank.
        nbytes: 1 to ``PARCEL_BYTES`` for each peer.
        root: rank whose bytes all ranks get.

    Raises:
        ValueError: there are too many bytes or none, or too few ranks.
    """
    n = site.world_size
    if n <= 2:
        raise ValueError(f"broadcast_relay: ranks (value={n}, allowed=3 and more)")
    part = -(-nbytes // ((n - 1) * TILE_BYTES)) * TILE_BYTES
    constants = {"N": n, "UNIT": unit_bytes(data, nbytes), "TILE": TILE_BYTES}
    arguments = (data, nbytes, part, site.rank, root, (site.rank - root) % n, site.board)
    return Launch(KERNEL, blocks_of(site, part), WARPS, arguments + padded(site.rotated(site.arenas)), constants)


@triton.jit
def _broadcast_relay(
    data, nbytes, part, rank, root, behind, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    arenas = addresses_of(peers, N)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    tiles = part // TILE
    tile = tl.program_id(0).to(tl.int64)
    if rank == root:
        while tile < tiles:
            for peer in tl.static_range(1, N):
                start = (peer - 1) * part
                values = get(data + start, tile, nbytes - start, UNIT, TILE, False)
                put(place(peers[peer], generation, rank, N), values, tile, nbytes - start, UNIT, TILE, False)
            tile += tl.num_programs(0)
        signal(arenas, rank, generation, 0, N)
    else:
        spent = wait_for_rank(p0, root, generation, board, spent, 0)
        there = nbytes - (behind - 1) * part
        while tile < tiles:
            values = get(place(p0, generation, root, N), tile, there, UNIT, TILE, False)
            for turn in tl.static_range(1, N):
                if turn != N - behind:  # the root
                    put(place(peers[turn], generation, rank, N), values, tile, there, UNIT, TILE, False)
            tile += tl.num_programs(0)
    signal(arenas, rank, generation, 1, N)
    wait(p0, generation, board, spent, 1, N)
    if rank != root:
        tile = tl.program_id(0).to(tl.int64)
        while tile < tiles:
            for peer in tl.static_range(1, N):
                sender = tl.where(peer == behind, root, (root + peer) % N)
                start = (peer - 1) * part
                values = get(place(p0, generation, sender, N), tile, nbytes - start, UNIT, TILE, False)
                put(data + start, values, tile, nbytes - start, UNIT, TILE, False)
            tile += tl.num_programs(0)
    end_generation(p0, generation)


KERNEL = _broadcast_relay

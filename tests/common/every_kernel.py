"""A launch of every kernel of the collectives, for compilers: any number of ranks, odd addresses and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sidelane.device.launch import Launch, LaunchSite
from sidelane.kernels import block_flags, broadcast, direct, ll, staged, through_host
from sidelane.kernels.tile_table import KernelPiece, Tiles, TileTable
from sidelane.program.collective import ReduceOp, Reduction

AVERAGE = Reduction(ReduceOp.AVG, "bfloat16")
MB = 1 << 20


def site_of(ranks: int) -> LaunchSite:
    return LaunchSite(0, tuple(range(MB, (ranks + 1) * MB, MB)), 64, 1024, 64)


def moving(odd: int, ranks: int = 8) -> Iterator[Launch]:
    """One of each kernel; addresses and sizes are ``odd`` bytes beyond a multiple of 16."""
    site, stagings = site_of(ranks), (16 * MB,) * ranks
    here, small, large = 16 * MB + odd, 4096 + odd, MB + odd
    yield ll.arrange_broadcast(site, here, small, 1)
    yield broadcast.arrange_relay(site, here, large, 1)
    for distinct in (True, False):
        yield ll.arrange(site, here, here, small, None, distinct=distinct)
        for cut in (tiles, table):
            moved = cut(large, staged.tile_bytes(None), ranks)
            yield block_flags.arrange(site, cut(small, block_flags.TILE_BYTES, ranks), None, distinct=distinct)
            yield direct.arrange_push(site, cut(large, direct.MOVED_TILE_BYTES, ranks, 1), distinct=distinct)
            yield staged.arrange(site, moved, stagings, 2 * MB + 32, 0, None, distinct=distinct, gather=False)
            moved = cut(large, through_host.TILE_BYTES, ranks)
            yield through_host.arrange(site, moved, stagings, 2 * MB + 32, None, distinct=distinct, root=None)
    for cut in (tiles, table):
        yield block_flags.arrange_broadcast(site, cut(small, block_flags.TILE_BYTES, ranks), 1)
        yield broadcast.arrange_push(site, cut(large, broadcast.TILE_BYTES, ranks, 1), 1, None)
        yield broadcast.arrange_push(site, cut(large, broadcast.TILE_BYTES, ranks), 1, stagings)
        moved = cut(large, through_host.TILE_BYTES, ranks)
        yield through_host.arrange(site, moved, stagings, 2 * MB + 32, None, distinct=False, root=1)


def reducing(odd: int, ranks: int = 8) -> Iterator[Launch]:
    site, stagings = site_of(ranks), (16 * MB,) * ranks
    here, small, large = 16 * MB + odd, 4096 + odd, MB + odd
    yield ll.arrange(site, here, here, small, AVERAGE, distinct=True)
    yield direct.arrange_send(site, (here,) * ranks, here, stagings, large, ranks * large, AVERAGE)
    for cut, gather in itertools.product((tiles, table), (True, False)):
        yield block_flags.arrange(site, cut(small, block_flags.TILE_BYTES, ranks), AVERAGE, distinct=gather)
        given = (cut(large, staged.tile_bytes(AVERAGE), ranks), stagings, 2 * MB + 32, ranks * large, AVERAGE)
        yield staged.arrange(site, *given, distinct=cut is tiles, gather=gather)
        moved = cut(large, through_host.TILE_BYTES, ranks)
        yield through_host.arrange(site, moved, stagings, 2 * MB + 32, AVERAGE, distinct=gather, root=None)
        both = cut(large, direct.tile_bytes_at(site, listed=cut is table), ranks, 2)
        yield direct.arrange(site, both, both.count, AVERAGE, gather=gather)


def piece(nbytes: int, ranks: int, groups: int) -> KernelPiece:
    here = 16 * MB + nbytes % 16
    return KernelPiece(here, here, nbytes, nbytes, nbytes, 0, ((here,) * ranks,) * groups)


def tiles(nbytes: int, tile_bytes: int, ranks: int, groups: int = 0) -> Tiles:
    return Tiles.of(piece(nbytes, ranks, groups), tile_bytes)


def table(nbytes: int, tile_bytes: int, ranks: int, groups: int = 0) -> Tiles:
    return TileTable.of([piece(nbytes, ranks, groups)] * 2, tile_bytes).at(64)

"""A launch of every kernel of the collectives, for compilers: any number of ranks, odd addresses and sizes."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.device.launch import Launch, LaunchSite
from sidelane.kernels import (
    broadcast_cells,
    broadcast_parcels,
    broadcast_push,
    broadcast_relay,
    exchange_cells,
    exchange_parcels,
    list_broadcast_parcels,
    list_broadcast_push,
    list_direct,
    list_parcels,
    list_pull,
    list_push,
    parcels,
    pull,
    push,
    reduce_cells,
    reduce_direct,
    reduce_parcels,
    reduce_pull,
    reduce_push,
    relay,
)
from sidelane.kernels.list_table import ListPiece, ListTable
from sidelane.program.collective import ReduceOp, Reduction

AVERAGE = Reduction(ReduceOp.AVG, "bfloat16")
MB = 1 << 20


def site_of(ranks: int) -> LaunchSite:
    return LaunchSite(0, tuple(range(MB, (ranks + 1) * MB, MB)), 64, 64)


def moving(odd: int, ranks: int = 8) -> Iterator[Launch]:
    """One of each kernel; addresses and sizes are ``odd`` bytes beyond a multiple of 16."""
    site, stagings = site_of(ranks), (16 * MB,) * ranks
    here, small, large = 16 * MB + odd, 4096 + odd, MB + odd
    reached = (here,) * ranks
    for distinct in (True, False):
        yield exchange_cells.arrange(site, here, here, small, distinct=distinct)
        yield exchange_parcels.arrange(site, here, here, small, distinct=distinct)
        yield push.arrange(site, reached, here, large, distinct=distinct)
        yield pull.arrange(site, here, here, stagings, large, distinct=distinct)
    yield broadcast_cells.arrange(site, here, small, 1)
    yield broadcast_parcels.arrange(site, here, small, 1)
    yield broadcast_relay.arrange(site, here, large, 1)
    yield broadcast_push.arrange(site, here, reached, large, 1, staged=False)
    yield broadcast_push.arrange(site, here, stagings, large, 1, staged=True)
    tables = table(site, odd, parcels.TILE_BYTES)
    yield list_parcels.arrange(*tables, None, distinct=True)
    yield list_push.arrange(*table(site, odd, list_push.TILE_BYTES, 1), distinct=True)
    moved = table(site, odd, list_pull.tile_bytes(None))
    yield list_pull.arrange(*moved, stagings, 2 * MB + 32, None, distinct=True)
    yield list_broadcast_parcels.arrange(*tables, 1)
    yield list_broadcast_push.arrange(*table(site, odd, relay.TILE_BYTES, 1), 1, None)
    yield list_broadcast_push.arrange(*table(site, odd, relay.TILE_BYTES), 1, stagings)


def reducing(odd: int, ranks: int = 8) -> Iterator[Launch]:
    site, stagings = site_of(ranks), (16 * MB,) * ranks
    here, small, large = 16 * MB + odd, 4096 + odd, MB + odd
    reached = (here,) * ranks
    yield reduce_cells.arrange(site, here, here, small, AVERAGE, distinct=True)
    yield reduce_parcels.arrange(site, here, here, small, AVERAGE, distinct=True)
    for gather in (True, False):
        outputs = reached if gather else (here,)
        yield reduce_pull.arrange(site, here, here, stagings, large, ranks * large, AVERAGE, gather=gather)
        yield reduce_direct.arrange(site, outputs, reached, large, ranks * large, AVERAGE, gather=gather)
    yield reduce_push.arrange(site, reached, here, stagings, large, ranks * large, AVERAGE)
    yield list_parcels.arrange(*table(site, odd, parcels.TILE_BYTES), AVERAGE, distinct=False)
    yield list_direct.arrange(*table(site, odd, list_direct.TILE_BYTES, 2), AVERAGE, gather=True)
    reduced = table(site, odd, list_pull.tile_bytes(AVERAGE))
    yield list_pull.arrange(*reduced, stagings, 2 * MB + 32, AVERAGE, distinct=False, gather=True)


def table(site: LaunchSite, odd: int, tile_bytes: int, groups: int = 0) -> tuple[LaunchSite, ListTable, int]:
    here = 16 * MB + odd
    piece = ListPiece(here, here, MB + odd, MB + odd, MB + odd, 0, ((here,) * len(site.arenas),) * groups)
    return site, ListTable.of([piece] * 2, tile_bytes), 64

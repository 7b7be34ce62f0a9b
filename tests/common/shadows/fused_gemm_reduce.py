"""Shadow of ``ops/gemm_reduce.py``: products stand in an input; partial results have a workspace, the staging."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shadows.blocks import copied, reduced, rotated
from shadows.own_grid import SUM, OwnGrid
from sidelane.program.collective import Buffer, Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Program, Signal

CAME, MET = range(2)
"""Phases: partial results have come; results have, or a launch has begun."""


def gemm_reduce(
    world_size: int,
    blocks: int,
    rows: int,
    tile_rows: int,
    across: int,
    part_bytes: int,
    *,
    gathers: bool,
    remote_first: bool = True,
    group: int = 8,
) -> Program:
    """Tiles go to the owners of their rows, who add them up and, of an all-reduce, store the results for all.

    Args:
        world_size: ranks.
        blocks: of a grid.
        rows: of the result.
        tile_rows: of a tile.
        across: tiles next to each other.
        part_bytes: of a row in a tile, float32.
        gathers: an all-reduce.
        remote_first: the tiles of others are computed first.
        group: rows of tiles that are computed column by column.
    """
    n, each = world_size, -(-rows // world_size)
    grid = OwnGrid(n, blocks, part_bytes)
    owned = [max(0, min(each, rows - owner * each)) for owner in range(n)]
    tiles_each = -(-each // tile_rows) * across

    def span(rank: int, buffer: str, row: int, column: int) -> Span:
        return Span(rank, buffer, (row * across + column) * part_bytes, part_bytes)

    def result(rank: int, owner: int, row: int, column: int) -> Span:
        return span(rank, "output", row + owner * each * gathers, column)

    def parts(owner: int, block: int) -> Iterator[tuple[int, int]]:
        """Rows, from the owner's first one, and columns of tiles that a block has of an owner's."""
        row_tiles = -(-owned[owner] // tile_rows)
        for number in range((block - owner * tiles_each) % blocks, row_tiles * across, blocks):
            above, inside = number // (group * across) * group, number % (group * across)
            column, low = divmod(inside, min(row_tiles - above, group))
            first = (above + low) * tile_rows
            yield from ((row, column) for row in range(first, min(first + tile_rows, owned[owner])))

    def commands(rank: int, block: int) -> Iterator[Command]:
        if not gathers:
            yield from grid.tell(rank, block, MET)
        for owner in rotated((rank + 1) % n, n) if remote_first else range(n):
            if not gathers:
                yield grid.hear_from(owner, rank, block, MET)
            for row, column in parts(owner, block):
                computed = span(rank, "products", owner * each + row, column)
                yield from copied(span(owner, Buffer.STAGING, rank * each + row, column), computed)
            yield Signal(grid.flag(owner, CAME, block, rank), EPOCH)
        yield from grid.hear(rank, block, CAME)
        for row, column in parts(rank, block):
            mine = result(rank, rank, row, column)
            srcs = tuple(span(rank, Buffer.STAGING, sender * each + row, column) for sender in range(n))
            yield from reduced(mine, srcs, SUM)
            for peer in list(rotated(rank, n))[1:] if gathers else ():
                yield from copied(result(peer, rank, row, column), mine)
        if gathers:
            yield from grid.meet(rank, block, MET)

    row_bytes = across * part_bytes
    sizes = {
        "products": [rows * row_bytes] * n,
        "output": [(rows if gathers else owned[rank]) * row_bytes for rank in range(n)],
    }
    results = [
        Result(
            result(rank, owner, row, column),
            tuple(span(sender, "products", owner * each + row, column) for sender in range(n)),
            SUM if n > 1 else None,
        )
        for rank, owner in itertools.product(range(n), range(n))
        if gathers or rank == owner
        for row, column in itertools.product(range(owned[owner]), range(across))
    ]
    name = "gemm_all_reduce" if gathers else "gemm_reduce_scatter"
    contract = Contract.of(name, sizes, results)
    staging_bytes = n * each * row_bytes
    return grid.made(contract, name, commands, staging_bytes=staging_bytes, flags=grid.flag_count(2))

"""Shadow of ``ops/gather_gemm.py``: a tile of the result stands for the rows of ``x`` that it is made of.

Any block may come first, last, or take what is to be sent; here block 0 sends everything. What blocks share, the
counters, orders nothing that peers wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Program, Signal, Wait
from sidelane.program.shadows.blocks import others
from sidelane.program.shadows.own_grid import OwnGrid


def all_gather_gemm(
    world_size: int, blocks: int, rows: int, tile_rows: int, across: int, row_bytes: int, *, group: int = 8
) -> Program:
    """Rows go to all, each tile of them with a flag, for which tiles of the result wait.

    Args:
        world_size: ranks.
        blocks: of a grid.
        rows: of each rank.
        tile_rows: of a tile.
        across: tiles of the result next to each other.
        row_bytes: of a row.
        group: rows of tiles that are computed column by column.
    """
    n, row_tiles = world_size, -(-rows // tile_rows)
    grid = OwnGrid(n, blocks, row_bytes)

    def word(rank: int, flag: int, sender: int) -> Flag:
        return Flag(rank, flag * n + sender)

    def in_tile(row_tile: int) -> range:
        return range(row_tile * tile_rows, min((row_tile + 1) * tile_rows, rows))

    def x(rank: int, row: int) -> Span:
        return Span(rank, "x", row * row_bytes, row_bytes)

    def gathered(rank: int, sender: int, row: int) -> Span:
        return Span(rank, "gathered", (sender * rows + row) * row_bytes, row_bytes)

    def output(rank: int, source: int, row: int, column: int) -> Span:
        return Span(rank, "output", ((source * rows + row) * across + column) * row_bytes, row_bytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        if block == 0:
            for peer in others(rank, n):
                yield Signal(word(peer, 0, rank), EPOCH)
            for peer, row_tile in itertools.product(others(rank, n), range(row_tiles)):
                yield Wait(word(rank, 0, peer), EPOCH)
                for row in in_tile(row_tile):
                    yield Copy(gathered(peer, rank, row), x(rank, row))
                yield Signal(word(peer, 1 + row_tile, rank), EPOCH)
        number = block
        for source in ((rank - turn) % n for turn in range(n)):
            while number < row_tiles * across:
                above, inside = number // (group * across) * group, number % (group * across)
                column, low = divmod(inside, min(row_tiles - above, group))
                if source != rank:
                    yield Wait(word(rank, 1 + above + low, source), EPOCH)
                for row in in_tile(above + low):
                    came = x(rank, row) if source == rank else gathered(rank, source, row)
                    yield Copy(output(rank, source, row, column), came)
                number += blocks
            number -= row_tiles * across

    sizes = {
        "x": [rows * row_bytes] * n,
        "gathered": [n * rows * row_bytes] * n,
        "output": [n * rows * across * row_bytes] * n,
    }
    places = itertools.product(range(n), range(n), range(rows), range(across))
    results = [Result(output(rank, source, row, column), (x(source, row),)) for rank, source, row, column in places]
    contract = Contract.of("all_gather_gemm", sizes, results, scratch=("gathered",))
    return grid.made(contract, "all_gather_gemm", commands, staging_bytes=0, flags=(1 + row_tiles) * n)

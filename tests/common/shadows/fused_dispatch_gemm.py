"""Shadow of ``ops/dispatch_gemm.py``: a tile of the result stands for the rows of ``x`` that it is made of.

Any block may come first, last, take what is to be sent, or a tile of the result. Here block 0 sends everything, and
each block has its share of the tiles, or block 0 takes them all. What blocks share, the counters, orders nothing that
peers wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shadows.blocks import others
from shadows.own_grid import OwnGrid
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Program, Signal, Wait


def all_to_all_gemm(
    counts: Sequence[Sequence[int]],
    blocks: int,
    tile_rows: int,
    across: int,
    row_bytes: int,
    *,
    group: int = 8,
    by_one: bool = False,
) -> Program:
    """Rows go to the ranks that they are for, each tile of them with a flag, for which tiles of the result wait. Of one
    expert a rank.

    Args:
        counts: rows from rank i to rank j in row i, column j.
        blocks: of a grid.
        tile_rows: of a tile.
        across: tiles of the result next to each other.
        row_bytes: of a row.
        group: rows of tiles that are computed column by column.
        by_one: block 0 takes all tiles, as the first one does where blocks run one after the other.
    """
    n, grid = len(counts), OwnGrid(len(counts), blocks, row_bytes)
    come = [sum(row[rank] for row in counts) for rank in range(n)]
    most_tiles = max(-(-count // tile_rows) for row in counts for count in row)

    def word(rank: int, flag: int, sender: int) -> Flag:
        return Flag(rank, flag * n + sender)

    def in_tile(row_tile: int, count: int) -> range:
        return range(row_tile * tile_rows, min((row_tile + 1) * tile_rows, count))

    def x(source: int, rank: int, row: int) -> Span:
        return Span(source, "x", (sum(counts[source][:rank]) + row) * row_bytes, row_bytes)

    def place(rank: int, source: int, row: int) -> int:
        return sum(row[rank] for row in counts[:source]) + row

    def gathered(rank: int, source: int, row: int) -> Span:
        return Span(rank, "gathered", place(rank, source, row) * row_bytes, row_bytes)

    def output(rank: int, source: int, row: int, column: int) -> Span:
        return Span(rank, "output", (place(rank, source, row) * across + column) * row_bytes, row_bytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        if block == 0:
            for peer in others(rank, n):
                if counts[peer][rank]:
                    yield Signal(word(peer, 0, rank), EPOCH)
            for peer in others(rank, n):
                count = counts[rank][peer]
                for row_tile in range(-(-count // tile_rows)):
                    yield Wait(word(rank, 0, peer), EPOCH)
                    for row in in_tile(row_tile, count):
                        yield Copy(gathered(peer, rank, row), x(rank, peer, row))
                    yield Signal(word(peer, 1 + row_tile, rank), EPOCH)
        takers = 1 if by_one else grid.count
        if block >= takers:
            return
        number = block
        for source in ((rank - turn) % n for turn in range(n)):
            count = counts[source][rank]
            row_tiles = -(-count // tile_rows)
            while number < row_tiles * across:
                above, inside = number // (group * across) * group, number % (group * across)
                column, low = divmod(inside, min(row_tiles - above, group))
                if source != rank:
                    yield Wait(word(rank, 1 + above + low, source), EPOCH)
                for row in in_tile(above + low, count):
                    came = x(rank, rank, row) if source == rank else gathered(rank, source, row)
                    yield Copy(output(rank, source, row, column), came)
                number += takers
            number -= row_tiles * across

    sizes = {
        "x": [sum(row) * row_bytes for row in counts],
        "gathered": [count * row_bytes for count in come],
        "output": [count * across * row_bytes for count in come],
    }
    results = [
        Result(output(rank, source, row, column), (x(source, rank, row),))
        for rank, source in itertools.product(range(n), range(n))
        for row, column in itertools.product(range(counts[source][rank]), range(across))
    ]
    contract = Contract.of("all_to_all_gemm", sizes, results, scratch=("gathered",))
    return grid.made(contract, "all_to_all_gemm", commands, staging_bytes=0, flags=(1 + most_tiles) * n)

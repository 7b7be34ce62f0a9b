"""Shadow of ``ops/gather_gemm.py`` and ``ops/dispatch_gemm.py``: a tile of the result stands for the rows of ``x`` that
it is made of.

Any block may come first, last, or take what is to be sent; here block 0 sends everything. Of ``dispatch_gemm`` any
block may take a tile of the result, too: here each has its share, or block 0 takes them all. What blocks share, the
counters, orders nothing that peers wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from shadows.blocks import others
from shadows.own_grid import OwnGrid
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Program, Signal, Wait

Part = tuple[int, int, int]
"""Of the rows from one rank to another: the first one in ``x``, its place among those that come, how many there are."""


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
    grid = OwnGrid(world_size, blocks, row_bytes)

    def part(source: int, _: int) -> Part:
        return 0, source * rows, rows

    return _made("all_gather_gemm", grid, part, [rows] * world_size, tile_rows, across, group)


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
    """Rows go to the ranks that they are for. Of one expert a rank.

    Args:
        counts: rows from rank i to rank j in row i, column j.
        blocks: of a grid.
        tile_rows: of a tile.
        across: tiles of the result next to each other.
        row_bytes: of a row.
        group: rows of tiles that are computed column by column.
        by_one: block 0 takes all tiles, as the first one does where blocks run one after the other.
    """
    grid = OwnGrid(len(counts), blocks, row_bytes)

    def part(source: int, rank: int) -> Part:
        return sum(counts[source][:rank]), sum(row[rank] for row in counts[:source]), counts[source][rank]

    return _made("all_to_all_gemm", grid, part, [sum(row) for row in counts], tile_rows, across, group, by_one=by_one)


def _made(
    name: str,
    grid: OwnGrid,
    part: Callable[[int, int], Part],
    rows: Sequence[int],
    tile_rows: int,
    across: int,
    group: int,
    *,
    by_one: bool = False,
) -> Program:
    """``rows``: of ``x`` on each rank; ``part``: of those, what goes from one rank to another."""
    n, row_bytes = grid.world_size, grid.tile_bytes
    come = [sum(part(source, rank)[2] for source in range(n)) for rank in range(n)]
    most_tiles = max(-(-part(*pair)[2] // tile_rows) for pair in itertools.product(range(n), range(n)))

    def word(rank: int, flag: int, sender: int) -> Flag:
        return Flag(rank, flag * n + sender)

    def in_tile(row_tile: int, count: int) -> range:
        return range(row_tile * tile_rows, min((row_tile + 1) * tile_rows, count))

    def x(source: int, rank: int, row: int) -> Span:
        return Span(source, "x", (part(source, rank)[0] + row) * row_bytes, row_bytes)

    def gathered(rank: int, source: int, row: int) -> Span:
        return Span(rank, "gathered", (part(source, rank)[1] + row) * row_bytes, row_bytes)

    def output(rank: int, source: int, row: int, column: int) -> Span:
        return Span(rank, "output", ((part(source, rank)[1] + row) * across + column) * row_bytes, row_bytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        if block == 0:
            for peer in others(rank, n):
                if part(peer, rank)[2]:
                    yield Signal(word(peer, 0, rank), EPOCH)
            for peer in others(rank, n):
                count = part(rank, peer)[2]
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
            count = part(source, rank)[2]
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
        "x": [count * row_bytes for count in rows],
        "gathered": [count * row_bytes for count in come],
        "output": [count * across * row_bytes for count in come],
    }
    results = [
        Result(output(rank, source, row, column), (x(source, rank, row),))
        for rank, source in itertools.product(range(n), range(n))
        for row, column in itertools.product(range(part(source, rank)[2]), range(across))
    ]
    contract = Contract.of(name, sizes, results, scratch=("gathered",))
    return grid.made(contract, name, commands, staging_bytes=0, flags=(1 + most_tiles) * n)

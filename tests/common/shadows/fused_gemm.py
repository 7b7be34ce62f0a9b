"""Shadow of ``ops/gemm.py``: products stand in an input, and the counter of arrivals is a flag that is added to.

As in ``fused_embedding``, any block may come first or last, and here block 0 and the highest one do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shadows.blocks import rotated
from shadows.own_grid import OwnGrid
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Program, Signal, SignalOp, Value, Wait

READY, DONE = range(2)


def gemm_all_to_all(
    counts: Sequence[Sequence[int]],
    blocks: int,
    tile_rows: int,
    across: int,
    part_bytes: int,
    *,
    group: int = 8,
) -> Program:
    """Tiles go into the outputs of the ranks that their rows are for.

    Args:
        counts: rows from rank i to rank j in row i, column j.
        blocks: of a grid.
        tile_rows: of a tile.
        across: tiles next to each other.
        part_bytes: of a row in a tile.
        group: rows of tiles that are computed column by column.
    """
    n = len(counts)
    grid = OwnGrid(n, blocks, part_bytes)
    arrivals = 2 * n

    def part(rank: int, peer: int, row: int, column: int) -> tuple[Span, Span]:
        """Where a row of a tile is computed, and where it belongs."""
        at = (sum(counts[rank][:peer]) + row) * across + column
        to = (sum(other[peer] for other in counts[:rank]) + row) * across + column
        return (
            Span(rank, "products", at * part_bytes, part_bytes),
            Span(peer, "output", to * part_bytes, part_bytes),
        )

    def word(rank: int, flag: int, sender: int) -> Flag:
        return Flag(rank, flag * n + sender)

    def told(rank: int, flag: int) -> Iterator[Signal]:
        for peer in rotated(rank, n):
            yield Signal(word(peer, flag, rank), EPOCH)

    def commands(rank: int, block: int) -> Iterator[Command]:
        if block == 0:
            yield from (signal for signal in told(rank, READY) if counts[signal.flag.rank][rank])  # who has tiles
        number = block
        for peer in rotated((rank + 1) % n, n):
            row_tiles = -(-counts[rank][peer] // tile_rows)
            tiles = row_tiles * across
            if number < tiles:
                yield Wait(word(rank, READY, peer), EPOCH)
            while number < tiles:
                above, inside = number // (group * across) * group, number % (group * across)
                column, low = divmod(inside, min(row_tiles - above, group))
                first = (above + low) * tile_rows
                for row in range(first, min(first + tile_rows, counts[rank][peer])):
                    src, dst = part(rank, peer, row, column)
                    yield Copy(dst, src)
                number += blocks
            number -= tiles
        yield Signal(Flag(rank, arrivals), Value(1), SignalOp.ADD)
        if block == blocks - 1:
            yield Wait(Flag(rank, arrivals), Value(blocks))
            yield Signal(Flag(rank, arrivals), Value(0))
            yield from told(rank, DONE)
            for sender in range(n):
                yield Wait(word(rank, DONE, sender), EPOCH)

    row_bytes = across * part_bytes
    sizes = {
        "products": [sum(row) * row_bytes for row in counts],
        "output": [sum(row) * row_bytes for row in zip(*counts, strict=True)],
    }
    moves = [
        part(rank, peer, row, column)
        for rank, peer in itertools.product(range(n), range(n))
        for row, column in itertools.product(range(counts[rank][peer]), range(across))
    ]
    contract = Contract.of("gemm_all_to_all", sizes, [Result(dst, (src,)) for src, dst in moves])
    return grid.made(contract, "gemm_all_to_all", commands, staging_bytes=0, flags=arrivals + 1)

"""Shadow of ``ops/token_rows.py``: a flag for each tile, copied on by the block with its sender's number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shadows.blocks import rotated
from shadows.own_grid import OwnGrid
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Program, Signal, SignalOp, Value, Wait


def exchange_rows(
    counts: Sequence[Sequence[int]],
    blocks: int,
    tile_rows: int,
    tiles_across: tuple[int, int],
    part_bytes: int,
    *,
    most_rows: int,
    group: int = 8,
    copies: bool = True,
) -> Program:
    """Tiles go into the outputs of the ranks that their rows are for, and from there into memory of these.

    Args:
        counts: rows from rank i to rank j in row i, column j.
        blocks: of a grid.
        tile_rows: of a tile.
        tiles_across: tiles next to each other of the rows, and of the rows beside them.
        part_bytes: of a row in a tile.
        most_rows: for which an output has room.
        group: rows of tiles that are moved column by column.
        copies: tiles have flags and are copied on; else the last block says that all are there, as in ``fused_gemm``.
    """
    n, (main, beside) = len(counts), tiles_across
    grid, across = OwnGrid(n, blocks, part_bytes), main + beside
    high = [[-(-count // tile_rows) for count in row] for row in counts]
    most_tiles = max(map(max, high)) * across
    arrivals = (1 + most_tiles) * n

    def place(rank: int, buffer: str, row: int, column: int, rows: int) -> Span:
        """Where a part of a row is: those of rows beside are behind all rows."""
        at = row * main + column if column < main else rows * main + row * beside + column - main
        return Span(rank, buffer, at * part_bytes, part_bytes)

    def parts(rank: int, peer: int, row: int, column: int) -> tuple[Span, Span, Span]:
        """Where a row of a tile comes from, travels to, and belongs."""
        at, to = sum(counts[rank][:peer]) + row, sum(other[peer] for other in counts[:rank]) + row
        sent, got = sum(counts[rank]), sum(other[peer] for other in counts)
        return (
            place(rank, "x", at, column, sent),
            place(peer, "output", to, column, most_rows),
            place(peer, "into", to, column, got),
        )

    def tile(rank: int, peer: int, number: int) -> Iterator[tuple[Span, Span, Span]]:
        above, inside = number // (group * across) * group, number % (group * across)
        column, low = divmod(inside, min(high[rank][peer] - above, group))
        first = (above + low) * tile_rows
        for row in range(first, min(first + tile_rows, counts[rank][peer])):
            yield parts(rank, peer, row, column)

    def dealt(sender: int, hop: int, block: int) -> list[int]:
        """Numbers of a block's tiles for the rank ``hop`` ranks on, if tiles are dealt out in turn."""
        before = sum(high[sender][(sender + earlier) % n] * across for earlier in range(1, hop or n))
        tiles = high[sender][(sender + hop) % n] * across
        return [number for number in range(tiles) if (before + number) % blocks == block]

    def commands(rank: int, block: int) -> Iterator[Command]:
        if block == 0:
            yield from (Signal(Flag(p, rank), EPOCH) for p in rotated(rank, n) if p != rank and counts[p][rank])
        hops = [*range(1, n), 0]
        for hop in hops[-1:] + hops[:-1] if block % 2 else hops:
            peer, source = (rank + hop) % n, (rank - hop) % n
            sends, comes = dealt(rank, hop, block), dealt(source, hop, block) if hop and copies else []
            if sends and hop:
                yield Wait(Flag(rank, peer), EPOCH)
            ahead = 0
            while sends or comes:
                if sends and (ahead < 2 or not comes):
                    number = sends.pop(0)
                    for src, out, own in tile(rank, peer, number):
                        yield Copy(out if hop else own, src)
                    if hop and copies:
                        yield Signal(Flag(peer, (1 + number) * n + rank), EPOCH)
                    ahead += 1
                else:
                    number = comes.pop(0)
                    yield Wait(Flag(rank, (1 + number) * n + source), EPOCH)
                    for _, out, own in tile(source, rank, number):
                        yield Copy(own, out)
                    ahead -= 1
        if not copies:
            yield Signal(Flag(rank, arrivals), Value(1), SignalOp.ADD)
        if block == blocks - 1 and not copies:
            yield Wait(Flag(rank, arrivals), Value(blocks))
            yield Signal(Flag(rank, arrivals), Value(0))
            yield from (Signal(Flag(peer, n + rank), EPOCH) for peer in rotated(rank, n))
            yield from (Wait(Flag(rank, n + sender), EPOCH) for sender in range(n))

    row_bytes = across * part_bytes
    got = [sum(column) * row_bytes for column in zip(*counts, strict=True)]
    sizes = {"x": [sum(row) * row_bytes for row in counts], "output": [most_rows * row_bytes] * n, "into": got}
    moves = [
        parts(rank, peer, row, column)
        for rank, peer in itertools.product(range(n), range(n))
        for row, column in itertools.product(range(counts[rank][peer]), range(across))
    ]
    results = [Result(own if copies or out.rank == src.rank else out, (src,)) for src, out, own in moves]
    contract = Contract.of("token_rows", sizes, results, scratch=["output"] * copies)
    return grid.made(contract, "token_rows", commands, staging_bytes=0, flags=arrivals + 1)

"""Shadow of ``ops/gemv.py``. What blocks compute stands in their inputs: partial results."""

from __future__ import annotations

from collections.abc import Iterator

from shadows.blocks import Apart, copied, reduced, rotated
from shadows.own_grid import SUM, OwnGrid
from sidelane.program.collective import Buffer, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Flag, Program, Signal, Wait

CELL = 4


def cells(
    world_size: int, rows: int, rows_each: int, *, tile_rows: int, lanes: int, tokens: int = 1, padded: int = 1
) -> tuple[Program, ...]:
    """Of even and of odd generations: sums go into cells of all ranks, and every rank adds up all of them.

    A cell is four bytes of data with a flag of their own. Each that is sent is apart: it vouches for its own bytes and
    nothing else. A rank sends to itself, too.

    Args:
        world_size: ranks.
        rows: of the weight.
        rows_each: of a block, whose rows are neighbours.
        tile_rows: that a block computes and sends at a time.
        lanes: cells of each rank that a block waits for at a time.
        tokens: of this launch.
        padded: places for tokens.
    """
    sizes = (world_size, rows, rows_each, tile_rows, lanes, tokens, padded)
    return tuple(_cells(*sizes, parity) for parity in range(2))


def _cells(
    n: int, rows: int, rows_each: int, tile_rows: int, lanes: int, tokens: int, padded: int, parity: int
) -> Program:
    grid = OwnGrid(n, -(-rows // rows_each), CELL)
    collective = all_reduce([CELL * tokens * rows] + [0] * (n - 1), SUM)

    def cell(sender: int, row: int, token: int) -> int:
        return (parity * n + sender) * rows * padded + row * padded + token

    def place(rank: int, sender: int, row: int, token: int) -> Span:
        return Span(rank, Buffer.STAGING, CELL * cell(sender, row, token), CELL)

    def at(row: int, token: int) -> tuple[int, int]:
        return CELL * (token * rows + row), CELL

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        first, last = block * rows_each, min(rows, (block + 1) * rows_each)
        for tile in range(first, last, tile_rows):
            there = [(row, token) for row in range(tile, min(last, tile + tile_rows)) for token in range(tokens)]
            for peer in rotated((rank + 1) % n, n):
                for row, token in there:
                    computed = collective.input_span(rank, *at(row, token))
                    if n == 1:
                        yield from copied(collective.output_span(rank, *at(row, token)), computed)
                        continue
                    sent = Copy(place(peer, rank, row, token), computed)
                    yield Apart((sent, Signal(Flag(peer, cell(rank, row, token)), EPOCH)))
        for start in range(first * padded, last * padded, lanes) if n > 1 else ():
            found = [divmod(index, padded) for index in range(start, min(start + lanes, last * padded))]
            waited = [(row, token) for row, token in found if token < tokens]
            for row, token in waited:
                for sender in range(n):
                    yield Wait(Flag(rank, cell(sender, row, token)), EPOCH, Comparison.EQ)
            for row, token in waited:
                result = collective.output_span(rank, *at(row, token))
                yield from reduced(result, tuple(place(rank, sender, row, token) for sender in range(n)), SUM)

    flags = 2 * n * rows * padded
    return grid.made(collective, "cells gemv_all_reduce", commands, staging_bytes=CELL * flags, flags=flags)

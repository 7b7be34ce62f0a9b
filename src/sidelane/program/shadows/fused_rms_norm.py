"""Shadow of ``ops/rms_norm.py``: a cell is four bytes of data with a flag of their own. The norm itself is left out.

As in ``cells``, each cell that is sent is apart: it vouches for its own bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import Buffer, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Flag, Program, Signal, Wait
from sidelane.program.shadows.blocks import Apart, others, reduced
from sidelane.program.shadows.own_grid import SUM, OwnGrid

CELL = 4


def all_reduce_rms_norm(
    world_size: int, blocks: int, rows: int, words: int, *, in_place: bool = False
) -> tuple[Program, ...]:
    """Of even and of odd generations: rows go into cells of the others, and every rank adds up all of them.

    Args:
        world_size: ranks.
        blocks: of a grid.
        rows: tokens, of this launch and of the workspace.
        words: float32 of a row.
        in_place: sums are written over the rows.
    """
    return tuple(_program(world_size, blocks, rows, words, parity, in_place) for parity in range(2))


def loaded_flags(world_size: int, rows: int, words: int) -> int:
    """The first flag that is not in memory: that a block has loaded a word, as its threads know behind a barrier."""
    return 2 * world_size * rows * words


def _program(n: int, blocks: int, rows: int, words: int, parity: int, in_place: bool) -> Program:
    grid = OwnGrid(n, blocks, CELL)
    collective = all_reduce([CELL * rows * words] + [0] * (n - 1), SUM, in_place=in_place)
    cells, size = loaded_flags(n, rows, words), rows * words

    def cell(sender: int, row: int, word: int) -> int:
        return (parity * n + sender) * size + row * words + word

    def data(rank: int, sender: int, row: int, word: int) -> Span:
        if sender == rank:
            return collective.input_span(rank, CELL * (row * words + word), CELL)
        return Span(rank, Buffer.STAGING, CELL * cell(sender, row, word), CELL)

    def loaded(rank: int, peer: int, row: int, word: int) -> Flag:
        return Flag(rank, cells + peer * size + row * words + word)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        mine = [(row, word) for row in range(block, rows, blocks) for word in range(words)]
        for row, word in mine:
            for peer in others(rank, n):
                copy = Copy(data(peer, rank, row, word), data(rank, rank, row, word))
                there = Signal(Flag(peer, cell(rank, row, word)), EPOCH)
                yield Apart((copy, there, Signal(loaded(rank, peer, row, word), EPOCH)))
        for row, word in mine:
            for peer in others(rank, n):
                yield Wait(loaded(rank, peer, row, word), EPOCH)  # a barrier
        for row in range(block, rows, blocks):
            for sender in sorted(others(rank, n)):
                for word in range(words):
                    yield Wait(Flag(rank, cell(sender, row, word)), EPOCH, Comparison.EQ)
            for word in range(words):
                total = collective.output_span(rank, CELL * (row * words + word), CELL)
                yield from reduced(total, tuple(data(rank, sender, row, word) for sender in range(n)), SUM)

    flags = cells + n * size
    return grid.made(collective, "all_reduce_rms_norm", commands, staging_bytes=CELL * cells, flags=flags)

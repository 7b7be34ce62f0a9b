"""Shadow of ``ops/decode_context.py`` for one token. A merge by LSEs stands as a sum; words of LSEs have flags only."""

from __future__ import annotations

from collections.abc import Iterator

from shadows.blocks import Apart, others, reduced
from shadows.own_grid import SUM, OwnGrid
from sidelane.program.collective import Buffer, Span, reduce_scatter
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Flag, Program, Signal, Wait
from sidelane.program.resharding import even_parts

CELL = 4


def cells(
    world_size: int, blocks: int, heads: int, words: int, pitch: int, *, counts: bool = True
) -> tuple[Program, ...]:
    """Return programs of even and of odd generations: rows of the others' heads go into their cells, and are merged.

    Args:
        world_size: ranks.
        blocks: of a grid, at most the heads of a rank.
        heads: of all ranks.
        words: float32 of a row.
        pitch: cells of a row, those behind the words without data.
        counts: blocks count themselves early, in memory of their rank (``OwnGrid.ends_early``).
    """
    programs = tuple(_cells(world_size, blocks, heads, words, pitch, parity) for parity in (0, 1))
    return tuple(map(OwnGrid(world_size, blocks, CELL).ends_early, programs)) if counts else programs


def loaded_flags(world_size: int, heads: int, pitch: int) -> int:
    """The first flag that is not in memory: that a block has loaded a word, as its threads know behind a barrier."""
    return 2 * world_size * -(-heads // world_size) * pitch


def _cells(n: int, blocks: int, heads: int, words: int, pitch: int, parity: int) -> Program:
    grid, of_ranks, most = OwnGrid(n, blocks, CELL), even_parts(heads, n), -(-heads // n)
    collective = reduce_scatter([CELL * count * words for count in of_ranks], SUM)
    threads, size = loaded_flags(n, heads, pitch), most * pitch

    def cell(sender: int, row: int, lane: int) -> int:
        return (parity * n + sender) * size + row * pitch + lane

    def place(rank: int, sender: int, row: int, word: int) -> Span:
        return Span(rank, Buffer.STAGING, CELL * cell(sender, row, word), CELL)

    def own(rank: int, owner: int, row: int, word: int) -> Span:
        return collective.input_span(rank, CELL * ((sum(of_ranks[:owner]) + row) * words + word), CELL)

    def loaded(rank: int, peer: int, row: int, word: int) -> Flag:
        return Flag(rank, threads + peer * size + row * pitch + word)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        rows = range(block, most, blocks)
        sent = [(row, peer) for row in rows for peer in others(rank, n) if row < of_ranks[peer]]
        for row, peer in sent:
            for lane in range(pitch):
                there = Signal(Flag(peer, cell(rank, row, lane)), EPOCH)
                if lane < words:
                    copy = Copy(place(peer, rank, row, lane), own(rank, peer, row, lane))
                    yield Apart((copy, there, Signal(loaded(rank, peer, row, lane), EPOCH)))
                else:
                    yield Apart((there,))
        for row, peer in sent:
            for word in range(words):
                yield Wait(loaded(rank, peer, row, word), EPOCH)  # a barrier
        for row in rows:
            if row >= of_ranks[rank]:
                continue
            for sender in sorted(others(rank, n)):
                for lane in range(pitch):
                    yield Wait(Flag(rank, cell(sender, row, lane)), EPOCH, Comparison.EQ)
            for word in range(words):
                parts = [own(rank, rank, row, word) if s == rank else place(rank, s, row, word) for s in range(n)]
                result = collective.output_span(rank, CELL * (row * words + word), CELL)
                yield from reduced(result, tuple(parts), SUM)

    flags = threads + n * size
    return grid.made(collective, "cells combine_attention", commands, staging_bytes=CELL * threads, flags=flags)

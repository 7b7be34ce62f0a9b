"""Shadows of ``ops/rms_norm.py``. The norm itself is left out.

In cells, four bytes of data have a flag of their own: as in ``cells``, each cell that is sent is apart, and vouches for
its own bytes and nothing else. What the blocks of a row tell each other (a sum of squares of each slice) is a copy of
some word that came for the slice: it is computed behind it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shadows.blocks import Apart, copied, others, reduced
from shadows.own_grid import SUM, OwnGrid
from sidelane.program.collective import Buffer, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Flag, Program, Signal, Wait

CELL = 4


def cells(
    world_size: int,
    blocks: int,
    rows: int,
    words: int,
    *,
    slice_words: int,
    parts: int = 1,
    in_place: bool = False,
    counts: bool = True,
) -> tuple[Program, ...]:
    """Return programs of even and of odd generations: slices go into cells of the others, and all ranks add them up.

    Args:
        world_size: ranks.
        blocks: of a grid: as many for each row as have its slices, once or several times.
        rows: tokens, of this launch and of the workspace.
        words: float32 of a row.
        slice_words: words of a slice.
        parts: slices of a block.
        in_place: sums are written over the rows.
        counts: blocks count themselves early, in memory of their rank (``OwnGrid.ends_early``).
    """
    programs = tuple(_cells(world_size, blocks, rows, words, slice_words, parts, parity, in_place) for parity in (0, 1))
    return tuple(map(OwnGrid(world_size, blocks, CELL).ends_early, programs)) if counts else programs


def sum_flags(world_size: int, rows: int, words: int) -> int:
    """The first flag of a sum of squares of a slice; behind it those of all slices of a row, padded, row by row."""
    return 2 * world_size * rows * words


def loaded_flags(world_size: int, rows: int, words: int, slice_words: int) -> int:
    """The first flag that is not in memory: that a block has loaded a word, as its threads know behind a barrier."""
    return sum_flags(world_size, rows, words) + 2 * rows * _padded(-(-words // slice_words))


def _padded(slices: int) -> int:
    return 1 << (slices - 1).bit_length()


def _cells(
    n: int, blocks: int, rows: int, words: int, slice_words: int, parts: int, parity: int, in_place: bool
) -> Program:
    grid = OwnGrid(n, blocks, CELL)
    collective = all_reduce([CELL * rows * words] + [0] * (n - 1), SUM, in_place=in_place)
    sums, threads, size = sum_flags(n, rows, words), loaded_flags(n, rows, words, slice_words), rows * words
    slices = -(-words // slice_words)
    team, padded = -(-slices // parts), _padded(slices)
    assert blocks % team == 0, "whole teams"

    def cell(sender: int, row: int, word: int) -> int:
        return (parity * n + sender) * size + row * words + word

    def data(rank: int, sender: int, row: int, word: int) -> Span:
        if sender == rank:
            return collective.input_span(rank, CELL * (row * words + word), CELL)
        return Span(rank, Buffer.STAGING, CELL * cell(sender, row, word), CELL)

    def told(rank: int, row: int, part: int) -> tuple[Span, Flag]:
        """The sum of squares of a slice: where it is, and its flag."""
        number = sums + row * padded + part
        return Span(rank, Buffer.STAGING, CELL * number, CELL), Flag(rank, number)

    def heard(rank: int, member: int, row: int, part: int) -> Span:
        """A register of a block that has loaded a sum."""
        return Span(rank, Buffer.STAGING, CELL * (threads + (member * rows + row) * padded + part), CELL)

    def loaded(rank: int, peer: int, row: int, word: int) -> Flag:
        return Flag(rank, threads + peer * size + row * words + word)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        member = block % team
        mine = range(member * parts, min(slices, (member + 1) * parts))
        my_rows = range(block // team, rows, blocks // team)
        my_words = range(mine.start * slice_words, min(words, mine.stop * slice_words))
        for row in my_rows:
            for word in my_words:
                for peer in others(rank, n):
                    copy = Copy(data(peer, rank, row, word), data(rank, rank, row, word))
                    there = Signal(Flag(peer, cell(rank, row, word)), EPOCH)
                    yield Apart((copy, there, Signal(loaded(rank, peer, row, word), EPOCH)))
        for row in my_rows:
            for word in my_words:
                for peer in others(rank, n):
                    yield Wait(loaded(rank, peer, row, word), EPOCH)  # a barrier
        for row in my_rows:
            for sender in sorted(others(rank, n)):
                for word in my_words:
                    yield Wait(Flag(rank, cell(sender, row, word)), EPOCH, Comparison.EQ)
            for part in mine if slices > 1 else ():
                place, flag = told(rank, row, part)
                yield Copy(place, data(rank, (rank + 1) % n, row, part * slice_words))
                yield Signal(flag, EPOCH)
            for word in my_words:
                total = collective.output_span(rank, CELL * (row * words + word), CELL)
                yield from reduced(total, tuple(data(rank, sender, row, word) for sender in range(n)), SUM)
            for part in range(slices) if slices > 1 else ():
                place, flag = told(rank, row, part)
                yield Wait(flag, EPOCH, Comparison.EQ)
                yield Copy(heard(rank, member, row, part), place)

    staging_bytes, flags = CELL * (threads + team * rows * padded), threads + n * size
    return grid.made(collective, "cells all_reduce_rms_norm", commands, staging_bytes=staging_bytes, flags=flags)


def pushed(world_size: int, blocks: int, rows: int, row_bytes: int, *, in_place: bool = False) -> tuple[Program, ...]:
    """Of even and of odd generations: rows go into places of the others, blocks meet, and every rank adds up all.

    Args:
        world_size: ranks.
        blocks: of a grid.
        rows: tokens, of this launch and of the workspace.
        row_bytes: of float32.
        in_place: sums are written over the rows.
    """
    return tuple(_pushed(world_size, blocks, rows, row_bytes, parity, in_place) for parity in range(2))


def _pushed(n: int, blocks: int, rows: int, row_bytes: int, parity: int, in_place: bool) -> Program:
    grid = OwnGrid(n, blocks, row_bytes)
    collective = all_reduce([rows * row_bytes] + [0] * (n - 1), SUM, in_place=in_place)

    def data(rank: int, sender: int, row: int) -> Span:
        if sender == rank:
            return collective.input_span(rank, row * row_bytes, row_bytes)
        return Span(rank, Buffer.STAGING, ((parity * n + sender) * rows + row) * row_bytes, row_bytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        for row in range(block, rows, blocks):
            for peer in others(rank, n):
                yield from copied(data(peer, rank, row), data(rank, rank, row))
        yield from grid.meet(rank, block, 0)
        for row in range(block, rows, blocks):
            total = collective.output_span(rank, row * row_bytes, row_bytes)
            yield from reduced(total, tuple(data(rank, sender, row) for sender in range(n)), SUM)

    staging_bytes, flags = 2 * n * rows * row_bytes, grid.flag_count(1)
    return grid.made(collective, "pushed all_reduce_rms_norm", commands, staging_bytes=staging_bytes, flags=flags)

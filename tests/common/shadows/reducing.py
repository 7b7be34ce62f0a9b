"""Shadows of the kernels that reduce many bytes: ``reduce_direct``, ``reduce_pull`` and ``reduce_push`` of ``device``,
and those of lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shadows.blocks import DONE, Apart, Blocks, copied, made_of, others, reduced
from shadows.tensors import Tensors, Tile
from sidelane.program import kernel_chunks
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Program
from sidelane.program.kernel import KernelProgram
from sidelane.program.kernel_chunks import chunks_of


def direct(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. A shard of every input is reduced; in two shots for all outputs. ``done``: by all."""
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        yield from grid.meet(rank, block, 0)
        for tile in tensors.tiles(block):
            if tensors.two_shot and tile.owner != rank:
                continue
            srcs = tuple(tile.input(peer, rank if tensors.shards > 1 else 0) for peer in range(n))
            yield from reduced(tile.output(rank), srcs, tensors.reduction)
            for peer in others(rank, n) if tensors.two_shot else ():
                yield from copied(tile.output(peer), tile.output(rank))
        yield from grid.meet(rank, block, 1)

    return made_of(program, grid, commands, staging_bytes=0)


def reduce(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """Inputs go into the own staging. ``there``: a shard of all stagings is reduced; in two shots also into the own.
    ``done``: the results of the others are fetched. The last meeting: all have read.
    """
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        for tile in tensors.tiles(block):
            for shard in range(tensors.shards):
                yield from copied(tensors.staged(rank, tile, shard), tile.input(rank, shard))
        yield from grid.meet(rank, block, 0)
        mine = rank if tensors.shards > 1 else 0
        for tile in tensors.tiles(block):
            if tensors.two_shot and tile.owner != rank:
                continue
            srcs = tuple(tensors.staged(peer, tile, mine) for peer in range(n))
            yield from reduced(tile.output(rank), srcs, tensors.reduction)
            if tensors.two_shot:
                yield from copied(tensors.staged(rank, tile), tile.output(rank))
        yield from grid.meet(rank, block, 1)
        if not tensors.two_shot:
            return
        for tile in tensors.tiles(block):
            if tile.owner is not None and tile.owner != rank:
                yield from copied(tile.output(rank), tensors.staged(tile.owner, tile))
        yield from grid.meet(rank, block, 2)

    return made_of(program, grid, commands, staging_bytes=program.staging_bytes)


def send(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. Chunk by chunk, tiles go into the stagings of their owners, who reduce the chunk before
    meanwhile, for all outputs. ``done``: by all. Chunks take turns among slots that need no signals of their own.
    """
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)
    tiles = -(-program.part_bytes // tile_bytes)
    chunks = dataclasses.replace(chunks_of(tiles * kernel_chunks.TILE_BYTES, blocks), tile_bytes=tile_bytes)

    def number(tile: Tile) -> int:
        return tile.first % program.part_bytes // tile_bytes

    def tiles(block: int, chunk: int) -> Iterator[Tile]:
        return (tile for tile in tensors.tiles(block) if number(tile) // (blocks * chunks.rounds) == chunk)

    def staged(rank: int, source: int, tile: Tile) -> Span:
        return Span(rank, Buffer.STAGING, chunks.offset(number(tile), source, rank), tile.nbytes)

    def stored(block: int, chunk: int, rank: int) -> Iterator[Command]:
        for tile in tiles(block, chunk):
            if tile.owner is not None and tile.owner != rank:
                yield from copied(staged(tile.owner, rank, tile), tile.input(rank))

    def added(block: int, chunk: int, rank: int) -> Iterator[Command]:
        for tile in tiles(block, chunk):
            if tile.owner == rank:
                srcs = (tile.input(rank) if peer == rank else staged(rank, peer, tile) for peer in range(n))
                yield from reduced(tile.output(rank), tuple(srcs), tensors.reduction)
                for peer in others(rank, n):
                    yield from copied(tile.output(peer), tile.output(rank))

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        yield Apart(tuple(grid.tell(rank, block, 0)))
        yield from grid.hear(rank, block, 0)
        for chunk in range(chunks.count):
            yield from stored(block, chunk, rank)
            yield from grid.tell(rank, block, 1 + chunk)
            if chunk:
                yield from grid.hear(rank, block, chunk)
                yield from added(block, chunk - 1, rank)
        yield from grid.hear(rank, block, chunks.count)
        yield from added(block, chunks.count - 1, rank)
        yield from grid.meet(rank, block, DONE)

    return made_of(program, grid, commands, staging_bytes=max(1, n - 1) * chunks.peer_bytes)

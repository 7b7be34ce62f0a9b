"""Shadows of the kernels that move one part a pair of ranks: ``push`` and ``pull`` of ``device``, and of lists."""

from __future__ import annotations

from collections.abc import Iterator

from shadows.blocks import Apart, Blocks, copied, made_of, others, rotated
from shadows.tensors import Tensors
from sidelane.program.ir import Command, Program
from sidelane.program.kernel import KernelProgram


def push(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. Tiles go into their outputs. ``done``: they have all theirs."""
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        yield Apart(tuple(grid.tell(rank, block, 0)))
        yield from grid.hear(rank, block, 0)
        for tile in tensors.tiles(block):
            for peer in rotated(rank, n):
                yield from copied(tile.output(peer, rank), tile.input(rank, peer if tensors.shards > 1 else 0))
        yield from grid.meet(rank, block, 1)

    return made_of(program, grid, commands, staging_bytes=0)


def pull(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """Tiles go into the own staging. ``there``: so do those of the peers, and are fetched. ``read``: by all peers."""
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        mine = rank if tensors.shards > 1 else 0
        for tile in tensors.tiles(block):
            for shard in range(tensors.shards):
                yield from copied(tensors.staged(rank, tile, shard), tile.input(rank, shard))
                if shard == mine:
                    yield from copied(tile.output(rank, rank), tile.input(rank, shard))
        yield from grid.meet(rank, block, 0)
        for tile in tensors.tiles(block):
            for peer in others(rank, n):
                yield from copied(tile.output(rank, peer), tensors.staged(peer, tile, mine))
        yield from grid.meet(rank, block, 1)

    return made_of(program, grid, commands, staging_bytes=program.staging_bytes)

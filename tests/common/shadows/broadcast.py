"""Shadows of the kernels that push broadcasts, relayed by the peers: ``broadcast_push`` of ``device``, and of lists."""

from __future__ import annotations

from collections.abc import Iterator

from shadows.blocks import DONE, Apart, Blocks, copied, made_of, others
from shadows.tensors import Tensors, Tile
from sidelane.program.ir import Command, Program
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.kernel_chunks import broadcast_rounds


def broadcast(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. Chunk by chunk, tiles go to their owners, who store them with the others. ``done``: so
    has everybody; with staging, the tiles of the others are copied from there.
    """
    n, staged = program.world_size, program.protocol is Protocol.STAGE
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)
    root = tensors.root
    assert root is not None
    peers = others(root, n)
    count = max(sum(1 for block in range(blocks) for _ in tensors.tiles(block)), 1)
    rounds = broadcast_rounds(count, blocks, n, staged=staged)
    chunks = -(-count // (blocks * rounds))

    def owned(block: int, chunk: int) -> Iterator[tuple[int, Tile]]:
        """A block's tiles in a chunk, and who owns them. Blocks begin with different peers."""
        for turn, tile in enumerate(tensors.tiles(block)):
            if turn // rounds == chunk:
                yield peers[(block + turn) % (n - 1)], tile

    def passed_on(rank: int, block: int, chunk: int) -> Iterator[Command]:
        for owner, tile in owned(block, chunk):
            if owner == rank:
                source = tensors.staged(rank, tile) if staged else tile.output(rank)
                for peer in others(rank, n):
                    if peer != root:
                        yield from copied(tensors.staged(peer, tile) if staged else tile.output(peer), source)
                yield from copied(tile.output(rank), source)

    def send(block: int) -> Iterator[Command | Apart]:
        for chunk in range(chunks):
            for owner, tile in owned(block, chunk):
                there = tensors.staged(owner, tile) if staged else tile.output(owner)
                yield from copied(there, tile.input(root))
            yield from grid.tell(root, block, 1 + chunk, but=root)
        if n > 2:
            yield Apart(tuple(grid.tell(root, block, DONE, but=root)))

    def receive(rank: int, block: int) -> Iterator[Command]:
        for chunk in range(chunks):
            yield grid.hear_from(root, rank, block, 1 + chunk)
            yield from passed_on(rank, block, chunk)
        if n > 2:
            yield from grid.tell(rank, block, DONE, but=root)
            yield from grid.hear(rank, block, DONE)
        for chunk in range(chunks if staged else 0):
            for owner, tile in owned(block, chunk):
                if owner != rank:
                    yield from copied(tile.output(rank), tensors.staged(rank, tile))

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        if n > 1:
            yield Apart(tuple(grid.tell(rank, block, 0)))
            yield from grid.hear(rank, block, 0)
            yield from send(block) if rank == root else receive(rank, block)

    return made_of(program, grid, commands, staging_bytes=program.staging_bytes)

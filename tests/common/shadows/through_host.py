"""The shadow of the kernel through host memory (``kernels/through_host.py``): few blocks store, and the others load."""

from __future__ import annotations

from collections.abc import Iterator

from shadows.blocks import DONE, Apart, Blocks, copied, made_of, others, reduced
from shadows.tensors import Tensors, Tile
from sidelane.kernels import through_host as kernel
from sidelane.program.ir import Command, Program
from sidelane.program.kernel import KernelProgram
from sidelane.program.kernel_chunks import MOST_CHUNKS


def through_host(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """Chunk by chunk, tiles go into the own staging; the loaders of a block load those of all peers. ``read``."""
    n, senders = program.world_size, max(1, blocks // (1 + kernel.LOADERS))
    grid = Blocks(n, senders, tile_bytes)
    tensors = Tensors(program, grid)
    root, reduction = tensors.root, tensors.reduction
    counts = [len(list(tensors.tiles(block))) for block in range(senders)]
    rounds = max(kernel.LEAST_ROUNDS, -(-sum(counts) // (senders * MOST_CHUNKS)))

    def chunks(block: int) -> Iterator[list[Tile]]:
        tiles = list(tensors.tiles(block))
        return (tiles[at : at + rounds] for at in range(0, max(counts), rounds))

    def store(rank: int, tile: Tile) -> Iterator[Command]:
        if tensors.shards == 1:
            yield from copied(tensors.staged(rank, tile), tile.input(rank))
        else:
            for peer in others(rank, n):
                yield from copied(tensors.staged(rank, tile, peer), tile.input(rank, peer))

    def load(rank: int, tile: Tile) -> Iterator[Command]:
        mine = rank if tensors.shards > 1 else 0
        if root is not None:
            yield from copied(tile.output(rank), tensors.staged(root, tile))
        elif reduction is None:
            for peer in others(rank, n):
                yield from copied(tile.output(rank, peer), tensors.staged(peer, tile, mine))
            yield from copied(tile.output(rank, rank), tile.input(rank, mine))
        else:
            srcs = (tile.input(rank, mine) if peer == rank else tensors.staged(peer, tile, mine) for peer in range(n))
            yield from reduced(tile.output(rank), tuple(srcs), reduction)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        number, turn = block % senders, block // senders
        if turn == 0:
            for chunk, tiles in enumerate(chunks(number) if root in (None, rank) else ()):
                for tile in tiles:
                    yield from store(rank, tile)
                for loader in range(number, senders * kernel.LOADERS, senders):
                    yield from grid.tell(rank, loader, 1 + chunk, but=root)
            return
        for chunk, tiles in enumerate(chunks(number) if root != rank else ()):
            if root is None:
                yield from grid.hear(rank, block - senders, 1 + chunk)
            else:
                yield grid.hear_from(root, rank, block - senders, 1 + chunk)
            for tile in tiles[turn - 1 :: kernel.LOADERS]:
                yield from load(rank, tile)
        yield from grid.meet(rank, block - senders, DONE)

    every = Blocks(n, senders * (1 + kernel.LOADERS), tile_bytes)
    return made_of(program, every, commands, staging_bytes=program.staging_bytes)

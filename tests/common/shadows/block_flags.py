"""Shadows of the kernels with block flags (``kernels/block_flags.py``), and of relayed broadcasts. No rank signals that
it is ready (``arena``).
"""

from __future__ import annotations

from collections.abc import Iterator

from shadows.arena import arena_end, block_slot
from shadows.blocks import Apart, Blocks, copied, made_of, others, reduced, rotated
from shadows.tensors import Tensors, Tile
from sidelane.program.collective import Span
from sidelane.program.ir import Command, Program
from sidelane.program.kernel import KernelProgram


def block_flags(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
    """Of even and of odd generations: tiles go into the places of all. ``there``: what came is put together."""
    return tuple(_block_flags(program, blocks, tile_bytes, parity) for parity in range(2))


def _block_flags(program: KernelProgram, blocks: int, tile_bytes: int, parity: int) -> Program:
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)
    root = tensors.root

    def place(rank: int, sender: int, tile: Tile) -> Span:
        return block_slot(rank, sender, parity, n, tile.place, tile.nbytes)

    def send(rank: int, tile: Tile) -> Iterator[Command]:
        for peer in rotated(rank, n):
            if peer != root and root in (None, rank):
                yield from copied(place(peer, rank, tile), tile.input(rank, peer if tensors.shards > 1 else 0))

    def receive(rank: int, tile: Tile) -> Iterator[Command]:
        if tensors.reduction is not None:
            srcs = tuple(place(rank, sender, tile) for sender in range(n))
            yield from reduced(tile.output(rank), srcs, tensors.reduction)
        elif root is None:
            for sender in range(n):
                yield from copied(tile.output(rank, sender), place(rank, sender, tile))
        elif rank != root:
            yield from copied(tile.output(rank), place(rank, root, tile))

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        for tile in tensors.tiles(block):
            yield from send(rank, tile)
        yield from grid.meet(rank, block, 0)
        for tile in tensors.tiles(block):
            yield from receive(rank, tile)

    return made_of(program, grid, commands, staging_bytes=arena_end(n))


def relay(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
    """Of even and of odd generations: a part for each peer goes into the root's place with it. There, it goes on into
    the peer's places with the others. ``there``: all parts are put together.
    """
    return tuple(_relay(program, blocks, tile_bytes, parity) for parity in range(2))


def _relay(program: KernelProgram, blocks: int, tile_bytes: int, parity: int) -> Program:
    (collective,), n, root = program.parts, program.world_size, program.root
    assert root is not None
    grid = Blocks(n, blocks, tile_bytes)
    part = -(-program.part_bytes // ((n - 1) * tile_bytes)) * tile_bytes

    def tiles(block: int, peer: int) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of a block's tiles of what is for a peer: the last parts are shorter, or empty."""
        length = min(part, program.part_bytes - ((peer - root) % n - 1) * part)
        for at in range(block * tile_bytes, length, grid.count * tile_bytes):
            yield at, min(tile_bytes, length - at)

    def data(rank: int, peer: int, at: int, nbytes: int) -> Span:
        return collective.output_span(rank, ((peer - root) % n - 1) * part + at, nbytes)

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        if rank == root:
            for peer in others(root, n):
                for tile in tiles(block, peer):
                    yield from copied(block_slot(peer, root, parity, n, *tile), data(root, peer, *tile))
            yield from grid.tell(root, block, 0, but=root)
        else:
            yield grid.hear_from(root, rank, block, 0)
            for tile in tiles(block, rank):
                for peer in others(rank, n):
                    if peer != root:
                        yield from copied(
                            block_slot(peer, rank, parity, n, *tile), block_slot(rank, root, parity, n, *tile)
                        )
        yield from grid.meet(rank, block, 1)
        for peer in others(root, n) if rank != root else ():
            sender = root if peer == rank else peer
            for tile in tiles(block, peer):
                yield from copied(data(rank, peer, *tile), block_slot(rank, sender, parity, n, *tile))

    return made_of(program, grid, commands, staging_bytes=arena_end(n))

"""Shadows of the kernels of the LL protocol (``kernels/ll.py``).

A cell vouches for its own bytes and nothing else. So each one is apart: a queue that stores its data and then signals
its flag, ordered with nothing else of its kernel, as if all others came later. What a block has waited for in a cell is
that cell, and that its sender's kernel has begun. Only the sender's own threads know, behind a barrier, that the input
of a cell has been loaded, and may then write where it lay.
"""

from __future__ import annotations

from collections.abc import Iterator

from shadows.arena import CELL_BYTES, arena_end, cell_flag, cell_flags, ll_slot, loaded_flag, once_flag, once_slot
from shadows.blocks import Apart, Blocks, copied, made_of, others, reduced
from shadows.tensors import Tensors, Tile
from sidelane.program.collective import Span
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Program, Signal, Wait
from sidelane.program.kernel import KernelProgram, Protocol


def ll(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
    """Of even and of odd generations: all cells go to all who need them, and are put together as they come."""
    return tuple(_ll(program, blocks, tile_bytes, parity) for parity in range(2))


def _ll(program: KernelProgram, blocks: int, tile_bytes: int, parity: int) -> Program:
    n = program.world_size
    grid = Blocks(n, blocks, tile_bytes)
    tensors = Tensors(program, grid)
    root = tensors.root
    reduces = tensors.reduction is not None

    once = program.protocol is Protocol.LL_ONCE
    is_in_turn = sum(len(list(tensors.tiles(block))) for block in range(blocks)) > blocks
    flag_of = once_flag if once else cell_flag

    def data(rank: int, sender: int, tile: Tile) -> Span:
        slot = once_slot(sender, n) if once and rank != sender else (rank, sender)
        return ll_slot(*slot, parity, n, tile.place, tile.nbytes)

    def put(rank: int, peers: list[int], tile: Tile) -> Iterator[Apart]:
        """Send words, to several peers in one slot that all of them read."""
        for cell in tile.cut(CELL_BYTES):
            number = cell.place // CELL_BYTES
            copy = Copy(data(peers[0], rank, cell), cell.input(rank, peers[0] if tensors.shards > 1 else 0))
            there = (Signal(flag_of(peer, rank, parity, n, number), EPOCH) for peer in peers)
            loaded = Signal(loaded_flag(rank, peers[0], n, number), EPOCH)
            yield Apart((copy, *there, loaded) if root is None else (copy, *there))

    def receivers(rank: int) -> list[list[int]]:
        return [others(rank, n)] if once else [[peer] for peer in others(rank, n)]

    def send(rank: int, tile: Tile) -> Iterator[Command | Apart]:
        if root is None and not reduces:
            yield from copied(tile.output(rank, rank), tile.input(rank, rank if tensors.shards > 1 else 0))
        for peers in receivers(rank):
            yield from put(rank, peers, tile)

    def barrier(rank: int, tile: Tile) -> Iterator[Command]:
        for peer, *_ in receivers(rank):
            for cell in tile.cut(CELL_BYTES):
                yield Wait(loaded_flag(rank, peer, n, cell.place // CELL_BYTES), EPOCH)

    def receive(rank: int, tile: Tile) -> Iterator[Command]:
        senders = list(others(rank, n)) if root is None else [root]
        if reduces:  # into registers, which the place stands for that no rank's cells have
            yield from copied(data(rank, rank, tile), tile.input(rank, rank if tensors.shards > 1 else 0))
        for sender in senders:
            for cell in tile.cut(CELL_BYTES):
                flag = flag_of(rank, sender, parity, n, cell.place // CELL_BYTES)
                yield Wait(flag, EPOCH, Comparison.EQ)
        if reduces:
            yield from reduced(tile.output(rank), tuple(data(rank, s, tile) for s in range(n)), tensors.reduction)
        else:
            for sender in senders:
                yield from copied(tile.output(rank, 0 if sender == root else sender), data(rank, sender, tile))

    def commands(rank: int, block: int) -> Iterator[Command | Apart]:
        if root is not None:
            yield Apart(tuple(grid.meet(rank, block, 0)))
        tiles = list(tensors.tiles(block))
        if once and is_in_turn:
            for turn in range(len(tiles) + 1):
                for tile in tiles[turn : turn + 1]:
                    yield from send(rank, tile)
                for tile in tiles[turn if turn > 1 else 0 : turn + 1] if turn else ():
                    yield from barrier(rank, tile)
                for tile in tiles[turn - 1 : turn] if turn else ():
                    yield from receive(rank, tile)
            return
        for tile in tiles if root in (None, rank) else ():
            yield from send(rank, tile)
        for tile in tiles if root is None else ():
            yield from barrier(rank, tile)
        for tile in tiles if rank != root else ():
            yield from receive(rank, tile)

    return made_of(program, grid, commands, staging_bytes=arena_end(n), flags=cell_flags(n))

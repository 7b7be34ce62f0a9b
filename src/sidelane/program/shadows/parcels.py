"""Shadows of the kernels of parcels: ``exchange_parcels``, ``reduce_parcels`` and ``broadcast_parcels`` of ``device``.

Nobody says that he is ready: each sender has two places with every receiver, for even and odd generations. So there are
two programs, whose calls take turns, and that two places are enough is proved of both together.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import REDUCING, Buffer, Kind, Span
from sidelane.program.ir import Command, Program, Reduce
from sidelane.program.kernel import ALIGNMENT, KernelProgram
from sidelane.program.shadows.blocks import Blocks, copied, made_of, rotated


def place_bytes(program: KernelProgram) -> int:
    """What a shadow gives a sender's place; in an arena it is as large as the largest parcel."""
    return -(-program.part_bytes // ALIGNMENT) * ALIGNMENT


def parcels(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
    """Of even and of odd generations: tiles go into the places of all. ``there``: what came is put together."""
    return tuple(_parcels(program, blocks, tile_bytes, parity) for parity in range(2))


def _parcels(program: KernelProgram, blocks: int, tile_bytes: int, parity: int) -> Program:
    collective, n, part = program.collective, program.world_size, program.part_bytes
    grid = Blocks(n, blocks, tile_bytes, phases=1)
    root = collective.root if collective.kind is Kind.BROADCAST else None

    def place(rank: int, sender: int, at: int, nbytes: int) -> Span:
        return Span(rank, Buffer.STAGING, (parity * n + sender) * place_bytes(program) + at, nbytes)

    def send(rank: int, at: int, nbytes: int) -> Iterator[Command]:
        for peer in rotated(rank, n):
            if peer != root and root in (None, rank):
                src = collective.input_span(rank, peer * part * program.distinct + at, nbytes)
                yield from copied(place(peer, rank, at, nbytes), src)

    def receive(rank: int, at: int, nbytes: int) -> Iterator[Command]:
        if collective.kind in REDUCING:
            assert collective.reduction is not None
            srcs = tuple(place(rank, sender, at, nbytes) for sender in range(n))
            dst = collective.output_span(rank, at, nbytes)
            yield from [Reduce(dst, srcs, collective.reduction)] if n > 1 else copied(dst, srcs[0])
        elif root is None:
            for sender in range(n):
                yield from copied(
                    collective.output_span(rank, sender * part + at, nbytes), place(rank, sender, at, nbytes)
                )
        elif rank != root:
            yield from copied(collective.output_span(rank, at, nbytes), place(rank, root, at, nbytes))

    def commands(rank: int, block: int) -> Iterator[Command]:
        for tile in grid.tiles(block, part):
            yield from send(rank, *tile)
        yield from grid.meet(rank, block, 0)
        for tile in grid.tiles(block, part):
            yield from receive(rank, *tile)

    return made_of(program, grid, commands, staging_bytes=2 * n * place_bytes(program))

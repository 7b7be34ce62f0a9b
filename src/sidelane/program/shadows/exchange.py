"""Shadows of the kernels that move one part a pair of ranks: ``device/push.py`` and ``device/pull.py``."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Program
from sidelane.program.kernel import ALIGNMENT, KernelProgram
from sidelane.program.shadows.blocks import Blocks, copied, made_of, rotated


def push(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. Tiles go into their outputs. ``done``: they have all theirs."""
    collective, n, part = program.collective, program.world_size, program.part_bytes
    grid = Blocks(n, blocks, tile_bytes, phases=2)

    def commands(rank: int, block: int) -> Iterator[Command]:
        yield from grid.meet(rank, block, 0)
        for at, nbytes in grid.tiles(block, part):
            for peer in rotated(rank, n):
                src = collective.input_span(rank, peer * part * program.distinct + at, nbytes)
                yield from copied(collective.output_span(peer, rank * part + at, nbytes), src)
        yield from grid.meet(rank, block, 1)

    return made_of(program, grid, commands, staging_bytes=0)


def pull(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """Tiles go into the own staging. ``there``: so do those of the peers, and are fetched. ``read``: by all peers."""
    collective, n, part = program.collective, program.world_size, program.part_bytes
    grid = Blocks(n, blocks, tile_bytes, phases=2)
    stride = -(-part // ALIGNMENT) * ALIGNMENT
    shards = n if program.distinct else 1

    def commands(rank: int, block: int) -> Iterator[Command]:
        for at, nbytes in grid.tiles(block, part):
            for shard in range(shards):
                src = collective.input_span(rank, shard * part + at, nbytes)
                yield from copied(Span(rank, Buffer.STAGING, shard * stride + at, nbytes), src)
                if shards == 1 or shard == rank:
                    yield from copied(collective.output_span(rank, rank * part + at, nbytes), src)
        yield from grid.meet(rank, block, 0)
        for at, nbytes in grid.tiles(block, part):
            for peer in list(rotated(rank, n))[1:]:
                staged = Span(peer, Buffer.STAGING, (rank * stride if shards > 1 else 0) + at, nbytes)
                yield from copied(collective.output_span(rank, peer * part + at, nbytes), staged)
        yield from grid.meet(rank, block, 1)

    return made_of(program, grid, commands, staging_bytes=stride * shards)

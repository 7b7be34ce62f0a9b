"""Shadows of the kernels that reduce shards: ``reduce_direct``, ``reduce_pull`` and ``reduce_push`` of ``device``."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Program, Reduce
from sidelane.program.kernel import ALIGNMENT, KernelProgram
from sidelane.program.pushed import chunks_of
from sidelane.program.shadows.blocks import Blocks, copied, made_of, rotated


def direct(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. A shard of every input is reduced; in two shots for all outputs. ``done``: by all."""
    collective, n, shards = program.collective, program.world_size, _Shards(program)
    grid = Blocks(n, blocks, tile_bytes, phases=2)

    def commands(rank: int, block: int) -> Iterator[Command]:
        yield from grid.meet(rank, block, 0)
        for at, nbytes in grid.tiles(block, shards.length(shards.mine(rank))):
            begin = shards.start(shards.mine(rank)) + at
            srcs = tuple(collective.input_span(peer, begin, nbytes) for peer in range(n))
            result = collective.output_span(rank, begin if program.two_shot else at, nbytes)
            yield from shards.reduced(result, srcs)
            for peer in list(rotated(rank, n))[1:] if program.two_shot else ():
                yield from copied(collective.output_span(peer, begin, nbytes), result)
        yield from grid.meet(rank, block, 1)

    return made_of(program, grid, commands, staging_bytes=0)


def reduce(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """Inputs go into the own staging. ``there``: a shard of all stagings is reduced; in two shots also into the own.
    ``done``: the results of the others are fetched. The last meeting: all have read.
    """
    collective, n, shards = program.collective, program.world_size, _Shards(program)
    grid = Blocks(n, blocks, tile_bytes, phases=3 if program.two_shot else 2)
    stride = -(-program.part_bytes // ALIGNMENT) * ALIGNMENT

    def staged(rank: int, shard: int, at: int, nbytes: int) -> Span:
        return Span(rank, Buffer.STAGING, shard * stride + at, nbytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        for shard in range(shards.count):
            for at, nbytes in grid.tiles(block, shards.length(shard)):
                src = collective.input_span(rank, shards.start(shard) + at, nbytes)
                yield from copied(staged(rank, shard, at, nbytes), src)
        yield from grid.meet(rank, block, 0)
        mine = shards.mine(rank)
        for at, nbytes in grid.tiles(block, shards.length(mine)):
            begin = shards.start(mine) + at if program.two_shot else at
            result = collective.output_span(rank, begin, nbytes)
            yield from shards.reduced(result, tuple(staged(peer, mine, at, nbytes) for peer in range(n)))
            if program.two_shot:
                yield from copied(staged(rank, mine, at, nbytes), result)
        yield from grid.meet(rank, block, 1)
        if not program.two_shot:
            return
        for owner in list(rotated(rank, n))[1:]:
            for at, nbytes in grid.tiles(block, shards.length(owner)):
                there = collective.output_span(rank, shards.start(owner) + at, nbytes)
                yield from copied(there, staged(owner, owner, at, nbytes))
        yield from grid.meet(rank, block, 2)

    return made_of(program, grid, commands, staging_bytes=stride * shards.count)


def send(program: KernelProgram, blocks: int, tile_bytes: int) -> Program:
    """``ready``: all peers run. Chunk by chunk, tiles go into the stagings of their owners, who reduce the chunk before
    meanwhile, for all outputs. ``done``: by all. Chunks take turns among slots that need no signals of their own.
    """
    collective, n, shards = program.collective, program.world_size, _Shards(program)
    chunks = chunks_of(program.part_bytes, blocks, tile_bytes)
    grid = Blocks(n, blocks, tile_bytes, phases=chunks.count + 2)
    each = blocks * chunks.rounds

    def tiles(block: int, chunk: int, shard: int) -> Iterator[tuple[int, int]]:
        """(number, bytes) of a block's tiles of a shard in a chunk."""
        for tile in range(chunk * each + block, min(chunks.tiles, (chunk + 1) * each), blocks):
            yield tile, max(0, min(tile_bytes, shards.length(shard) - tile * tile_bytes))

    def stored(block: int, chunk: int, rank: int) -> Iterator[Command]:
        for owner in list(rotated(rank, n))[1:]:
            for tile, nbytes in tiles(block, chunk, owner):
                src = collective.input_span(rank, shards.start(owner) + tile * tile_bytes, nbytes)
                yield from copied(Span(owner, Buffer.STAGING, chunks.place(tile, rank, owner), nbytes), src)

    def added(block: int, chunk: int, rank: int) -> Iterator[Command]:
        for tile, nbytes in tiles(block, chunk, rank):
            if not nbytes:
                continue
            begin = shards.start(rank) + tile * tile_bytes
            srcs = tuple(
                collective.input_span(rank, begin, nbytes)
                if source == rank
                else Span(rank, Buffer.STAGING, chunks.place(tile, source, rank), nbytes)
                for source in range(n)
            )
            result = collective.output_span(rank, begin, nbytes)
            yield from shards.reduced(result, srcs)
            for peer in list(rotated(rank, n))[1:]:
                yield from copied(collective.output_span(peer, begin, nbytes), result)

    def commands(rank: int, block: int) -> Iterator[Command]:
        yield from grid.meet(rank, block, 0)
        for chunk in range(chunks.count):
            yield from stored(block, chunk, rank)
            yield from grid.tell(rank, block, 1 + chunk)
            if chunk:
                yield from grid.hear(rank, block, chunk)
                yield from added(block, chunk - 1, rank)
        yield from grid.hear(rank, block, chunks.count)
        yield from added(block, chunks.count - 1, rank)
        yield from grid.meet(rank, block, chunks.count + 1)

    return made_of(program, grid, commands, staging_bytes=max(1, n - 1) * chunks.peer_bytes)


class _Shards:
    """The shards of an input: one for each rank, or one for all, that every rank reduces."""

    def __init__(self, program: KernelProgram) -> None:
        self._shard_bytes, self._total_bytes = program.part_bytes, program.total_bytes
        assert program.collective.reduction is not None
        self._reduction = program.collective.reduction
        self.count = program.world_size if program.distinct else 1

    def mine(self, rank: int) -> int:
        """That which a rank reduces."""
        return rank if self.count > 1 else 0

    def start(self, shard: int) -> int:
        """Where it begins in an input."""
        return shard * self._shard_bytes

    def length(self, shard: int) -> int:
        """Bytes; the last ones may be shorter, or empty."""
        return max(0, min(self._shard_bytes, self._total_bytes - self.start(shard)))

    def reduced(self, dst: Span, srcs: tuple[Span, ...]) -> Iterator[Command]:
        """Combine, in the order of the ranks; of a single one there is nothing to add."""
        if len(srcs) > 1:
            yield Reduce(dst, srcs, self._reduction)
        else:
            yield from copied(dst, srcs[0])

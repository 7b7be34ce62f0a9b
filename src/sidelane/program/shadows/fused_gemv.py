"""Shadows of ``ops/gemv.py``. What blocks compute stands in their inputs: partial results of one token."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import Buffer, ReduceOp, Reduction, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Program, Reduce, Signal
from sidelane.program.shadows.blocks import Blocks, copied, rotated

SUM = Reduction(ReduceOp.SUM, "float32")


def one_shot(world_size: int, blocks: int, tiles: int, tile_bytes: int) -> tuple[Program, ...]:
    """Of even and of odd generations: tiles go into places of all ranks, and every rank adds up all of them.

    Args:
        world_size: ranks.
        blocks: of a grid.
        tiles: of the result.
        tile_bytes: of float32 partial results.
    """
    return tuple(_one_shot(world_size, blocks, tiles, tile_bytes, parity) for parity in range(2))


def _one_shot(n: int, blocks: int, tiles: int, tile_bytes: int, parity: int) -> Program:
    grid = Blocks(n, blocks, tile_bytes, phases=1)
    collective = all_reduce([tiles * tile_bytes] + [0] * (n - 1), SUM)

    def place(rank: int, sender: int, tile: int) -> Span:
        return Span(rank, Buffer.STAGING, ((parity * n + sender) * tiles + tile) * tile_bytes, tile_bytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        for tile in range(block, tiles, blocks):
            for peer in rotated((rank + 1) % n, n):
                computed = collective.input_span(rank, tile * tile_bytes, tile_bytes)
                yield from copied(place(peer, rank, tile), computed)
        yield from grid.meet(rank, block, 0)
        for tile in range(block, tiles, blocks):
            result = collective.output_span(rank, tile * tile_bytes, tile_bytes)
            yield from added(result, tuple(place(rank, sender, tile) for sender in range(n)))

    queues = tuple(grid.queue(rank, block, list(commands(rank, block))) for rank in range(n) for block in range(blocks))
    staging = (2 * n * tiles * tile_bytes,) * n
    return Program(collective, "one_shot gemv_all_reduce, in a kernel", queues, staging, grid.flag_count)


def two_phase(
    world_size: int, blocks: int, tiles: int, tile_bytes: int, *, copies: bool, remote_first: bool = True
) -> Program:
    """Tiles go to their owners, who add them up and store the results for all.

    Args:
        world_size: ranks.
        blocks: of a grid.
        tiles: of the result; the last owners may have fewer than the others.
        tile_bytes: of float32 partial results.
        copies: results go into workspace first, from which each rank copies; else into the outputs of all.
        remote_first: the tiles of others are computed first.
    """
    n, each = world_size, -(-tiles // world_size)
    grid = Blocks(n, blocks, tile_bytes, phases=2)
    owned = [max(0, min(each, tiles - owner * each)) for owner in range(n)]
    collective = all_reduce([count * tile_bytes for count in owned], SUM)
    partial_bytes = n * each * tile_bytes

    def place(owner: int, sender: int, number: int) -> Span:
        return Span(owner, Buffer.STAGING, (sender * each + number) * tile_bytes, tile_bytes)

    def result(rank: int, tile: int) -> Span:
        output = collective.output_span(rank, tile * tile_bytes, tile_bytes)
        return Span(rank, Buffer.STAGING, partial_bytes + tile * tile_bytes, tile_bytes) if copies else output

    def commands(rank: int, block: int) -> Iterator[Command]:
        for owner in rotated((rank + 1) % n, n) if remote_first else range(n):
            for number in range(block, owned[owner], blocks):
                at = (owner * each + number) * tile_bytes
                yield from copied(place(owner, rank, number), collective.input_span(rank, at, tile_bytes))
            yield Signal(grid.flag(owner, 0, block, rank), EPOCH)
        yield from grid.hear(rank, block, 0)
        for number in range(block, owned[rank], blocks):
            tile = rank * each + number
            yield from added(result(rank, tile), tuple(place(rank, sender, number) for sender in range(n)))
            for peer in list(rotated(rank, n))[1:]:
                yield from copied(result(peer, tile), result(rank, tile))
        yield from grid.meet(rank, block, 1)
        for owner in range(n) if copies else ():
            for tile in range(owner * each + block, owner * each + owned[owner], blocks):
                output = collective.output_span(rank, tile * tile_bytes, tile_bytes)
                yield from copied(output, result(rank, tile))

    queues = tuple(grid.queue(rank, block, list(commands(rank, block))) for rank in range(n) for block in range(blocks))
    staging = (partial_bytes + tiles * tile_bytes * copies,) * n
    return Program(collective, "two_phase gemv_all_reduce, in a kernel", queues, staging, grid.flag_count)


def added(dst: Span, srcs: tuple[Span, ...]) -> Iterator[Command]:
    """The sum, in the order of the ranks; of a single one there is nothing to add."""
    if len(srcs) > 1:
        yield Reduce(dst, srcs, SUM)
    else:
        yield from copied(dst, srcs[0])

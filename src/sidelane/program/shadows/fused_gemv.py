"""Shadows of ``ops/gemv.py``. What blocks compute stands in their inputs: partial results of one token."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import Buffer, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Program, Signal
from sidelane.program.shadows.blocks import copied, reduced, rotated
from sidelane.program.shadows.own_grid import SUM, OwnGrid


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
    grid = OwnGrid(n, blocks, tile_bytes)
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
            yield from reduced(result, tuple(place(rank, sender, tile) for sender in range(n)), SUM)

    staging_bytes, flags = 2 * n * tiles * tile_bytes, grid.flag_count(1)
    return grid.made(collective, "one_shot gemv_all_reduce", commands, staging_bytes=staging_bytes, flags=flags)


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
    grid = OwnGrid(n, blocks, tile_bytes)
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
            yield from reduced(result(rank, tile), tuple(place(rank, sender, number) for sender in range(n)), SUM)
            for peer in list(rotated(rank, n))[1:]:
                yield from copied(result(peer, tile), result(rank, tile))
        yield from grid.meet(rank, block, 1)
        for owner in range(n) if copies else ():
            for tile in range(owner * each + block, owner * each + owned[owner], blocks):
                output = collective.output_span(rank, tile * tile_bytes, tile_bytes)
                yield from copied(output, result(rank, tile))

    staging_bytes, flags = partial_bytes + tiles * tile_bytes * copies, grid.flag_count(2)
    return grid.made(collective, "two_phase gemv_all_reduce", commands, staging_bytes=staging_bytes, flags=flags)

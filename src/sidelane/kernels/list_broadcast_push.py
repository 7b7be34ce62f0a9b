# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""broadcasts of a list of tensors of many bytes: one kernel that stores into the tensors or the staging of peers.

As ``broadcast_push``, with the tiles of all tensors in a row; relays as in ``relay``.

Equivalent: ``broadcast_push`` for each tensor.

Legend: N ranks; STAGED: targets are staging; PIECES and WORDS as in ``list_table``; NARROW the bytes of an access in
tiles that are not wide; UNIT and TILE as in ``memory``; ``behind`` is the number of ranks from the root to this one.
"""

from __future__ import annotations

from sidelane.device.flags import (
    address_of,
    addresses_of,
    end_generation,
    next_generation,
    relaxed_signal,
    signal,
    wait,
    wait_for_rank,
)
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import get, put
from sidelane.kernels.list_table import FIRST_GROUP, INPUT, PLACE, ListTable, address_in, ends_of, find_tile, value
from sidelane.kernels.relay import DONE, TILE_BYTES, WARPS, blocks_and_rounds, chunks_of, from_root, owner_of

__all__ = ["KERNEL", "TILE_BYTES", "arrange"]


def arrange(site: LaunchSite, table: ListTable, address: int, root: int, stagings: tuple[int, ...] | None) -> Launch:
    """Make the launch that sends the pieces of a table.

    Args:
        site: rank, arenas and blocks of the launch.
        table: table of tiles of ``TILE_BYTES``; inputs are the tensors. Without staging, its one group has their
            addresses on all ranks, the root's first (``relay.from_root``).
        address: address of its values in device memory.
        root: rank whose bytes all ranks get.
        stagings: address of each rank's staging, aligned to 16 bytes; None where peers reach all tensors.
    """
    staged = stagings is not None
    constants = {"N": site.world_size, "STAGED": staged, **table.constants}
    tiles, n = table.tiles, site.world_size
    blocks, rounds = blocks_and_rounds(site, tiles, staged=staged)
    arguments = (address, tiles, rounds, site.rank, root, (site.rank - root) % n, site.board)
    addresses = padded(site.rotated(site.arenas)) + padded(from_root(stagings or (), root))
    return Launch(KERNEL, blocks, WARPS, arguments + addresses, constants)


@triton.jit
def _list_broadcast_push(
    table, tiles, rounds, rank, root, behind, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    N: tl.constexpr, STAGED: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, NARROW: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    stagings = (s0, s1, s2, s3, s4, s5, s6, s7)
    generation = next_generation(p0)
    ends = ends_of(table, PIECES)
    spent = tl.full((), 0, tl.int32)
    if N > 1:
        step = tl.num_programs(0) * rounds
        chunks = chunks_of(tiles, rounds)
        tile = tl.program_id(0).to(tl.int64)
        turn = rounds * 0
        chunk = rounds * 0
        relaxed_signal(arenas, rank, generation, 0, N)
        spent = wait(p0, generation, board, spent, 0, N)
        if rank == root:
            while chunk < chunks:
                end = tl.minimum(tiles, (chunk + 1) * step)
                while tile < end:
                    row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
                    if wide:
                        _send(row, offset, nbytes, stagings, owner_of(turn, N), N, STAGED, 16, TILE)
                    else:
                        _send(row, offset, nbytes, stagings, owner_of(turn, N), N, STAGED, NARROW, TILE)
                    turn += 1
                    tile += tl.num_programs(0)
                signal(arenas, rank, generation, 1 + chunk, N)
                chunk += 1
            relaxed_signal(arenas, rank, generation, DONE, N)
        else:
            while chunk < chunks:
                spent = wait_for_rank(p0, root, generation, board, spent, 1 + chunk)
                end = tl.minimum(tiles, (chunk + 1) * step)
                while tile < end:
                    if (N > 2 or STAGED) and owner_of(turn, N) == behind:
                        row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
                        if wide:
                            _relay(row, offset, nbytes, stagings, behind, N, STAGED, 16, TILE)
                        else:
                            _relay(row, offset, nbytes, stagings, behind, N, STAGED, NARROW, TILE)
                    turn += 1
                    tile += tl.num_programs(0)
                chunk += 1
            if N > 2:
                signal(arenas, rank, generation, DONE, N)
                spent = wait(p0, generation, board, spent, DONE, N)
                if STAGED:
                    tile = tl.program_id(0).to(tl.int64)
                    turn = rounds * 0
                    own = address_of(stagings, behind, N)
                    while tile < tiles:
                        if owner_of(turn, N) != behind:
                            row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
                            if wide:
                                _take(row, offset, nbytes, own, 16, TILE)
                            else:
                                _take(row, offset, nbytes, own, NARROW, TILE)
                        turn += 1
                        tile += tl.num_programs(0)
    end_generation(p0, generation)


@triton.jit
def _target(row, offset, stagings, index, N: tl.constexpr, STAGED: tl.constexpr):
    """Return the address of a tile on the rank that is ``index`` behind the root."""
    if STAGED:
        return address_of(stagings, index, N) + value(row, PLACE) + offset
    else:
        return address_in(row, FIRST_GROUP, index) + offset


@triton.jit
def _send(
    row, offset, nbytes, stagings, owner,
    N: tl.constexpr, STAGED: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    values = get(value(row, INPUT) + offset, 0, nbytes, UNIT, TILE, False)
    put(_target(row, offset, stagings, owner, N, STAGED), values, 0, nbytes, UNIT, TILE, False)


@triton.jit
def _relay(
    row, offset, nbytes, stagings, behind,
    N: tl.constexpr, STAGED: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store a tile that this rank owns in the targets of all other ranks."""
    values = get(_target(row, offset, stagings, behind, N, STAGED), 0, nbytes, UNIT, TILE, False)
    for other in tl.static_range(N - 2):
        peer = 1 + (behind + other) % (N - 1)
        put(_target(row, offset, stagings, peer, N, STAGED), values, 0, nbytes, UNIT, TILE, False)
    if STAGED:
        put(value(row, INPUT) + offset, values, 0, nbytes, UNIT, TILE, False)


@triton.jit
def _take(row, offset, nbytes, staging, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Copy a tile of another owner out of the staging."""
    values = get(staging + value(row, PLACE) + offset, 0, nbytes, UNIT, TILE, False)
    put(value(row, INPUT) + offset, values, 0, nbytes, UNIT, TILE, False)


KERNEL = _list_broadcast_push

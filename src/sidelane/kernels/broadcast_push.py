# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""broadcast of many bytes: stores into the outputs or the staging of peers, relayed by them (see ``relay``).

Equivalent: ``data = data of the root``, on every rank.

Legend: N ranks; STAGED: targets are staging; UNIT and TILE as in ``memory``; NARROW the unit of the last tile, whose
bytes may be of any number; ``behind`` is the number of ranks from the root to this one.
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
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put
from sidelane.kernels.relay import DONE, TILE_BYTES, WARPS, blocks_and_rounds, chunks_of, from_root, owner_of


def arrange(site: LaunchSite, data: int, targets: tuple[int, ...], nbytes: int, root: int, *, staged: bool) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        data: address of the bytes, on this rank.
        targets: on each rank, where peers store them: the same, or staging.
        nbytes: 1 and more.
        root: rank whose bytes all ranks get.
        staged: targets are staging.
    """
    n = site.world_size
    unit = unit_bytes(data, *targets)
    constants = {"N": n, "STAGED": staged, "UNIT": unit, "NARROW": unit_bytes(unit, nbytes), "TILE": TILE_BYTES}
    blocks, rounds = blocks_and_rounds(site, -(-nbytes // TILE_BYTES), staged=staged)
    arguments = (data, nbytes, rounds, site.rank, root, (site.rank - root) % n, site.board)
    addresses = padded(site.rotated(site.arenas)) + padded(from_root(targets, root))
    return Launch(KERNEL, blocks, WARPS, arguments + addresses, constants)


@triton.jit
def _broadcast_push(
    data, nbytes, rounds, rank, root, behind, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    t0, t1, t2, t3, t4, t5, t6, t7,
    N: tl.constexpr, STAGED: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    targets = (t0, t1, t2, t3, t4, t5, t6, t7)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    if N > 1:
        tiles = (nbytes + TILE - 1) // TILE
        step = tl.num_programs(0) * rounds
        chunks = chunks_of(tiles, rounds)
        start = tl.program_id(0).to(tl.int64)
        chunk = rounds * 0
        relaxed_signal(arenas, rank, generation, 0, N)
        spent = wait(p0, generation, board, spent, 0, N)
        if rank == root:
            while chunk < chunks:
                _send(data, targets, start, tl.minimum(tiles, start + step), chunk * rounds, nbytes,
                      N, UNIT, NARROW, TILE)  # fmt: skip
                signal(arenas, rank, generation, 1 + chunk, N)
                start += step
                chunk += 1
            relaxed_signal(arenas, rank, generation, DONE, N)
        else:
            while chunk < chunks:
                spent = wait_for_rank(p0, root, generation, board, spent, 1 + chunk)
                if N > 2 or STAGED:
                    _relay(data, targets, start, tl.minimum(tiles, start + step), chunk * rounds, nbytes, behind,
                           N, STAGED, UNIT, NARROW, TILE)  # fmt: skip
                start += step
                chunk += 1
            if N > 2:
                signal(arenas, rank, generation, DONE, N)
                spent = wait(p0, generation, board, spent, DONE, N)
                if STAGED:
                    _take(data, targets, tiles, nbytes, behind, N, UNIT, NARROW, TILE)
    end_generation(p0, generation)


@triton.jit
def _send(
    data, targets, tile, end, turn, nbytes,
    N: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store tiles in the targets of their owners."""
    while tile < end:
        _copy(address_of(targets, owner_of(turn, N), N), data, tile, nbytes, UNIT, NARROW, TILE)
        turn += 1
        tile += tl.num_programs(0)


@triton.jit
def _relay(
    data, targets, tile, end, turn, nbytes, behind,
    N: tl.constexpr, STAGED: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the tiles that this rank owns in the targets of all other ranks."""
    while tile < end:
        if owner_of(turn, N) == behind:
            if (tile + 1) * TILE <= nbytes:
                _relay_tile(data, targets, tile, nbytes, behind, N, STAGED, UNIT, TILE, True)
            else:
                _relay_tile(data, targets, tile, nbytes, behind, N, STAGED, NARROW, TILE, False)
        turn += 1
        tile += tl.num_programs(0)


@triton.jit
def _relay_tile(
    data, targets, tile, nbytes, behind,
    N: tl.constexpr, STAGED: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    values = get(address_of(targets, behind, N), tile, nbytes, UNIT, TILE, WHOLE)
    for other in tl.static_range(N - 2):
        target = address_of(targets, 1 + (behind + other) % (N - 1), N)
        put(target, values, tile, nbytes, UNIT, TILE, WHOLE)
    if STAGED:
        put(data, values, tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def _take(
    data, targets, tiles, nbytes, behind,
    N: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the tiles of other owners out of the staging."""
    own = address_of(targets, behind, N)
    tile = tl.program_id(0).to(tl.int64)
    turn = behind * 0
    while tile < tiles:
        if owner_of(turn, N) != behind:
            _copy(data, own, tile, nbytes, UNIT, NARROW, TILE)
        turn += 1
        tile += tl.num_programs(0)


@triton.jit
def _copy(target, source, tile, nbytes, UNIT: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr):
    if (tile + 1) * TILE <= nbytes:
        put(target, get(source, tile, nbytes, UNIT, TILE, True), tile, nbytes, UNIT, TILE, True)
    else:
        put(target, get(source, tile, nbytes, NARROW, TILE, False), tile, nbytes, NARROW, TILE, False)


KERNEL = _broadcast_push

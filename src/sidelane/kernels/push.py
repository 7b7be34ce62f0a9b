# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_gather and all_to_all of many bytes into symmetric outputs: stores straight into the peers' outputs.

    rank 0   ready? | input -> part 0 of every output | done?
    rank 1   ready? | input -> part 1 of every output | done?

``ready``: each block waits until the block of its number runs on every peer, whose stream has then passed all work that
used the output before. ``done``: until that block has stored everything. Block b of every rank moves the same tiles of
each part, so that blocks depend on blocks of their number only.

Equivalent: see ``exchange_cells``. In place for all_gather only: an all_to_all would overwrite what peers have to send.

Legend: N ranks; UNIT and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, relaxed_signal, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import get, put

TILE_BYTES = 16384
WARPS = 16


def arrange(site: LaunchSite, outputs: tuple[int, ...], input: int, part_bytes: int, *, distinct: bool) -> Launch:
    """Make the launch that moves one part for each pair of ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        outputs: address of each rank's output of ``world_size`` parts.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        part_bytes: size of a part.
        distinct: each peer gets its own part (all_to_all), else all get the same (all_gather).
    """
    constants = {
        "N": site.world_size,
        "DISTINCT": distinct,
        "UNIT": unit_bytes(*outputs, input, part_bytes),
        "TILE": TILE_BYTES,
    }
    arguments = (input, part_bytes, part_bytes if distinct else 0, site.rank, site.board)
    addresses = padded(site.rotated(site.arenas)) + padded(site.rotated(outputs))
    return Launch(KERNEL, site.blocks(-(-part_bytes // TILE_BYTES)), WARPS, arguments + addresses, constants)


@triton.jit
def _push(
    input, part_bytes, stride, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    whole = part_bytes // TILE
    first = tl.program_id(0).to(tl.int64)
    tile = first
    while tile < whole:
        _push_tile(outputs, input, tile, part_bytes, stride, rank, N, DISTINCT, UNIT, TILE, True)
        tile += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        _push_tile(outputs, input, whole, part_bytes, stride, rank, N, DISTINCT, UNIT, TILE, False)

    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)
    end_generation(p0, generation)


@triton.jit
def _push_tile(
    outputs, input, tile, part_bytes, stride, rank,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own = rank * part_bytes
    if DISTINCT:
        for turn in tl.static_range(N):
            values = get(input + (rank + turn) % N * stride, tile, part_bytes, UNIT, TILE, WHOLE)
            put(outputs[turn] + own, values, tile, part_bytes, UNIT, TILE, WHOLE)
    else:
        values = get(input, tile, part_bytes, UNIT, TILE, WHOLE)
        for turn in tl.static_range(N):
            put(outputs[turn] + own, values, tile, part_bytes, UNIT, TILE, WHOLE)


KERNEL = _push

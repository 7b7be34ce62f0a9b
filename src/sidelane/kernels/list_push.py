# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Lists of tensors of many bytes into symmetric outputs: one kernel that stores straight into the peers' outputs.

    rank 0   ready? | inputs -> part 0 of every output | done?
    rank 1   ready? | inputs -> part 1 of every output | done?

``ready`` and ``done`` as in ``push``, and in place for all_gathers only, for the same reason. Equivalent:
``exchange_cells`` for each tensor.

Legend: N ranks; PIECES and WORDS as in ``list_table``; NARROW the bytes of an access in tiles that are not wide; UNIT
and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, relaxed_signal, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import get, put
from sidelane.kernels.list_table import FIRST_GROUP, INPUT, INPUT_STRIDE, ListTable, ends_of, find_tile, value

TILE_BYTES = 16384
WARPS = 16


def arrange(site: LaunchSite, table: ListTable, address: int, *, distinct: bool) -> Launch:
    """Make the launch that moves the pieces of a table.

    Args:
        site: rank, arenas and blocks of the launch.
        table: table of tiles of ``TILE_BYTES``; its one group has the places of this rank's parts in the outputs of
            all ranks, its own first (``LaunchSite.rotated``).
        address: address of its values in device memory.
        distinct: each peer gets its own part (all_to_all), else all get the same (all_gather).
    """
    constants = {"N": site.world_size, "DISTINCT": distinct, **table.constants}
    tiles = table.tiles
    arguments = (address, tiles, site.rank, site.board, *padded(site.rotated(site.arenas)))
    return Launch(KERNEL, site.blocks(tiles), WARPS, arguments, constants)


@triton.jit
def _list_push(
    table, tiles, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, DISTINCT: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, NARROW: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    generation = next_generation(p0)
    ends = ends_of(table, PIECES)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
        if wide:
            _push(row, offset, nbytes, rank, N, DISTINCT, 16, TILE)
        else:
            _push(row, offset, nbytes, rank, N, DISTINCT, NARROW, TILE)
        tile += tl.num_programs(0)

    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)
    end_generation(p0, generation)


@triton.jit
def _push(row, offset, nbytes, rank, N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    input = value(row, INPUT) + offset
    if DISTINCT:
        stride = value(row, INPUT_STRIDE)
        for turn in tl.static_range(N):
            values = get(input + (rank + turn) % N * stride, 0, nbytes, UNIT, TILE, False)
            put(value(row, FIRST_GROUP + turn) + offset, values, 0, nbytes, UNIT, TILE, False)
    else:
        values = get(input, 0, nbytes, UNIT, TILE, False)
        for turn in tl.static_range(N):
            put(value(row, FIRST_GROUP + turn) + offset, values, 0, nbytes, UNIT, TILE, False)


KERNEL = _list_push

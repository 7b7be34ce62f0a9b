# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Lists of tensors of many bytes in symmetric inputs: one kernel that reduces what it reads from all of them.

    one shot   ready? | shard r of every input -> reduce -> outputs | done?
    two shot   ready? | own tiles of every input -> reduce -> every output | done?

``ready`` and ``done`` as in ``reduce_direct``, and in place where that is: a shard, or in two shots a tile, is read by
the one rank that writes it. A block has tiles of every owner in turn. Equivalent: ``reduce_cells`` for each tensor.

Legend: N ranks; TARGETS outputs that a tile goes to (1 or N); PIECES and WORDS as in ``list_table``; NARROW the bytes
of an access in tiles that are not wide; UNIT and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import addresses_of, end_generation, next_generation, signal, wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded
from sidelane.device.memory import count_of, pointer
from sidelane.kernels.arithmetic import combine, reduction_constants
from sidelane.kernels.list_table import FIRST_GROUP, OUTPUT, SECOND_GROUP, ListTable, ends_of, find_tile, value
from sidelane.program.collective import Reduction

TILE_BYTES = 8192
WARPS = 16


def arrange(site: LaunchSite, table: ListTable, address: int, reduction: Reduction, *, gather: bool) -> Launch:
    """Make the launch that reduces the pieces of a table.

    Args:
        site: rank, arenas and blocks of the launch.
        table: table of tiles of ``TILE_BYTES``; its first group has the inputs of all ranks in their order (the part
            that this rank reduces), with ``gather`` its second one their outputs, this rank's first
            (``LaunchSite.rotated``).
        address: address of its values in device memory.
        reduction: operation and dtype.
        gather: every rank reduces some tiles, and stores the results in everyone's outputs (all_reduce in two shots).
    """
    n, tiles = site.world_size, table.tiles
    constants = {
        "N": n,
        "TARGETS": n if gather else 1,
        "GATHER": gather,
        **table.constants,
        **reduction_constants(reduction),
    }
    arguments = (address, tiles, site.rank, site.board, *padded(site.rotated(site.arenas)))
    return Launch(KERNEL, site.blocks(-(-tiles // n) if gather else tiles), WARPS, arguments, constants)


@triton.jit
def _list_direct(
    table, tiles, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, TARGETS: tl.constexpr, GATHER: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
    NARROW: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    arenas = addresses_of((p0, p1, p2, p3, p4, p5, p6, p7), N)
    generation = next_generation(p0)
    ends = ends_of(table, PIECES)
    spent = tl.full((), 0, tl.int32)
    signal(arenas, rank, generation, 0, N)
    spent = wait(p0, generation, board, spent, 0, N)

    # Of the tiles of a block, this rank owns all, or every N-th one.
    first = tl.program_id(0).to(tl.int64)
    tile = first + rank * tl.num_programs(0) if GATHER else first
    step = tl.num_programs(0) * N if GATHER else tl.num_programs(0)
    while tile < tiles:
        row, offset, nbytes, wide = find_tile(table, ends, tile, PIECES, WORDS, TILE)
        if wide:
            _reduce(row, offset, nbytes, N, TARGETS, GATHER, 16, TILE, OP, DTYPE, ELEMENT_BYTES, FLOAT)
        else:
            _reduce(row, offset, nbytes, N, TARGETS, GATHER, NARROW, TILE, OP, DTYPE, ELEMENT_BYTES, FLOAT)
        tile += step

    signal(arenas, rank, generation, 1, N)
    spent = wait(p0, generation, board, spent, 1, N)
    end_generation(p0, generation)


@triton.jit
def _reduce(
    row, offset, nbytes,
    N: tl.constexpr, TARGETS: tl.constexpr, GATHER: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of every input, in the order of the ranks."""
    offsets = tl.arange(0, TILE // ELEMENT_BYTES)
    mask = offsets < count_of(nbytes, UNIT, ELEMENT_BYTES)
    values = ()
    for rank in tl.static_range(N):
        source = pointer(value(row, FIRST_GROUP + rank) + offset, DTYPE, UNIT == 16)
        values = values + (tl.load(source + offsets, mask=mask),)
    result = combine(values, N, OP, FLOAT).to(DTYPE)
    for turn in tl.static_range(TARGETS):
        target = (value(row, SECOND_GROUP + turn) if GATHER else value(row, OUTPUT)) + offset
        tl.store(pointer(target, DTYPE, UNIT == 16) + offsets, result, mask=mask)


KERNEL = _list_direct

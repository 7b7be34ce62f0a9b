# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""reduce_scatter and all_reduce of some hundred kilobytes, as parcels: one handshake.

    rank 0   input -> parcels 0 of every rank | signal, wait: all there | own parcels -> reduce -> output
    rank 1   input -> parcels 1 of every rank | signal, wait: all there | own parcels -> reduce -> output

Equivalent: see ``reduce_cells``. In place is allowed: a block sends all bytes that it overwrites before it writes.

Legend: N ranks; UNIT and TILE as in ``memory``.
"""

from __future__ import annotations

from sidelane.device.flags import end_generation, next_generation
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite
from sidelane.device.memory import pointer
from sidelane.kernels.arithmetic import combine, reduction_constants
from sidelane.kernels.parcels import WARPS, arguments_of, blocks_of, constants_of, exchange, place
from sidelane.program.collective import Reduction


def arrange(
    site: LaunchSite, output: int, input: int, part_bytes: int, reduction: Reduction, *, distinct: bool
) -> Launch:
    """Make the launch that reduces one part for each rank.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of one part.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        part_bytes: 1 to ``PARCEL_BYTES``, whole elements.
        reduction: operation and dtype.
        distinct: each rank gets its own part (reduce_scatter), else all get the same (all_reduce).

    Raises:
        ValueError: a part is too large or empty.
    """
    given = (site, output, input, part_bytes)
    constants = {
        **constants_of(*given, distinct=distinct),
        **reduction_constants(reduction),
        "ALIGNED": output % 16 == 0,
    }
    return Launch(KERNEL, blocks_of(site, part_bytes), WARPS, arguments_of(*given, distinct=distinct), constants)


@triton.jit
def _reduce_parcels(
    output, input, part_bytes, stride, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, DISTINCT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, OP: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    exchange(input, peers, part_bytes, stride, rank, generation, board, N, DISTINCT, UNIT, TILE)

    count = part_bytes // ELEMENT_BYTES
    whole = part_bytes // TILE
    first = tl.program_id(0).to(tl.int64)
    tile = first
    while tile < whole:
        _reduce_tile(output, p0, tile, count, generation,
                     N, OP, DTYPE, FLOAT, ALIGNED, TILE // ELEMENT_BYTES, True)  # fmt: skip
        tile += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        _reduce_tile(output, p0, whole, count, generation,
                     N, OP, DTYPE, FLOAT, ALIGNED, TILE // ELEMENT_BYTES, False)  # fmt: skip
    end_generation(p0, generation)


@triton.jit
def _reduce_tile(
    output, arena, tile, count, generation,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
    ELEMENTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of every parcel, in the order of the ranks."""
    offsets = tile * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = None if WHOLE else offsets < count
    values = ()
    for sender in tl.static_range(N):
        source = pointer(place(arena, generation, sender, N), DTYPE, True)
        values = values + (tl.load(source + offsets, mask=mask),)
    result = combine(values, N, OP, FLOAT).to(DTYPE)
    tl.store(pointer(output, DTYPE, ALIGNED) + offsets, result, mask=mask)


KERNEL = _reduce_parcels

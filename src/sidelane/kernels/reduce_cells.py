# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""reduce_scatter and all_reduce of few bytes, as cells: one pass, no handshake.

    rank 0   input -> cells into slot 0 of all others | wait for cells in own slots -> reduce with own -> output
    rank 1   input -> cells into slot 1 of all others | wait for cells in own slots -> reduce with own -> output

Equivalent: ``output = reduce over ranks s of part r of the input of rank s`` (reduce_scatter) or ``of the input of rank
s`` (all_reduce), on rank r. In place is fine: a word is stored once it has been read, and summed, by whoever stores it.

Legend: N ranks, PEERS the power of two from N - 1 on, CELLS cells a tile, ONE if no block has more tiles, WHOLE if all
tiles are full, DISTINCT if each rank gets its own part (reduce_scatter).
"""

from __future__ import annotations

from sidelane.device.flags import end_generation, next_generation
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, cells_launch
from sidelane.device.memory import load_words, store_words
from sidelane.kernels.arithmetic import accumulate, finish, reduction_constants, widen
from sidelane.kernels.cells import cells_there, put_cells, slot, wait_for_cells
from sidelane.program.collective import Reduction


def arrange(
    site: LaunchSite, output: int, input: int, part_bytes: int, reduction: Reduction, *, distinct: bool
) -> Launch:
    """Make the launch that reduces one part for each rank.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of one part.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        part_bytes: 1 to ``SLOT_PAYLOAD_BYTES``, whole elements.
        reduction: operation and dtype.
        distinct: each rank gets its own part (reduce_scatter), else all get the same (all_reduce).

    Raises:
        ValueError: a part is too large or empty.
    """
    constants = {"DISTINCT": distinct, **reduction_constants(reduction)}
    return cells_launch(KERNEL, site, output, input, part_bytes, distinct=distinct, constants=constants)


@triton.jit
def elements_of(words, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr):
    """Convert int32[CELLS] to wide[CELLS, 2] for elements of 2 bytes, wide[CELLS] for 4, wide[CELLS / 2] for 8."""
    if ELEMENT_BYTES == 2:
        pair = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        return widen(pair.to(DTYPE, bitcast=True), FLOAT)
    elif ELEMENT_BYTES == 4:
        return widen(words.to(DTYPE, bitcast=True), FLOAT)
    else:
        low, high = tl.split(tl.reshape(words, (words.shape[0] // 2, 2)))
        return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def words_of(values, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr):
    """Convert wide values to words: the inverse of :func:`elements_of`."""
    if ELEMENT_BYTES == 2:
        low, high = tl.split(values.to(DTYPE).to(tl.int16, bitcast=True))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    elif ELEMENT_BYTES == 4:
        return values.to(DTYPE).to(tl.int32, bitcast=True)
    else:
        return tl.reshape(tl.join(values.to(tl.int32), (values >> 32).to(tl.int32)), (values.shape[0] * 2,))


@triton.jit
def _reduce_cells(
    output, input, part_bytes, stride, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, PEERS: tl.constexpr, DISTINCT: tl.constexpr, CELLS: tl.constexpr, ONE: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    cells = (part_bytes + 3) // 4
    first = tl.program_id(0).to(tl.int64) * CELLS
    step = tl.num_programs(0) * CELLS
    tiles = 1 if ONE else tl.cdiv(cells - first, step)
    lanes = tl.arange(0, CELLS)

    for tile in range(tiles):
        index = first + tile * step + lanes
        there = cells_there(index, cells, WHOLE)
        if not DISTINCT:
            words = load_words(input, index, part_bytes, UNIT, ALIGNED, WHOLE)
        for turn in tl.static_range(1, N):
            if DISTINCT:
                peer = (rank + turn) % N
                words = load_words(input + peer * part_bytes, index, part_bytes, UNIT, ALIGNED, WHOLE)
            put_cells(slot(peers[turn], generation, rank, N), index, words, generation, there)

    # A barrier of threads: others may have read above the bytes that are written below.
    end_generation(p0, generation)
    turns = tl.arange(0, PEERS)[:, None]
    senders = (rank + 1 + turns) % N
    spent = tl.full((), 0, tl.int32)
    for tile in range(tiles):
        index = first + tile * step + lanes
        there = cells_there(index, cells, WHOLE)
        own = load_words(input + rank * stride, index, part_bytes, UNIT, ALIGNED, WHOLE)
        mask = there[None, :] if PEERS == N - 1 else (turns < N - 1) & there[None, :]
        words, spent = wait_for_cells(
            slot(p0, generation, 0, N), senders, index[None, :], mask, generation, board, spent
        )
        # Rows one by one, in the order of the ranks.
        senders_there = tl.where(turns < N - 1, senders, -1)
        result = _elements_from(0, senders_there, words, rank, own, DTYPE, ELEMENT_BYTES, FLOAT)
        for sender in tl.static_range(1, N):
            more = _elements_from(sender, senders_there, words, rank, own, DTYPE, ELEMENT_BYTES, FLOAT)
            result = accumulate(result, more, OP)
        result = words_of(finish(result, N, OP, FLOAT), DTYPE, ELEMENT_BYTES)
        store_words(output, index, result, part_bytes, there, UNIT, ALIGNED, WHOLE)


@triton.jit
def _elements_from(
    sender, senders, words, rank, own, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr
):
    """Return the wide elements of one sender, whose row of ``words`` is the sum over rows that are 0 but for it."""
    row = tl.sum(tl.where(senders == sender, words, 0), axis=0)
    return elements_of(tl.where(rank == sender, own, row), DTYPE, ELEMENT_BYTES, FLOAT)


KERNEL = _reduce_cells

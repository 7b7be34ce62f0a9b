# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_gather and all_to_all of few bytes, as cells: one pass, no handshake.

    rank 0   input -> cells into slot 0 of every peer | wait for cells in own slots -> output
    rank 1   input -> cells into slot 1 of every peer | wait for cells in own slots -> output

Equivalent, on rank r: ``output[s] = input of rank s`` (all_gather), ``output[s] = part r of the input of rank s``
(all_to_all). In place is allowed: a block sends all bytes that it overwrites before it writes.

Legend: N ranks, PEERS the power of two from N - 1 on, CELLS cells a tile, ONE if no block has more tiles, WHOLE if all
tiles are full.
"""

from __future__ import annotations

from sidelane.device.flags import end_generation, next_generation
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, cells_launch
from sidelane.device.memory import load_words, store_words
from sidelane.kernels.cells import cells_there, put_cells, slot, wait_for_cells


def arrange(site: LaunchSite, output: int, input: int, part_bytes: int, *, distinct: bool) -> Launch:
    """Make the launch that moves one part for each pair of ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of ``world_size`` parts.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        part_bytes: 1 to ``SLOT_PAYLOAD_BYTES``.
        distinct: each peer gets its own part (all_to_all), else all get the same (all_gather).

    Raises:
        ValueError: a part is too large or empty.
    """
    constants = {"DISTINCT": distinct}
    return cells_launch(KERNEL, site, output, input, part_bytes, distinct=distinct, constants=constants)


@triton.jit
def _exchange_cells(
    output, input, part_bytes, stride, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, PEERS: tl.constexpr, DISTINCT: tl.constexpr, CELLS: tl.constexpr, ONE: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
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
        own = load_words(input + rank * stride, index, part_bytes, UNIT, ALIGNED, WHOLE)
        for turn in tl.static_range(1, N):
            peer = (rank + turn) % N
            words = load_words(input + peer * stride, index, part_bytes, UNIT, ALIGNED, WHOLE) if DISTINCT else own
            put_cells(slot(peers[turn], generation, rank, N), index, words, generation, there)
        store_words(output + rank * part_bytes, index, own, part_bytes, there, UNIT, ALIGNED, WHOLE)

    # A barrier of threads: others may have read above the bytes that are written below.
    end_generation(p0, generation)
    turns = tl.arange(0, PEERS)[:, None]
    senders = (rank + 1 + turns) % N
    spent = tl.full((), 0, tl.int32)
    for tile in range(tiles):
        index = first + tile * step + lanes[None, :]
        there = cells_there(index, cells, WHOLE)
        mask = there if PEERS == N - 1 else (turns < N - 1) & there
        words, spent = wait_for_cells(slot(p0, generation, 0, N), senders, index, mask, generation, board, spent)
        store_words(output + senders * part_bytes, index, words, part_bytes, mask, UNIT, False, WHOLE)


KERNEL = _exchange_cells

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_gather and all_to_all of few bytes, as cells: one pass, no handshake.

    rank 0   input -> cells into slot 0 of every peer | wait for cells in own slots -> output
    rank 1   input -> cells into slot 1 of every peer | wait for cells in own slots -> output

Equivalent, on rank r: ``output[s] = input of rank s`` (all_gather), ``output[s] = part r of the input of rank s``
(all_to_all). In place is allowed: a block sends all bytes that it overwrites before it writes.

Legend: N ranks, R the power of two from N on, CELLS cells a tile.
"""

from __future__ import annotations

from sidelane.device.flags import end_generation, next_generation
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, cells_launch
from sidelane.device.memory import load_words, store_words
from sidelane.kernels.cells import put_cells, slot, wait_for_cells


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
    N: tl.constexpr, R: tl.constexpr, DISTINCT: tl.constexpr, CELLS: tl.constexpr, UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    cells = (part_bytes + 3) // 4
    first = tl.program_id(0).to(tl.int64) * CELLS
    step = tl.num_programs(0) * CELLS
    lanes = tl.arange(0, CELLS)

    start = first
    while start < cells:
        index = start + lanes
        own = load_words(input + rank * stride, index, part_bytes, UNIT, ALIGNED)
        for turn in tl.static_range(1, N):
            peer = (rank + turn) % N
            words = load_words(input + peer * stride, index, part_bytes, UNIT, ALIGNED) if DISTINCT else own
            put_cells(slot(peers[turn], generation, rank, N), index, words, generation, index < cells)
        store_words(output + rank * part_bytes, index, own, part_bytes, index < cells, UNIT, ALIGNED)
        start += step

    tl.debug_barrier()  # other threads may have read above the bytes that are written below
    senders = tl.arange(0, R)[:, None]
    spent = tl.full((), 0, tl.int32)
    start = first
    while start < cells:
        index = start + lanes[None, :]
        mask = (senders < N) & (senders != rank) & (index < cells)
        words, spent = wait_for_cells(slot(p0, generation, 0, N), senders, index, mask, generation, board, spent)
        store_words(output + senders * part_bytes, index, words, part_bytes, mask, UNIT, False)
        start += step
    end_generation(p0, generation)


KERNEL = _exchange_cells

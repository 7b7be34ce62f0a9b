# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""broadcast of few bytes, as cells.

    root    data -> cells into its slot on every peer | all here?
    others  wait for cells in the root's slot -> data | all here?

``all here``: each rank signals at its beginning that its kernel runs, and waits for the same signal of all, which has
usually come by then. The wait keeps ranks from running two generations ahead (``cells`` explains it): the root receives
no data.

Equivalent: ``data = data of the root``, on every rank.

Legend: N ranks; CELLS cells a tile; UNIT and ALIGNED as in ``memory``.
"""

from __future__ import annotations

import dataclasses

from sidelane.device.flags import addresses_of, end_generation, next_generation, relaxed_signal, relaxed_wait
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, cells_launch
from sidelane.device.memory import load_words, store_words
from sidelane.kernels.cells import cells_there, put_cells, slot, wait_for_cells


def arrange(site: LaunchSite, data: int, nbytes: int, root: int) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        data: address of the bytes, on this rank.
        nbytes: 1 to ``SLOT_PAYLOAD_BYTES``.
        root: rank whose bytes all ranks get.

    Raises:
        ValueError: there are too many bytes, or none.
    """
    launch = cells_launch(KERNEL, site, data, data, nbytes, distinct=False, constants={})
    return dataclasses.replace(launch, arguments=(*launch.arguments, root))


@triton.jit
def _broadcast_cells(
    output, input, nbytes, stride, rank, board,
    p0, p1, p2, p3, p4, p5, p6, p7, root,
    N: tl.constexpr, PEERS: tl.constexpr, CELLS: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(p0)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(addresses_of(peers, N), rank, generation, 0, N)
    cells = (nbytes + 3) // 4
    start = tl.program_id(0).to(tl.int64) * CELLS
    step = tl.num_programs(0) * CELLS
    if rank == root:
        lanes = tl.arange(0, CELLS)
        while start < cells:
            index = start + lanes
            there = cells_there(index, cells, WHOLE)
            words = load_words(input, index, nbytes, UNIT, ALIGNED, WHOLE)
            for turn in tl.static_range(1, N):
                put_cells(slot(peers[turn], generation, rank, N), index, words, generation, there)
            start += step
    else:
        sender = tl.zeros([1, 1], tl.int64) + root
        while start < cells:
            index = start + tl.arange(0, CELLS)[None, :]
            there = cells_there(index, cells, WHOLE)
            words, spent = wait_for_cells(slot(p0, generation, 0, N), sender, index, there, generation, board, spent)
            store_words(output, index, words, nbytes, there, UNIT, ALIGNED, WHOLE)
            start += step
    relaxed_wait(p0, generation, board, spent, 0, N)
    end_generation(p0, generation)


KERNEL = _broadcast_cells

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Cells: data that carries its own flag, so that it needs neither a fence nor a second message. Portable Triton.

A cell is an aligned word of 8 bytes, 4 of data below and the generation above. Hardware stores and loads such a word
at once, so a reader that finds the generation it waits for has found the data, too. Cells double the bytes on the link,
and are the quickest way for few of them. (The technique is NCCL's protocol "LL".)

A rank has two slots for each sender, for even and odd generations. Two are enough, however far ranks run ahead: a rank
writes generation g + 2 after its kernel of g + 1 has ended, so after it received something of g + 1 from every peer. A
peer sends that from its kernel of g + 1, which its stream starts when its kernel of g has ended. So whatever the peer
had to read of generation g, in the slot that g + 2 is written to, it has read. The argument asks two things of every
generation: that each rank waits for something from each peer, and that kernels of a rank never overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device import layout
from sidelane.device.flags import POLLS, say_who_is_late, told_to_give_up
from sidelane.device.memory import pointer

CELLS_OFFSET = tl.constexpr(layout.CELLS_OFFSET)
SLOT_BYTES = tl.constexpr(layout.SLOT_BYTES)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)


@triton.jit
def slot(arena, generation, sender, N: tl.constexpr):
    """Address of the slot for ``sender`` in an arena of N ranks."""
    return arena + CELLS_OFFSET + ((generation & 1) * N + sender).to(tl.int64) * SLOT_BYTES


@triton.jit
def put_cells(slot_address, index, words, generation, mask):
    """Send int32 ``words`` as cells ``index``. Relaxed: each cell arrives by itself, in any order."""
    cells = (generation.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    tl.store(pointer(slot_address, tl.int64, True) + index, cells, mask=mask)


@triton.jit
def wait_for_cells(slot_address, ranks, index, mask, generation, board, spent):
    """int32[R, C]: the data of cells ``index`` (int[1, C]) from ``ranks`` (int[R, 1]), once all have come.

    Relaxed: the data is here, and nothing is said about other memory. Elements outside of ``mask`` are undefined, and
    so is everything when the kernel was told to give up.

    Returns:
        The data, and ``spent`` (see ``flags``).
    """
    places = pointer(slot_address, tl.int64, True) + ranks.to(tl.int64) * (SLOT_BYTES // 8) + index
    cells = tl.load(places, mask=mask, other=0, volatile=True)
    late = _late(cells, mask, generation)
    polls = 0
    while (tl.max(late) != 0) & (spent == 0):
        cells = tl.load(places, mask=mask, other=0, volatile=True)
        late = _late(cells, mask, generation)
        polls += 1
        if polls % POLLS == 0:
            say_who_is_late(board, tl.reshape(ranks, late.shape), late, generation)
            spent = told_to_give_up(board)  # warps go on together: what is late they found out together
    return cells.to(tl.int32), spent


@triton.jit
def _late(cells, mask, generation):
    """int32[R]: 1 for each rank of which a cell is missing."""
    return tl.max((mask & ((cells >> 32).to(tl.int32) != generation)).to(tl.int32), axis=1)

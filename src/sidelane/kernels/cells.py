# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Cells: data with its own flag, which needs neither a fence nor a second message. Portable Triton.

A cell is an aligned word of 8 bytes: 4 low bytes of data and 4 high bytes of generation. Hardware stores and loads such
a word atomically, so that a reader that finds the awaited generation has found the data, too. Cells double the bytes on
the link, and are the fastest protocol for few bytes. (The technique is NCCL's protocol "LL".)

A rank has two slots for each sender, for even and odd generations. Two suffice, however far ranks run ahead. A rank
writes generation g + 2 after its kernel of g + 1 has ended, so after it received data of g + 1 from every peer. A peer
sends these from its kernel of g + 1, which its stream starts when its kernel of g has ended. So the peer has read all
data of generation g in the slot to which g + 2 is written. The argument has two conditions for every generation: each
rank waits for data from each peer, and the kernels of a rank never overlap.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flagged import cells_of
from sidelane.device.flags import POLLS, say_who_is_late, told_to_give_up
from sidelane.device.language import tl, triton
from sidelane.device.memory import pointer

CELLS_OFFSET = tl.constexpr(layout.CELLS_OFFSET)
SLOT_BYTES = tl.constexpr(layout.SLOT_BYTES)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)


@triton.jit
def slot(arena, generation, sender, N: tl.constexpr):
    """Return the address of the slot for ``sender`` in an arena of N ranks."""
    return arena + CELLS_OFFSET + ((generation & 1) * N + sender).to(tl.int64) * SLOT_BYTES


@triton.jit
def cells_there(index, cells, WHOLE: tl.constexpr):
    """Return which ``index`` are below ``cells``; with WHOLE all, which lets the compiler make wide accesses."""
    return tl.full(index.shape, True, tl.int1) if WHOLE else index < cells


@triton.jit
def put_cells(slot_address, index, words, generation, mask):
    """Send int32 ``words`` as cells ``index``. Relaxed: cells arrive in any order."""
    tl.store(pointer(slot_address, tl.int64, True) + index, cells_of(words, generation), mask=mask)


@triton.jit
def wait_for_cells(slot_address, ranks, index, mask, generation, board, spent):
    """Wait for cells ``index`` (int[1, C]) from ``ranks`` (int[R, 1]), and return their data, int32[R, C].

    Relaxed: other memory is not ordered. Elements outside of ``mask`` are undefined, and all are undefined if the host
    has told the kernel to give up.

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
            spent = told_to_give_up(board)  # the warps decide together: they computed late together
    return cells.to(tl.int32), spent


@triton.jit
def _late(cells, mask, generation):
    """Return 1 for each rank with a missing cell, int32[R]."""
    return tl.max((mask & ((cells >> 32).to(tl.int32) != generation)).to(tl.int32), axis=1)

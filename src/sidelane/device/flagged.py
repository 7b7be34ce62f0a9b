# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Flagged words, for kernels of one's own: four bytes of data that carry their own readiness. Portable Triton.

A word travels as a cell of 8 bytes, the data below and the generation above, which hardware stores and loads at once
(``kernels/cells.py``). No fence, no barrier, no second message: the quickest way for little data, at twice the bytes.

Cells are int64 in symmetric memory, zero before the first launch. A peer may be one launch ahead: so a sender has two
places, for even and odd generations (``cells.py`` says why two are enough, and what that asks of every launch).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device import layout
from sidelane.device.context import put_weak
from sidelane.device.flags import POLLS, say_who_is_late, told_to_give_up

BOARD = tl.constexpr(layout.BOARD)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)


@triton.jit
def put_flagged_relaxed(addresses, peer, index, words, generation, mask):
    """Send int32 words to a peer's cells. Relaxed: each arrives by itself, in any order, and orders nothing else."""
    cells = (generation.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    put_weak(addresses, peer, index, cells, mask)


@triton.jit
def wait_flagged_relaxed(context, cells, sender, index, mask, generation):
    """int32: the words that a peer has sent to cells of this rank, once all of them have come.

    Relaxed: these words are here, and nothing is said about other memory. Outside of the mask they are 0. They are
    undefined when the host has told the kernel to give up.

    Args:
        context: of the kernel.
        cells: pointer to int64: the place of this sender and generation.
        sender: who is late, if anybody is.
        index: int[W], of the cells.
        mask: int1[W].
        generation: of this launch.
    """
    board = tl.load(context + BOARD)
    found = tl.load(cells + index, mask=mask, other=0, volatile=True)
    late = _late(found, mask, generation)
    spent = tl.full((), 0, tl.int32)
    polls = 0
    while (late != 0) & (spent == 0):
        found = tl.load(cells + index, mask=mask, other=0, volatile=True)
        late = _late(found, mask, generation)
        polls += 1
        if polls % POLLS == 0:
            lane = tl.arange(0, MAX_RANKS)
            say_who_is_late(board, lane, ((lane == sender) & (late != 0)).to(tl.int32), generation)
            spent = told_to_give_up(board)
    return found.to(tl.int32)


@triton.jit
def wait_flagged_of_ranks_relaxed(context, cells, index, mask, generation):
    """int32[R, W]: as :func:`wait_flagged_relaxed`, words of all ranks at once: row r of ``index`` is what r has sent.

    Args:
        context: of the kernel.
        cells: pointer to int64.
        index: int[R, W], of the cells; R is a power of two, the number of ranks or more.
        mask: int1[R, W].
        generation: of this launch.
    """
    board = tl.load(context + BOARD)
    places = cells + index
    found = tl.load(places, mask=mask, other=0, volatile=True)
    # A loop that carried who is late, and not only whether anybody is, would be too much for Triton 3.6.
    missing = tl.max(_late_ranks(found, mask, generation))
    spent = tl.full((), 0, tl.int32)
    polls = 0
    while (missing != 0) & (spent == 0):
        found = tl.load(places, mask=mask, other=0, volatile=True)
        late = _late_ranks(found, mask, generation)
        missing = tl.max(late)
        polls += 1
        if polls % POLLS == 0:
            say_who_is_late(board, tl.arange(0, late.shape[0]), late, generation)
            spent = told_to_give_up(board)
    return found.to(tl.int32)


@triton.jit
def _late_ranks(found, mask, generation):
    return tl.max((mask & ((found >> 32).to(tl.int32) != generation)).to(tl.int32), axis=1)


@triton.jit
def _late(found, mask, generation):
    return tl.max((mask & ((found >> 32).to(tl.int32) != generation)).to(tl.int32))

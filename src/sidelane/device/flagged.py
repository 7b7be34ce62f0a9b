# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Flagged words for the user's own kernels: four bytes of data with the generation that marks them as ready.

A word is sent as a cell of 8 bytes, data in the low half and generation in the high half, which hardware stores and
loads atomically (``kernels/ll.py``). There is no fence, barrier or second message: the fastest way for few bytes, at
twice the traffic. Portable Triton.

Cells are int64 in symmetric memory, zero before the first launch. A peer may be one launch ahead. So a sender has two
places, for even and odd generations (``cells.py`` explains why two suffice, and the rule for every launch).
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.context import put_weak
from sidelane.device.flags import POLLS, abort_word, report_late
from sidelane.device.language import tl, triton

STATUS = tl.constexpr(layout.STATUS)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)


@triton.jit
def put_flagged_relaxed(addresses, peer, index, words, generation, mask, ALIGNED: tl.constexpr = False):
    """Send int32 words to a peer's cells. Relaxed: words arrive in any order, and order no other memory.

    ALIGNED: see ``put_weak``.
    """
    put_weak(addresses, peer, index, cells_of(words, generation), mask, ALIGNED)


@triton.jit
def store_flagged_relaxed(cells, index, words, generation, mask):
    """Give int32 words to other programs of this launch, in cells of this rank, as :func:`put_flagged_relaxed` does.

    They need one place only, not one for even and one for odd generations: launches of a rank do not overlap.
    """
    tl.store(cells + index, cells_of(words, generation), mask=mask)


@triton.jit
def wait_flagged_relaxed(context, cells, sender, index, mask, generation):
    """Wait for the words that a peer sends to cells of this rank, and return them, int32.

    Relaxed: other memory is not ordered. Outside of the mask the words are 0. They are undefined if the host has told
    the kernel to give up.

    Args:
        context: context of the kernel.
        cells: pointer to int64, the place of this sender and generation.
        sender: rank of the sender, to be named if it is late; -1 for programs of this launch, which are never named.
        index: indices of the cells, int[W].
        mask: cells to wait for, int1[W].
        generation: generation of this launch.
    """
    status = tl.load(context + STATUS)
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
            report_late(status, lane, ((lane == sender) & (late != 0)).to(tl.int32), generation)
            spent = abort_word(status)
    return found.to(tl.int32)


@triton.jit
def wait_flagged_of_ranks_relaxed(context, cells, index, mask, generation):
    """Wait for words of all ranks at once, and return them, int32[R, W]; see :func:`wait_flagged_relaxed`.

    Args:
        context: context of the kernel.
        cells: pointer to int64.
        index: indices of the cells, int[R, W], row r for sender r; R is a power of two, at least the number of ranks.
        mask: cells to wait for, int1[R, W].
        generation: generation of this launch.
    """
    status = tl.load(context + STATUS)
    places = cells + index
    found = tl.load(places, mask=mask, other=0, volatile=True)
    # The loop carries whether any rank is late, not which ones: Triton 3.6 cannot compile the latter.
    missing = tl.max(late_flags(found, mask, generation))
    spent = tl.full((), 0, tl.int32)
    polls = 0
    while (missing != 0) & (spent == 0):
        found = tl.load(places, mask=mask, other=0, volatile=True)
        late = late_flags(found, mask, generation)
        missing = tl.max(late)
        polls += 1
        if polls % POLLS == 0:
            report_late(status, tl.arange(0, late.shape[0]), late, generation)
            spent = abort_word(status)
    return found.to(tl.int32)


@triton.jit
def cells_of(words, generation):
    """Return int64 cells of int32 words: the words in the low halves, their generation in the high ones."""
    return (generation.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def late_flags(found, mask, generation):
    """Return 1 for each rank with a missing word, int32[R]."""
    return tl.max((mask & ((found >> 32).to(tl.int32) != generation)).to(tl.int32), axis=1)


@triton.jit
def _late(found, mask, generation):
    return tl.max((mask & ((found >> 32).to(tl.int32) != generation)).to(tl.int32))

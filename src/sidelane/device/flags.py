# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Generations and flags: how thread blocks with the same number meet across ranks. Portable Triton.

Legend: P = 8 lanes, one for each rank (``MAX_RANKS``); lanes beyond the ranks there are do nothing. Addresses are
64-bit integers; ``arenas`` are int64[P], in any order; ``rank`` is this kernel's. ``spent`` is 0 until the host has
told the kernel to give up; from then on no wait waits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from sidelane.device import layout

COUNTERS_OFFSET = tl.constexpr(layout.COUNTERS_OFFSET)
FLAGS_OFFSET = tl.constexpr(layout.FLAGS_OFFSET)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
WAITING = tl.constexpr(layout.WAITING)
MOST_AHEAD = tl.constexpr(8)
"""A power of two, more than the generations that a flag may be ahead: 1, or 3 where they begin anew. What looks further
ahead was not written for billions of generations."""

MOST_THREADS = tl.constexpr(1024)
"""Of a block: what as many lanes read, all of its threads have read."""

POLLS = tl.constexpr(32 if os.environ.get("TRITON_INTERPRET") == "1" else 8192)
"""Polls between two looks at the board: some milliseconds. All warps of a block look, across PCIe, and that traffic
holds up the fences of signals: with a look every 256 polls, one late rank made all others late (docs/lab/kernels.md).
The interpreter takes a thousand times as long for one."""


@triton.jit
def next_generation(arena):
    """The generation of this launch. Nothing but :func:`end_generation` may have been called since it began."""
    return generation_after(tl.load((arena + COUNTERS_OFFSET).to(tl.pointer_type(tl.int32)) + tl.program_id(0)))


@triton.jit
def generation_after(before):
    """That which follows: 2 behind 2**32 - 1."""
    return tl.where(before == -1, 2, before + 1)


@triton.jit
def end_generation(arena, generation):
    """Make ``generation`` that of the past, for this block and for those with its number modulo the blocks there are.

    The last act of a block: what follows it in its stream may rely on it, and nothing else may.
    """
    tl.debug_barrier()
    block = tl.arange(0, MAX_BLOCKS)
    counters = (arena + COUNTERS_OFFSET).to(tl.pointer_type(tl.int32)) + block
    tl.store(counters, generation, mask=block % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def addresses_of(peers, N: tl.constexpr):
    """int64[P]: the addresses in the tuple ``peers`` (the first N of them) as a tensor."""
    lane = tl.arange(0, MAX_RANKS)
    addresses = tl.zeros([MAX_RANKS], tl.int64)
    for index in tl.static_range(N):
        addresses = tl.where(lane == index, peers[index], addresses)
    return addresses


@triton.jit
def address_of(addresses, index, N: tl.constexpr):
    """That of the tuple's first N addresses which has this index."""
    return tl.sum(tl.where(tl.arange(0, MAX_RANKS) == index, addresses_of(addresses, N), 0))


@triton.jit
def signal(arenas, rank, generation, phase, N: tl.constexpr):
    """Tell the block with this number, on each of N ranks, that this rank has come to ``phase`` of ``generation``.

    Releases at system scope: whoever sees the flag in a :func:`wait` sees all that this block has read and written.
    """
    # The release is one thread's; the barrier puts the accesses of all threads in front of it.
    tl.debug_barrier()
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arenas, phase) + rank
    tl.atomic_xchg(flags, tl.zeros([MAX_RANKS], tl.int32) + generation, mask=lane < N, sem="release", scope="sys")


@triton.jit
def relaxed_signal(arenas, rank, generation, PHASE: tl.constexpr, N: tl.constexpr):
    """As :func:`signal`, but orders nothing: for a peer that only needs to know that this kernel runs."""
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arenas, PHASE) + rank
    tl.atomic_xchg(flags, tl.zeros([MAX_RANKS], tl.int32) + generation, mask=lane < N, sem="relaxed", scope="sys")


@triton.jit
def wait(arena, generation, board, spent, phase, N: tl.constexpr):
    """Wait until each of N ranks has come to ``phase`` of ``generation``, or of the next one (in a circle of 2**32).

    Acquires at system scope, for all threads of the block.

    Returns:
        ``spent``, not 0 if the host has told the kernel to give up.
    """
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), phase) + lane
    return wait_for_words(flags, lane < N, generation, board, spent, MOST_AHEAD)


@triton.jit
def wait_for_rank(arena, sender, generation, board, spent, phase):
    """As :func:`wait`, for one rank."""
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), phase) + lane
    return wait_for_words(flags, lane == sender, generation, board, spent, MOST_AHEAD)


@triton.jit
def relaxed_wait(arena, generation, board, spent, PHASE: tl.constexpr, N: tl.constexpr):
    """As :func:`wait`, but acquires nothing, and warps go on one by one: for a block that only needs to know that the
    kernels of all ranks run, and does nothing after it but end.
    """
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), PHASE) + lane
    _poll(flags, lane < N, generation, board, spent, MOST_AHEAD)


@triton.jit
def wait_for_words(flags, mask, generation, board, spent, AHEAD: tl.constexpr, COUNTS: tl.constexpr = False):
    """Wait until the word of each rank in ``mask`` is ``generation``, or less than AHEAD beyond it.

    Acquires at system scope, for all threads of the block. ``flags`` are pointers[P], of each rank; AHEAD is a power of
    two. COUNTS: words are sums, of which 0 is one like any other; of generations it is none.

    Returns:
        As :func:`wait`.
    """
    spent = _poll(flags, mask, generation, board, spent, AHEAD, COUNTS)
    # Loads find out when; the addition of 0 acquires. Each warp has polled for itself, so that some may have been told
    # to give up and others not: what decides from here on is the same for all, since they meet at barriers.
    missing = tl.max(_late(_acquire(flags, mask), mask, generation, AHEAD, COUNTS))
    while missing != 0:
        missing = tl.max(_late(_acquire(flags, mask), mask, generation, AHEAD, COUNTS))
        told = told_to_give_up(board)
        missing = tl.where(told != 0, 0, missing)
        spent = tl.where(told != 0, told, spent)
    tl.debug_barrier()
    return spent


@triton.jit
def _poll(flags, mask, generation, board, spent, AHEAD: tl.constexpr, COUNTS: tl.constexpr = False):
    """Load until nobody is late; not 0 if the host has told this warp to give up."""
    lane = tl.arange(0, MAX_RANKS)
    missing = tl.max(_late(tl.load(flags, mask=mask, other=0, volatile=True), mask, generation, AHEAD, COUNTS))
    polls = 0
    while (missing != 0) & (spent == 0):
        late = _late(tl.load(flags, mask=mask, other=0, volatile=True), mask, generation, AHEAD, COUNTS)
        missing = tl.max(late)
        polls += 1
        if polls % POLLS == 0:
            say_who_is_late(board, lane, late, generation)
            spent = tl.load(board.to(tl.pointer_type(tl.int32)), volatile=True)
    return spent


@triton.jit
def say_who_is_late(board, ranks, late, generation):
    """Write on the board which of ``ranks`` are late."""
    words = board.to(tl.pointer_type(tl.int32)) + WAITING
    tl.store(words + ranks, tl.zeros_like(late) + generation, mask=late != 0)


@triton.jit
def told_to_give_up(board):
    """What the host has said, 0 for going on, the same for all threads of a block: each reads it, and the largest value
    counts.
    """
    return tl.max(tl.load(board.to(tl.pointer_type(tl.int32)) + tl.zeros([MOST_THREADS], tl.int32), volatile=True))


@triton.jit
def _flags(arenas, phase):
    place = FLAGS_OFFSET + 4 * MAX_RANKS * (phase * MAX_BLOCKS + tl.program_id(0))
    return (arenas + place).to(tl.pointer_type(tl.int32))


@triton.jit
def _acquire(flags, mask):
    return tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def _late(words, mask, generation, AHEAD: tl.constexpr, COUNTS: tl.constexpr):
    """int32[P]: 1 for each rank that has not come. What is far ahead is old, and 0 is no generation."""
    late = ((words - generation) & -AHEAD) != 0
    if not COUNTS:
        late = late | (words == 0)
    return (mask & late).to(tl.int32)

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Generations and flags: synchronization of thread blocks with the same number on all ranks. Portable Triton.

Legend: P = 8 lanes, one for each rank (``MAX_RANKS``); lanes beyond the number of ranks do nothing. Addresses are
64-bit integers; ``arenas`` are int64[P], in any order; ``rank`` is the rank of this kernel. ``spent`` is 0 until the
host has asked the kernel to give up; from then on waits return at once.
"""

from __future__ import annotations

import os

from sidelane.device import layout
from sidelane.device.language import is_nvidia, tl, triton

FLAGS_OFFSET = tl.constexpr(layout.FLAGS_OFFSET)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
WAITING = tl.constexpr(layout.WAITING)
MOST_AHEAD = tl.constexpr(8)
"""Bound of the generations by which a flag may be ahead (1, or 3 at the wrap-around): a power of two. A flag that looks
further ahead was last written billions of generations ago."""

MOST_THREADS = tl.constexpr(1024)
"""Largest number of threads of a block: a load of as many lanes is made by all of its threads."""

ACQUIRING_POLLS = tl.constexpr(64)
"""Polls of a wait that acquire. Those behind them are plain loads, and one more load acquires."""

POLLS = tl.constexpr(32 if os.environ.get("TRITON_INTERPRET") == "1" else 8192)
"""Polls between two loads of the abort word: some milliseconds. All warps of a block load it, over PCIe, which
delays the fences of signals: with a load every 256 polls, one late rank made all others late
(results/notes/kernels.md). A poll takes the interpreter a thousand times as long."""


@triton.jit
def next_generation(counters):
    """Return the generation of this launch. Call it before :func:`end_generation` of this launch.

    ``counters``: address of the generation of each thread block (``LaunchSite.counters``).
    """
    return generation_after(tl.load(counters.to(tl.pointer_type(tl.int32)) + tl.program_id(0)))


@triton.jit
def generation_after(before):
    """Return the generation that follows another one: 2 follows 2**32 - 1."""
    return tl.where(before == -1, 2, before + 1)


@triton.jit
def end_generation(counters, generation):
    """End ``generation`` for this block, and for those with its number modulo the number of blocks of this launch.

    It is the last act of a block: only later work of the stream may rely on it.
    """
    tl.debug_barrier()
    block = tl.arange(0, MAX_BLOCKS)
    places = counters.to(tl.pointer_type(tl.int32)) + block
    tl.store(places, generation, mask=block % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def addresses_of(peers, N: tl.constexpr):
    """Return the first N addresses of the tuple ``peers`` as a tensor, int64[P]."""
    lane = tl.arange(0, MAX_RANKS)
    addresses = tl.zeros([MAX_RANKS], tl.int64)
    for index in tl.static_range(N):
        addresses = tl.where(lane == index, peers[index], addresses)
    return addresses


@triton.jit
def address_of(addresses, index, N: tl.constexpr):
    """Return the address with an index among the first N of a tuple."""
    return tl.sum(tl.where(tl.arange(0, MAX_RANKS) == index, addresses_of(addresses, N), 0))


@triton.jit
def signal(arenas, rank, generation, phase, N: tl.constexpr):
    """Signal the block with this number, on each of N ranks, that this rank has reached ``phase`` of ``generation``.

    Releases at system scope: a block that sees the flag in a :func:`wait` sees all earlier accesses of this block.
    """
    # One thread releases; the barrier orders the accesses of all threads before it.
    tl.debug_barrier()
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arenas, phase, tl.program_id(0)) + rank
    tl.atomic_xchg(flags, tl.zeros([MAX_RANKS], tl.int32) + generation, mask=lane < N, sem="release", scope="sys")


@triton.jit
def signal_blocks(
    arenas, rank, generation, phase, block, step, N: tl.constexpr, BLOCKS: tl.constexpr, STORED: tl.constexpr
):
    """Signal the BLOCKS blocks ``block``, ``block + step``, ... on each of N ranks as :func:`signal` does, by stores to
    arenas in host memory.

    On NVIDIA's GPUs one warp fences, and stores: fences of system scope wait for each other, 1.4 us each, and an atomic
    operation crosses PCIe and back. Each block has a word of its own: loads of one word wait for each other as well
    (results/notes/kernels.md). ``STORED``: the peers wait for bytes that this block has stored; False: they wait until
    bytes are loaded here. Then there is no fence: all threads have stored what they have loaded, so that their loads
    have been performed.
    """
    tl.debug_barrier()
    lane = tl.arange(0, MAX_RANKS)
    values = tl.zeros([MAX_RANKS], tl.int32) + generation
    if is_nvidia() and STORED:
        assembly: tl.constexpr = """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.lt.u32 first, thread, 32;
            @first fence.acq_rel.sys;
            mov.u32 $0, $1;
            }"""
        values = tl.inline_asm_elementwise(assembly, "=r,r", [values], dtype=tl.int32, is_pure=False, pack=1)
    for turn in tl.static_range(BLOCKS):
        flags = _flags(arenas, phase, block + turn * step) + rank
        if is_nvidia():
            tl.store(flags, values, mask=lane < N)
        else:
            tl.atomic_xchg(flags, values, mask=lane < N, sem="release", scope="sys")


@triton.jit
def wait_for_block(arena, senders, generation, status, spent, phase, block):
    """Wait for signals of :func:`signal_blocks` as :func:`wait` does, of the ranks in the mask ``senders``, int1[P].

    On NVIDIA's GPUs one warp loads the words, since each load crosses PCIe, and acquires.
    """
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), phase, block) + lane
    if is_nvidia():
        missing, polls = 1, 0
        while (missing != 0) & (spent == 0):
            words = _load_by_first_warp(flags, senders, generation, "volatile")
            late = _late(words, senders, generation, MOST_AHEAD, False)
            missing = tl.max(late)
            polls += 1
            if polls % POLLS == 0:
                report_late(status, lane, late, generation)
                spent = tl.load(status.to(tl.pointer_type(tl.int32)), volatile=True)
        _load_by_first_warp(flags, senders, generation, "acquire.sys")
        tl.debug_barrier()
        return spent
    return wait_for_words(flags, senders, generation, status, spent, MOST_AHEAD)


@triton.jit
def _load_by_first_warp(pointers, mask, generation, ORDER: tl.constexpr):
    """Return words that the first warp of a block loads; other warps, and other lanes, get ``generation``."""
    others = tl.zeros([MAX_RANKS], tl.int32) + generation
    return tl.inline_asm_elementwise(
        """{
        .reg .pred there;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 there, thread, 32;
        setp.ne.and.s32 there, $2, 0, there;
        mov.u32 $0, $3;
        @there ld."""
        + ORDER
        + """.global.u32 $0, [$1];
        }""",
        "=&r,l,r,r",
        [pointers, mask.to(tl.int32), others],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def relaxed_signal(arenas, rank, generation, PHASE: tl.constexpr, N: tl.constexpr):
    """Signal as :func:`signal` does, without ordering memory, for a peer that only waits for this kernel to run."""
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arenas, PHASE, tl.program_id(0)) + rank
    tl.atomic_xchg(flags, tl.zeros([MAX_RANKS], tl.int32) + generation, mask=lane < N, sem="relaxed", scope="sys")


@triton.jit
def wait(arena, generation, status, spent, phase, N: tl.constexpr):
    """Wait until each of N ranks has reached ``phase`` of ``generation``, or of the next one (modulo 2**32).

    Acquires at system scope, for all threads of the block.

    Returns:
        ``spent``, not 0 if the host has asked the kernel to give up.
    """
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), phase, tl.program_id(0)) + lane
    return wait_for_words(flags, lane < N, generation, status, spent, MOST_AHEAD)


@triton.jit
def wait_for_rank(arena, sender, generation, status, spent, phase):
    """Wait as :func:`wait` does, for one rank."""
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), phase, tl.program_id(0)) + lane
    return wait_for_words(flags, lane == sender, generation, status, spent, MOST_AHEAD)


@triton.jit
def relaxed_wait(arena, generation, status, spent, PHASE: tl.constexpr, N: tl.constexpr):
    """Wait as :func:`wait` does, without acquiring; warps go on one by one.

    It is for a block that only needs to know that the kernels of all ranks run, and that ends after it.
    """
    lane = tl.arange(0, MAX_RANKS)
    flags = _flags(arena + tl.zeros([MAX_RANKS], tl.int64), PHASE, tl.program_id(0)) + lane
    _poll(flags, lane < N, generation, status, spent, MOST_AHEAD)


@triton.jit
def wait_for_words(flags, mask, generation, status, spent, AHEAD: tl.constexpr, COUNTS: tl.constexpr = False):
    """Wait until the word of each rank in ``mask`` is ``generation``, or less than AHEAD beyond it.

    Acquires at system scope, for all threads of the block. ``flags`` are pointers[P] to the words of the ranks; AHEAD
    is a power of two. COUNTS: words are sums, for which 0 is valid; for generations 0 means never signalled.

    Returns:
        ``spent``, not 0 if the host has asked the kernel to give up.
    """
    if is_nvidia():
        spent = _poll_acquire(flags, mask, generation, status, spent, AHEAD, COUNTS)
        tl.debug_barrier()  # each thread has acquired what some rank wrote; from here on all have
        return spent
    spent = _poll(flags, mask, generation, status, spent, AHEAD, COUNTS)
    # Plain loads poll; the addition of 0 acquires. Each warp has polled for itself, so that some may have been abort to
    # give up and others not. From here on all warps decide by the same values, since they meet at barriers.
    missing = tl.max(_late(_acquire(flags, mask), mask, generation, AHEAD, COUNTS))
    while missing != 0:
        missing = tl.max(_late(_acquire(flags, mask), mask, generation, AHEAD, COUNTS))
        abort = abort_word(status)
        missing = tl.where(abort != 0, 0, missing)
        spent = tl.where(abort != 0, abort, spent)
    tl.debug_barrier()
    return spent


@triton.jit
def _poll(flags, mask, generation, status, spent, AHEAD: tl.constexpr, COUNTS: tl.constexpr = False):
    """Load the words until no rank is late. Return ``spent``, not 0 if the host has asked this warp to give up."""
    lane = tl.arange(0, MAX_RANKS)
    missing = tl.max(_late(tl.load(flags, mask=mask, other=0, volatile=True), mask, generation, AHEAD, COUNTS))
    polls = 0
    while (missing != 0) & (spent == 0):
        late = _late(tl.load(flags, mask=mask, other=0, volatile=True), mask, generation, AHEAD, COUNTS)
        missing = tl.max(late)
        polls += 1
        if polls % POLLS == 0:
            report_late(status, lane, late, generation)
            spent = tl.load(status.to(tl.pointer_type(tl.int32)), volatile=True)
    return spent


@triton.jit
def _poll_acquire(flags, mask, generation, status, spent, AHEAD: tl.constexpr, COUNTS: tl.constexpr):
    """Poll as :func:`_poll` does, and acquire at system scope by a load instead of an atomic operation.

    It saves 0.2 to 0.4 us a wait (results/notes/kernels.md): an atomic operation begins only when a plain load has
    found the flag. A load that acquires drops what the unit has cached, which may slow down other kernels there, so
    that few of them are made.
    """
    missing = 1
    polls = 0
    while (missing != 0) & (polls < ACQUIRING_POLLS) & (spent == 0):
        missing = tl.max(_late(_load_acquire(flags, mask), mask, generation, AHEAD, COUNTS))
        polls += 1
    if missing != 0:
        spent = _poll(flags, mask, generation, status, spent, AHEAD, COUNTS)
        _load_acquire(flags, mask)
    return spent


@triton.jit
def _load_acquire(pointers, mask):
    """Load words with acquire semantics at system scope, by every thread that has any; 0 outside of the mask."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred there;
        setp.ne.s32 there, $2, 0;
        mov.u32 $0, 0;
        @there ld.acquire.sys.global.u32 $0, [$1];
        }""",
        "=&r,l,r",
        [pointers, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def report_late(status, ranks, late, generation):
    """Write to the status words which of ``ranks`` are late."""
    words = status.to(tl.pointer_type(tl.int32)) + WAITING
    tl.store(words + ranks, tl.zeros_like(late) + generation, mask=late != 0)


@triton.jit
def abort_word(status):
    """Return the abort word of the host, 0 to go on, the same for all threads of a block.

    Each thread loads it, and the largest value counts.
    """
    return tl.max(tl.load(status.to(tl.pointer_type(tl.int32)) + tl.zeros([MOST_THREADS], tl.int32), volatile=True))


@triton.jit
def _flags(arenas, phase, block):
    place = FLAGS_OFFSET + 4 * MAX_RANKS * (phase * MAX_BLOCKS + block)
    return (arenas + place).to(tl.pointer_type(tl.int32))


@triton.jit
def _acquire(flags, mask):
    return tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def _late(words, mask, generation, AHEAD: tl.constexpr, COUNTS: tl.constexpr):
    """Return 1 for each rank that is late, int32[P]. A word far ahead is an old one, and 0 is no generation."""
    late = ((words - generation) & -AHEAD) != 0
    if not COUNTS:
        late = late | (words == 0)
    return (mask & late).to(tl.int32)

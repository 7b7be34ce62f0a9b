# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Operations of kernels with ranks of other nodes: they hand slices to the proxy, and wait for what has arrived.

A kernel has two contexts: that of ``sidelane.device.context`` for the ranks of its node, to which it stores, and a
*far context* (``ring``), a pointer to int64. ``generation`` is that of the first one. Portable Triton.

Words in host memory are polled by plain loads. An atomic operation of a GPU there could undo a store of the host, so
what acquires is one on a word of the device's own memory behind the polls: it makes this program's later accesses come
after it, as the fence that it contains orders all memory.
"""

from __future__ import annotations

from sidelane.device import context, flags, layout
from sidelane.device.triton_language import tl, triton
from sidelane.ops.scale_out import ring

MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
POLLS = tl.constexpr(int(flags.POLLS))
MOST_AHEAD = tl.constexpr(int(context.MOST_AHEAD))
ABORT = tl.constexpr(layout.ABORT)
RING = tl.constexpr(ring.RING)
HEAD = tl.constexpr(ring.HEAD)
CAPACITY = tl.constexpr(ring.CAPACITY)
OPENED = tl.constexpr(ring.OPENED)
DONE = tl.constexpr(ring.DONE)
FLAGS = tl.constexpr(ring.FLAGS)
NUMBER = tl.constexpr(ring.NUMBER)
RANKS = tl.constexpr(ring.RANKS)
BOARD = tl.constexpr(ring.BOARD)
NEARS = tl.constexpr(ring.NEARS)
TAIL = tl.constexpr(ring.TAIL)
STOP = tl.constexpr(ring.STOP)
ENTRIES = tl.constexpr(ring.ENTRIES)
ENTRY_WORDS = tl.constexpr(ring.ENTRY_WORDS)
SEQUENCE = tl.constexpr(ring.SEQUENCE)
HANDLE = tl.constexpr(ring.HANDLE)
EPOCH = tl.constexpr(ring.EPOCH)
TARGET = tl.constexpr(ring.TARGET)
FLAG = tl.constexpr(ring.FLAG)
SOURCE = tl.constexpr(ring.SOURCE)
PLACE = tl.constexpr(ring.PLACE)
SHAPE = tl.constexpr(ring.SHAPE)
END = tl.constexpr(ring.END)


@triton.jit
def near_of(far, rank):
    """Return the number of a rank on this node, int32; -1 if it is on another one."""
    return tl.load(tl.load(far + NEARS).to(tl.pointer_type(tl.int32)) + rank)


@triton.jit
def open_release(far, generation):
    """Let ranks of other nodes write into this rank's output in this generation: all earlier work has ended.

    Releases at system scope. One program of a launch calls it.
    """
    tl.debug_barrier()
    word = tl.load(far + OPENED).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, generation, sem="release", scope="sys")


@triton.jit
def send_release(far, generation, target, flag, source, place, rows, columns):
    """Hand a slice to the proxy, behind all accesses of this program and those that it has acquired; return its ticket.

    It waits for room in the ring.

    Args:
        far: far context of the kernel.
        generation: generation of this launch.
        target: rank that gets the slice.
        flag: number of its flag there; -1 for none.
        source: first element of the slice in the send buffer, where it is contiguous.
        place: first element in the output of the target.
        rows: number of rows, which lie apart there by the stride of the handle.
        columns: number of elements of a row.
    """
    tl.debug_barrier()
    entries = tl.load(far + RING).to(tl.pointer_type(tl.int64))
    head = tl.load(far + HEAD).to(tl.pointer_type(tl.int64))
    capacity = tl.load(far + CAPACITY)
    ticket = tl.atomic_add(head, 1, sem="acq_rel", scope="sys")
    _wait_for_tail(far, entries, ticket - capacity + 1)
    wide = tl.full((), 0, tl.int64)
    entry = entries + ENTRIES + ticket % capacity * ENTRY_WORDS
    tl.store(entry + HANDLE, tl.load(far + NUMBER))
    tl.store(entry + EPOCH, wide + generation)
    tl.store(entry + TARGET, wide + target)
    tl.store(entry + FLAG, wide + flag)
    tl.store(entry + SOURCE, wide + source)
    tl.store(entry + PLACE, wide + place)
    tl.store(entry + SHAPE, ((wide + rows) << 32) + columns)
    tl.debug_barrier()
    tl.atomic_xchg(entry + SEQUENCE, ticket + 1, sem="release", scope="sys")
    return ticket


@triton.jit
def finish_acq_rel(far, generation):
    """End the sends of this launch, and wait until they have left and all ranks of other nodes have ended theirs.

    The last program of a launch calls it, once it has acquired the others' sends. Acquires at system scope: later work
    sees all slices of this generation that other nodes have sent.
    """
    ranks = tl.load(far + RANKS).to(tl.int32)
    if ranks > 0:
        ticket = send_release(far, generation, END, -1, 0, 0, 0, 0)
        entries = tl.load(far + RING).to(tl.pointer_type(tl.int64))
        done = tl.load(far + DONE).to(tl.pointer_type(tl.int32))
        nears = tl.load(far + NEARS).to(tl.pointer_type(tl.int32))
        lane = tl.arange(0, MAX_RANKS)
        for first in range(0, ranks, MAX_RANKS):
            there = first + lane < ranks
            is_far = tl.load(nears + first + lane, mask=there, other=0) < 0
            _wait_for_words(far, entries, done + first + lane, is_far, generation)
        _wait_for_tail(far, entries, ticket + 1)
        _acquire(far)


@triton.jit
def wait_slice_acquire(far, flag, generation):
    """Wait for a slice that a rank of another node sends in this generation. Acquires at system scope.

    A kernel that does so must leave room on the GPU for those of the transport (``transport``).
    """
    entries = tl.load(far + RING).to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, MAX_RANKS)
    words = tl.load(far + FLAGS).to(tl.pointer_type(tl.int32)) + flag + lane
    _wait_for_words(far, entries, words, lane == 0, generation)
    _acquire(far)


@triton.jit
def _wait_for_tail(far, entries, wanted):
    late = tl.load(entries + TAIL, volatile=True) < wanted
    polls = 0
    while late:
        late = tl.load(entries + TAIL, volatile=True) < wanted
        polls += 1
        if polls % POLLS == 0:
            late = late & _goes_on(far, entries)
    tl.debug_barrier()


@triton.jit
def _wait_for_words(far, entries, words, mask, generation):
    late = _is_late(words, mask, generation)
    polls = 0
    while late:
        late = _is_late(words, mask, generation)
        polls += 1
        if polls % POLLS == 0:
            late = late & _goes_on(far, entries)
    tl.debug_barrier()


@triton.jit
def _is_late(words, mask, generation):
    """Return whether a word has not reached this generation, as ``context`` compares them."""
    found = tl.load(words, mask=mask, other=0, volatile=True)
    late = mask & ((((found - generation) & -MOST_AHEAD) != 0) | (found == 0))
    return tl.max(late.to(tl.int32)) != 0


@triton.jit
def _goes_on(far, entries):
    """Return False once the host has told this rank's kernels to give up, by the board or by the ring."""
    board = tl.load(far + BOARD).to(tl.pointer_type(tl.int32))
    return (tl.load(entries + STOP, volatile=True) == 0) & (tl.load(board + ABORT, volatile=True) == 0)


@triton.jit
def _acquire(far):
    head = tl.load(far + HEAD).to(tl.pointer_type(tl.int64))
    tl.atomic_add(head, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()

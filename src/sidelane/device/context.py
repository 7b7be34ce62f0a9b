# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""What a kernel of one's own does with its peers: put, get, signal, wait and barrier, among any grids. Portable Triton.

``Communicator.load_kernel`` gives such a kernel its first argument, the *context*: a pointer to int64 in the memory of
the device (``layout``), which says who is who and where the flags of this kernel are. ``Communicator.peers`` gives the
addresses of a tensor on all ranks, as int64[N] on the device::

    @triton.jit
    def to_next_rank(context, inboxes, data, SIZE: tl.constexpr):
        generation = begin(context)                              # first
        next = (rank_of(context) + 1) % world_size_of(context)
        offsets = tl.arange(0, SIZE)
        barrier_acq_rel(context, 0, generation)                  # the inboxes are free
        put_weak(inboxes, next, offsets, tl.load(data + offsets))
        barrier_acq_rel(context, 1, generation)                  # all bytes are there
        end(context, generation)                                 # last

A flag is named by its number and its sender: every rank has its own word of each. One launch signals a word at most
once, and waits for it where the sender's launch of the same generation signals it. Programs of one grid may share the
numbers among them as they like, most simply by ``flag = phase * programs + program``; nothing else limits the grid. A
kernel that waits for others needs all of its programs on the GPU at a time: no more than fit.

Generations count the launches of this kernel, eager and replayed, so that no flag is ever reset. They are words of 32
bits, compared on the circle: what is waited for must have been signalled at some time in the last three billion
launches.

When the host has been told that a peer does not come (docs/internals/failure.md), waits pass, and what was moved is
garbage.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device import layout
from sidelane.device.flags import generation_after, wait_for_words

MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
RANK = tl.constexpr(layout.RANK)
WORLD_SIZE = tl.constexpr(layout.WORLD_SIZE)
BOARD = tl.constexpr(layout.BOARD)
FLAG_COUNT = tl.constexpr(layout.FLAG_COUNT)
REGIONS = tl.constexpr(layout.REGIONS)
GENERATION = tl.constexpr(layout.GENERATION)
FINISHED = tl.constexpr(layout.FINISHED)
REGION_FLAGS_OFFSET = tl.constexpr(layout.REGION_FLAGS_OFFSET)
MOST_AHEAD = tl.constexpr(1 << 30)
"""A power of two, more than the launches by which a peer may be ahead."""


@triton.jit
def rank_of(context):
    """int32: this rank."""
    return tl.load(context + RANK).to(tl.int32)


@triton.jit
def world_size_of(context):
    """int32: how many ranks there are."""
    return tl.load(context + WORLD_SIZE).to(tl.int32)


@triton.jit
def begin(context):
    """int32: the generation of this launch, the same on all ranks. The first act of every program of the grid."""
    return generation_after(tl.load(_own_words(context) + GENERATION))


@triton.jit
def end(context, generation):
    """Let this launch be over when all programs of the grid have come here. The last act of each of them.

    Releases and acquires on this GPU: the next launch finds what all programs of this one have done.
    """
    tl.debug_barrier()
    words = _own_words(context)
    before = tl.atomic_add(words + FINISHED, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1:
        tl.store(words + FINISHED, 0)
        tl.store(words + GENERATION, generation)


@triton.jit
def begin_of(counters):
    """As :func:`begin`, one load away where that takes three: ``counters`` are those of the kernel
    (``OwnKernel.counters``), one more argument of the launch.
    """
    return generation_after(tl.load(counters + GENERATION))


@triton.jit
def end_relaxed(counters, generation):
    """As :func:`end`, but orders nothing, and need not be last: a program may go on behind it. Its threads meet here.

    Why that is enough. Two things ask for the generation. The programs of this launch: each of them has come here with
    its own, since a load in front of a barrier of threads has its value when the barrier lets them pass (PTX ISA,
    ``barrier``: "performed"), and the last one to count itself stores the next generation because all others have
    counted themselves. The next launch: its stream, or an event, starts it behind the last act of this one, and makes
    all of it visible, with what follows here. So nothing but the load in :func:`begin` has to come before the count,
    and nobody waits for stores that are on their way to peers.

    ``counters``: as of :func:`begin_of`. A kernel whose programs look at each other's results through ``end`` needs
    that one; between launches nobody does.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counters + FINISHED, 1, sem="relaxed", scope="gpu")
    if before == tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1:
        tl.store(counters + FINISHED, 0)
        tl.store(counters + GENERATION, generation)


@triton.jit
def peer_pointer(addresses, peer, DTYPE: tl.constexpr, ALIGNED: tl.constexpr = False):
    """A pointer to a peer's tensor.

    Args:
        addresses: from ``Communicator.peers``.
        peer: which.
        DTYPE: of the elements.
        ALIGNED: promises that it is a multiple of 16 bytes, for wide accesses.
    """
    pointer = tl.load(addresses + peer).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def put_weak(addresses, peer, offsets, values, mask=None, ALIGNED: tl.constexpr = False):
    """Store values into a peer's tensor. Weak: a :func:`signal_release` behind it, and a wait there, order it.

    ``offsets`` and ``mask`` are of elements; the type of ``values`` is the tensor's. Else see :func:`peer_pointer`.
    """
    tl.store(peer_pointer(addresses, peer, values.dtype, ALIGNED) + offsets, values, mask=mask)


@triton.jit
def get_weak(addresses, peer, offsets, DTYPE: tl.constexpr, mask=None, ALIGNED: tl.constexpr = False):
    """Load values from a peer's tensor. Weak: a :func:`wait_acquire` in front of it orders it behind the peer's stores.

    Arguments as of :func:`put_weak`.
    """
    return tl.load(peer_pointer(addresses, peer, DTYPE, ALIGNED) + offsets, mask=mask)


@triton.jit
def put_signal_release(
    context, addresses, peer, offsets, values, flag, generation, mask=None, ALIGNED: tl.constexpr = False
):
    """Store values into a peer's tensor, then set this rank's word of a flag there.

    Releases at system scope: whoever waits for the flag sees these values, of all threads, and all that this program
    has done before. Arguments as of :func:`put_weak` and :func:`signal_release`.
    """
    put_weak(addresses, peer, offsets, values, mask, ALIGNED)
    signal_release(context, peer, flag, generation)


@triton.jit
def signal_release(context, peer, flag, generation):
    """Set this rank's word of a flag of a peer.

    Releases at system scope: whoever waits for it sees all that this program has read and written before.
    """
    _signal(context, tl.arange(0, MAX_RANKS) == peer, flag, generation)


@triton.jit
def wait_acquire(context, peer, flag, generation):
    """Wait until a peer has signalled a flag of this rank, in this generation or a later one.

    Acquires at system scope, for all threads of the program.
    """
    _wait(context, tl.arange(0, MAX_RANKS) == peer, flag, generation)


@triton.jit
def barrier_acq_rel(context, flag, generation):
    """Signal a flag of all ranks, then wait for those of all. Releases and acquires at system scope."""
    signal_all_release(context, flag, generation)
    wait_all_acquire(context, flag, generation)


@triton.jit
def signal_all_release(context, flag, generation):
    """As :func:`signal_release`, on all ranks, this one too: the first half of a barrier."""
    _signal(context, tl.arange(0, MAX_RANKS) < world_size_of(context), flag, generation)


@triton.jit
def wait_all_acquire(context, flag, generation):
    """As :func:`wait_acquire`, for all ranks, this one too: the second half of a barrier."""
    _wait(context, tl.arange(0, MAX_RANKS) < world_size_of(context), flag, generation)


@triton.jit
def signal_add_release(context, peer, flag, amount):
    """Add to this rank's word of a flag of a peer: several programs may, in one launch. Such a word counts for ever.

    Releases at system scope: whoever waits for the sum sees all that this program has read and written before.
    """
    tl.debug_barrier()
    there = (peer >= 0) & (peer < world_size_of(context)) & (flag >= 0) & (flag < tl.load(context + FLAG_COUNT))
    region = tl.load(context + REGIONS + peer, mask=there, other=0)
    tl.atomic_add(_words(region, flag) + rank_of(context), amount, mask=there, sem="release", scope="sys")


@triton.jit
def wait_ge_acquire(context, peer, flag, value):
    """Wait until a peer's word of a flag has come to a value, by :func:`signal_add_release`.

    Acquires at system scope, for all threads of the program. The word is the sum of all launches, of 32 bits, compared
    on the circle: ``generation * amount`` says it for ``amount`` a launch, in the first 4 billion launches.
    """
    _wait_for_sum(context, peer, flag, value, MOST_AHEAD)


@triton.jit
def wait_eq_acquire(context, peer, flag, value):
    """As :func:`wait_ge_acquire`, for a value that is exactly that. A peer that runs ahead must not be able to pass."""
    _wait_for_sum(context, peer, flag, value, 1)


@triton.jit
def arrive_acq_rel(counter, parts):
    """int1: this program is the last of ``parts`` that come to a counter, which begins at 0 and ends there.

    Releases and acquires at system scope: what the last one does next comes behind all that the others have read and
    written before, also where that was the memory of a peer. ``counter`` points to int32 of this rank, for one launch.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == parts - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def first_relaxed(counter):
    """int1: no other program of this launch has come to the counter. Orders nothing.

    Who is first runs: so the others may wait for what it does, whatever their grid. One that comes behind all others
    must store 0 for the next launch (:func:`arrive_acq_rel` finds it).
    """
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 0


@triton.jit
def _signal(context, mask, flag, generation):
    # The release is one thread's; the barrier puts the accesses of all threads in front of it.
    tl.debug_barrier()
    lane = tl.arange(0, MAX_RANKS)
    mask = mask & (lane < world_size_of(context)) & _exists(context, flag)
    regions = tl.load(context + REGIONS + lane, mask=mask, other=0)
    words = _words(regions, flag) + rank_of(context)
    tl.atomic_xchg(words, tl.zeros([MAX_RANKS], tl.int32) + generation, mask=mask, sem="release", scope="sys")


@triton.jit
def _wait(context, mask, flag, generation):
    lane = tl.arange(0, MAX_RANKS)
    region = tl.load(context + REGIONS + rank_of(context))
    # The row in front of the first flag is never written: to wait for what there is not ends in a time-out.
    words = _words(region + tl.zeros([MAX_RANKS], tl.int64), tl.where(_exists(context, flag), flag, -1)) + lane
    wait_for_words(words, mask, generation, tl.load(context + BOARD), tl.full((), 0, tl.int32), MOST_AHEAD)


@triton.jit
def _wait_for_sum(context, peer, flag, value, AHEAD: tl.constexpr):
    lane = tl.arange(0, MAX_RANKS)
    region = tl.load(context + REGIONS + rank_of(context))
    words = _words(region + tl.zeros([MAX_RANKS], tl.int64), tl.where(_exists(context, flag), flag, -1)) + lane
    wait_for_words(words, lane == peer, value, tl.load(context + BOARD), tl.full((), 0, tl.int32), AHEAD, True)


@triton.jit
def _exists(context, flag):
    """int1[P], all of them alike: there is such a flag."""
    number = tl.zeros([MAX_RANKS], tl.int64) + flag
    return (number >= 0) & (number < tl.load(context + FLAG_COUNT))


@triton.jit
def _words(regions, flag):
    place = REGION_FLAGS_OFFSET + 4 * MAX_RANKS * flag
    return (regions + place).to(tl.pointer_type(tl.int32))


@triton.jit
def _own_words(context):
    return tl.load(context + REGIONS + rank_of(context)).to(tl.pointer_type(tl.int32))

# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Operations between ranks for the user's own kernels: put, get, signal, wait, barrier, for any grid. Portable Triton.

``Communicator.load_kernel`` gives such a kernel its first argument, the *context*: a pointer to int64 in the memory of
the device (``layout``), with this rank, the number of ranks, and the addresses of the kernel's flags.
``Communicator.peers`` returns the addresses of a tensor on all ranks, as int64[N] on the device::

    @triton.jit
    def to_next_rank(context, inboxes, data, SIZE: tl.constexpr):
        generation = begin(context)                              # first
        next = (rank_of(context) + 1) % world_size_of(context)
        offsets = tl.arange(0, SIZE)
        barrier_acq_rel(context, 0, generation)                  # the inboxes are free
        put_weak(inboxes, next, offsets, tl.load(data + offsets))
        barrier_acq_rel(context, 1, generation)                  # all bytes are there
        end(context, generation)                                 # last

A flag is identified by its number and its sender: every rank has a word for each pair. One launch signals a word at
most once, and may wait for it only if the sender's launch of the same generation signals it. The programs of a grid may
divide the numbers among them in any way, most simply by ``flag = phase * programs + program``; nothing else limits the
grid. A kernel that waits for others needs all of its programs on the GPU at the same time.

Generations count the launches of this kernel, eager and replayed, so that no flag is ever reset. They are words of 32
bits that wrap around: a wait is correct if its flag was signalled at some time in the last three billion launches.

If the host gives up since a peer does not come (docs/internals/failure.md), waits end, and the moved bytes are garbage.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flags import generation_after, wait_for_words
from sidelane.device.language import tl, triton

MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
RANK = tl.constexpr(layout.RANK)
WORLD_SIZE = tl.constexpr(layout.WORLD_SIZE)
STATUS = tl.constexpr(layout.STATUS)
FLAG_COUNT = tl.constexpr(layout.FLAG_COUNT)
REGIONS = tl.constexpr(layout.REGIONS)
COUNTERS = tl.constexpr(layout.COUNTERS)
GENERATION = tl.constexpr(layout.GENERATION)
FINISHED = tl.constexpr(layout.FINISHED)
REGION_FLAGS_OFFSET = tl.constexpr(layout.REGION_FLAGS_OFFSET)
MOST_AHEAD = tl.constexpr(1 << 30)
"""Bound of the launches by which a peer may be ahead: a power of two."""


@triton.jit
def rank_of(context):
    """Return this rank, int32."""
    return tl.load(context + RANK).to(tl.int32)


@triton.jit
def world_size_of(context):
    """Return the number of ranks, int32."""
    return tl.load(context + WORLD_SIZE).to(tl.int32)


@triton.jit
def begin(context):
    """Return the generation of this launch, int32, the same on all ranks. Every program of the grid begins with it."""
    return generation_after(tl.load(_own_words(context) + GENERATION))


@triton.jit
def end(context, generation):
    """End the generation once all programs of the grid have called this, each as its last act.

    Releases and acquires on this GPU: the next launch sees all accesses of this launch's programs.
    """
    tl.debug_barrier()
    words = _own_words(context)
    before = tl.atomic_add(words + FINISHED, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1:
        tl.store(words + FINISHED, 0)
        tl.store(words + GENERATION, generation)


@triton.jit
def begin_of(counters):
    """Return the generation as :func:`begin` does.

    ``counters``: ``OwnKernel.counters`` of the kernel, one more argument of the launch.
    """
    return generation_after(tl.load(counters + GENERATION))


@triton.jit
def end_relaxed(counters, generation):
    """End the generation as :func:`end` does, without ordering memory; a program may go on after it. Threads meet here.

    This suffices since only two readers load the generation. First, the programs of this launch: each of them has
    loaded it before it counts itself, since a load before a barrier of threads is performed when the barrier completes
    (PTX ISA, ``barrier``: "performed"), and the last one to count itself stores the next generation when all others
    have counted themselves. Second, the next launch: its stream, or an event, starts it after the end of this launch,
    and makes all of its stores visible, including those after this call. So only the load in :func:`begin` must precede
    the count, and no program waits for stores that are on their way to peers.

    ``counters``: see :func:`begin_of`. Programs of one launch that read each other's results after ``end`` need
    :func:`end` itself.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counters + FINISHED, 1, sem="relaxed", scope="gpu")
    if before == tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1:
        tl.store(counters + FINISHED, 0)
        tl.store(counters + GENERATION, generation)


@triton.jit
def peer_pointer(addresses, peer, DTYPE: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Return a pointer to a peer's tensor.

    Args:
        addresses: addresses from ``Communicator.peers``.
        peer: rank of the peer.
        DTYPE: type of the elements.
        ALIGNED: promises that the address is a multiple of 16 bytes, for wide accesses.
    """
    pointer = tl.load(addresses + peer).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def put_weak(addresses, peer, offsets, values, mask=None, ALIGNED: tl.constexpr = False):
    """Store values into a peer's tensor. Weak: a later :func:`signal_release`, and a wait on the peer, order it.

    ``offsets`` and ``mask`` count elements; the type of ``values`` is the tensor's. For the rest see
    :func:`peer_pointer`.
    """
    tl.store(peer_pointer(addresses, peer, values.dtype, ALIGNED) + offsets, values, mask=mask)


@triton.jit
def get_weak(addresses, peer, offsets, DTYPE: tl.constexpr, mask=None, ALIGNED: tl.constexpr = False):
    """Load values from a peer's tensor. Weak: an earlier :func:`wait_acquire` orders it after the peer's stores.

    See :func:`put_weak` for the arguments.
    """
    return tl.load(peer_pointer(addresses, peer, DTYPE, ALIGNED) + offsets, mask=mask)


@triton.jit
def put_signal_release(
    context, addresses, peer, offsets, values, flag, generation, mask=None, ALIGNED: tl.constexpr = False
):
    """Store values into a peer's tensor, then set this rank's word of a flag there.

    Releases at system scope: a program that waits for the flag sees these values, of all threads, and all earlier
    accesses of this program. See :func:`put_weak` and :func:`signal_release` for the arguments.
    """
    put_weak(addresses, peer, offsets, values, mask, ALIGNED)
    signal_release(context, peer, flag, generation)


@triton.jit
def signal_release(context, peer, flag, generation):
    """Set this rank's word of a flag of a peer.

    Releases at system scope: a program that waits for it sees all earlier accesses of this program.
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
    """Signal a flag (:func:`signal_release`) of all ranks, including this one: the first half of a barrier."""
    _signal(context, tl.arange(0, MAX_RANKS) < world_size_of(context), flag, generation)


@triton.jit
def wait_all_acquire(context, flag, generation):
    """Wait for a flag (:func:`wait_acquire`) of all ranks, including this one: the second half of a barrier."""
    _wait(context, tl.arange(0, MAX_RANKS) < world_size_of(context), flag, generation)


@triton.jit
def signal_add_release(context, peer, flag, amount):
    """Add to this rank's word of a flag of a peer; several programs of a launch may. The word is never reset.

    Releases at system scope: a program that waits for the sum sees all earlier accesses of this program.
    """
    tl.debug_barrier()
    there = (peer >= 0) & (peer < world_size_of(context)) & (flag >= 0) & (flag < tl.load(context + FLAG_COUNT))
    region = tl.load(context + REGIONS + peer, mask=there, other=0)
    tl.atomic_add(_words(region, flag) + rank_of(context), amount, mask=there, sem="release", scope="sys")


@triton.jit
def wait_ge_acquire(context, peer, flag, value):
    """Wait until a peer's word of a flag has reached a value, by :func:`signal_add_release`.

    Acquires at system scope, for all threads of the program. The word is the sum over all launches; it has 32 bits and
    wraps around. With ``amount`` added per launch it is ``generation * amount``, in the first 4 billion launches.
    """
    _wait_for_sum(context, peer, flag, value, MOST_AHEAD)


@triton.jit
def wait_eq_acquire(context, peer, flag, value):
    """Wait as :func:`wait_ge_acquire` does, for exactly this value. The peer must not be able to run ahead of it."""
    _wait_for_sum(context, peer, flag, value, 1)


@triton.jit
def arrive_acq_rel(counter, parts):
    """Count this program at a counter; return True, int1, for the last of ``parts``, which resets the counter to 0.

    Releases and acquires at system scope: later accesses of the last program are ordered behind all earlier accesses of
    the others, including those to memory of peers. ``counter`` points to int32 of this rank, for one launch.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == parts - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def first_relaxed(counter):
    """Return True, int1, for the first program of a launch that comes to the counter. Orders no memory.

    The first program is running, so that the others may wait for its work, whatever the size of the grid. The last
    program, which :func:`arrive_acq_rel` finds, must store 0 for the next launch.
    """
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 0


@triton.jit
def _signal(context, mask, flag, generation):
    # One thread releases; the barrier orders the accesses of all threads before it.
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
    # The row before the first flag is never written: a wait for a flag that does not exist ends in a time-out.
    words = _words(region + tl.zeros([MAX_RANKS], tl.int64), tl.where(_exists(context, flag), flag, -1)) + lane
    wait_for_words(words, mask, generation, tl.load(context + STATUS), tl.full((), 0, tl.int32), MOST_AHEAD)


@triton.jit
def _wait_for_sum(context, peer, flag, value, AHEAD: tl.constexpr):
    lane = tl.arange(0, MAX_RANKS)
    region = tl.load(context + REGIONS + rank_of(context))
    words = _words(region + tl.zeros([MAX_RANKS], tl.int64), tl.where(_exists(context, flag), flag, -1)) + lane
    wait_for_words(words, lane == peer, value, tl.load(context + STATUS), tl.full((), 0, tl.int32), AHEAD, True)


@triton.jit
def _exists(context, flag):
    """Return whether a flag exists, int1[P] with equal elements."""
    number = tl.zeros([MAX_RANKS], tl.int64) + flag
    return (number >= 0) & (number < tl.load(context + FLAG_COUNT))


@triton.jit
def _words(regions, flag):
    place = REGION_FLAGS_OFFSET + 4 * MAX_RANKS * flag
    return (regions + place).to(tl.pointer_type(tl.int32))


@triton.jit
def _own_words(context):
    return (context + COUNTERS).to(tl.pointer_type(tl.int32), bitcast=True)

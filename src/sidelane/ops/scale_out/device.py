# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Operations of kernels with ranks of other nodes: they hand slices to the proxy, and wait for what has arrived.

A kernel has two contexts: that of ``sidelane.device.context`` for the ranks of its node, to which it stores, and a
*inter-node context* (``words``), a pointer to int64. ``generation`` is that of the first one. Portable Triton.

Words in host memory are polled by plain loads. An atomic operation of a GPU there could undo a store of the host, so
what acquires is one on a word of the device's own memory behind the polls: it makes this program's later accesses come
after it, as the fence that it contains orders all memory.
"""

from __future__ import annotations

from sidelane.device import context, flags, layout
from sidelane.device.triton_language import tl, triton
from sidelane.ops.scale_out import words

POLLS = tl.constexpr(int(flags.POLLS))
MOST_AHEAD = tl.constexpr(int(context.MOST_AHEAD))
ABORT = tl.constexpr(layout.ABORT)
OPENED = tl.constexpr(words.OPENED)
READY = tl.constexpr(words.READY)
OVER = tl.constexpr(words.OVER)
STOP = tl.constexpr(words.STOP)
STATUS = tl.constexpr(words.STATUS)
LOCAL_RANKS = tl.constexpr(words.LOCAL_RANKS)
ACQUIRED = tl.constexpr(words.ACQUIRED)


@triton.jit
def local_rank_of(inter_node, rank):
    """Return the number of a rank on this node, int32; -1 if it is on another one."""
    return tl.load(tl.load(inter_node + LOCAL_RANKS).to(tl.pointer_type(tl.int32)) + rank)


@triton.jit
def open_release(inter_node, generation):
    """Let ranks of other nodes write into this rank's output in this generation: all earlier work has ended.

    Releases at system scope. One program of a launch calls it.
    """
    tl.debug_barrier()
    word = tl.load(inter_node + OPENED).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, generation, sem="release", scope="sys")


@triton.jit
def send_release(inter_node, generation, number):
    """Hand a slice to the proxy, behind all accesses of this program and those that it has acquired.

    Releases at system scope. One program of a launch calls it for each slice.

    Args:
        inter_node: inter-node context of the kernel.
        generation: generation of this launch.
        number: number of the slice among those that this rank sends.
    """
    tl.debug_barrier()
    ready = tl.load(inter_node + READY).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(ready + number, generation, sem="release", scope="sys")


@triton.jit
def finish_acquire(inter_node, generation):
    """Wait until this rank's slices have left, and those for it are in place; ranks of one node wait for nothing.

    The last program of a launch calls it. Acquires at system scope: later work sees all slices of this generation that
    other nodes have sent.
    """
    over = tl.load(inter_node + OVER)
    if over != 0:
        word = over.to(tl.pointer_type(tl.int32))
        late = _is_late(word, generation)
        polls = 0
        while late:
            late = _is_late(word, generation)
            polls += 1
            if polls % POLLS == 0:
                late = late & _goes_on(inter_node)
        tl.debug_barrier()
        tl.atomic_add(inter_node + ACQUIRED, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()


@triton.jit
def _is_late(word, generation):
    """Return whether a word has not reached this generation, as ``context`` compares them."""
    found = tl.load(word, volatile=True)
    return (((found - generation) & -MOST_AHEAD) != 0) | (found == 0)


@triton.jit
def _goes_on(inter_node):
    """Return False once the host has told this rank's kernels to give up, by a status word or by the proxy."""
    status = tl.load(inter_node + STATUS).to(tl.pointer_type(tl.int32))
    stop = tl.load(inter_node + STOP).to(tl.pointer_type(tl.int32))
    return (tl.load(stop, volatile=True) == 0) & (tl.load(status + ABORT, volatile=True) == 0)

"""Layout of the arena, the memory of each rank to which kernels of its peers write; constants for host and kernels.

::

    FLAGS_OFFSET     flags       [phase][block][sender], int32: the last generation that the sender has signalled
    LL_OFFSET        LL slots    [parity][sender][word], int64: 4 low bytes of data, 4 high bytes of generation
    after them       block slots [parity][sender][byte]: plain data, in its own place since it could look like words

A rank has counters, too, in memory of its device, which no peer touches: the generation of each thread block, int32.
All blocks of all kernels of a communicator count together, whether a launch has them or not, so that a generation is
the number of a call. It grows by 1 from 1; after 2**32 - 1 follows 2, which keeps even and odd alternating and skips 0,
the value of memory that was never written.
"""

from __future__ import annotations

MAX_RANKS = 8
MAX_BLOCKS = 128
PHASES = 34

FLAGS_OFFSET = 0
LL_OFFSET = 1 << 18
assert FLAGS_OFFSET + 4 * PHASES * MAX_BLOCKS * MAX_RANKS <= LL_OFFSET

CELL_PAYLOAD_BYTES = 4
CELL_BYTES = 8
LL_PAYLOAD_BYTES = 256 << 10
"""Largest number of bytes that a rank sends to a peer in one generation by the LL protocol."""

LL_SLOT_BYTES = LL_PAYLOAD_BYTES // CELL_PAYLOAD_BYTES * CELL_BYTES

ABORT, WAITING = 0, 1
"""Status words in pinned host memory: a value other than 0 in ``ABORT`` makes kernels give up. From ``WAITING``
on there is a word for each rank, to which a kernel that has long polled for that rank writes its generation."""

STATUS_WORDS = 1 + MAX_RANKS

BLOCK_SLOT_BYTES = 512 << 10
"""Largest number of bytes that a rank sends to a peer in one generation with block flags."""


def arena_bytes(world_size: int) -> int:
    """Return the size of each rank's arena in bytes."""
    return LL_OFFSET + 2 * world_size * (LL_SLOT_BYTES + BLOCK_SLOT_BYTES)


# --- the context of the user's own kernels (device/context.py) --------------------------------------------------------

RANK, WORLD_SIZE, STATUS, FLAG_COUNT, REGIONS = range(5)
"""Indices of the context's 64-bit words. From ``REGIONS`` on: the address of each rank's region of this kernel."""

COUNTERS = 16
"""Index of the context's word of counters, which no peer touches, in a cache line of its own."""
assert COUNTERS >= REGIONS + MAX_RANKS

CONTEXT_WORDS = COUNTERS + 1

GENERATION, FINISHED = range(2)
"""Indices of the counters, of 32 bits: generation of the last launch, and number of finished blocks of this launch."""

REGION_FLAGS_OFFSET = 256
"""Offset in bytes of the flags of a region: [flag][sender], int32, the last generation that the sender has signalled.
The row before them stays zero; it stands for flags that do not exist."""


def region_bytes(flag_count: int) -> int:
    """Return the size of each rank's region in bytes."""
    return REGION_FLAGS_OFFSET + 4 * MAX_RANKS * flag_count

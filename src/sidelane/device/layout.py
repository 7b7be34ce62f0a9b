"""The arena: memory that every rank has for its kernels, and peers write to. Numbers for host and kernels alike.

::

    0                counters    the generation of each thread block, int32
    FLAGS_OFFSET     flags       [phase][block][sender], int32: the last generation that the sender has signalled
    CELLS_OFFSET     cells       [parity][sender][cell], int64: 4 bytes of data below, 4 bytes of generation above
    behind them      parcels     [parity][sender][byte]: data as it is, which could pass for cells in their place

All blocks of all kernels of a communicator tick together, whether a launch has them or not, so that a generation is the
number of a call. It grows by 1 from 1; behind 2**32 - 1 comes 2, which keeps even and odd in turn and leaves out 0, the
value of memory that nobody has written.
"""

from __future__ import annotations

MAX_RANKS = 8
MAX_BLOCKS = 128
PHASES = 34

COUNTERS_OFFSET = 0
FLAGS_OFFSET = 4 * MAX_BLOCKS
CELLS_OFFSET = 1 << 18
assert FLAGS_OFFSET + 4 * PHASES * MAX_BLOCKS * MAX_RANKS <= CELLS_OFFSET

CELL_PAYLOAD_BYTES = 4
CELL_BYTES = 8
SLOT_PAYLOAD_BYTES = 256 << 10
"""Most bytes that a rank sends to a peer in one generation as cells."""

SLOT_BYTES = SLOT_PAYLOAD_BYTES // CELL_PAYLOAD_BYTES * CELL_BYTES

ABORT, WAITING = 0, 1
"""Words of the board, pinned host memory: not 0 makes kernels give up; from ``WAITING`` on, a word for each rank, where
a kernel that has spun for long on that rank's data writes its generation, again and again."""

BOARD_WORDS = 1 + MAX_RANKS

PARCEL_BYTES = 512 << 10
"""Most bytes that a rank sends to a peer in one generation as a parcel."""


def arena_bytes(world_size: int) -> int:
    """Size of the arena of each rank."""
    return CELLS_OFFSET + 2 * world_size * (SLOT_BYTES + PARCEL_BYTES)


# --- the context of a kernel of one's own (device/context.py) ---------------------------------------------------------

RANK, WORLD_SIZE, BOARD, FLAG_COUNT, REGIONS = range(5)
"""Words of 64 bits; from ``REGIONS`` on, the address of each rank's region. Regions are of that kernel alone."""

CONTEXT_WORDS = REGIONS + MAX_RANKS

GENERATION, FINISHED = range(2)
"""Words of 32 bits of a region: that of the last launch, and how many blocks of this launch have ended."""

REGION_FLAGS_OFFSET = 256
"""Behind it: [flag][sender], int32, the last generation that the sender has signalled. In front of it: a row of zeros,
which stands for flags that there are not."""


def region_bytes(flag_count: int) -> int:
    """Size of the region of each rank."""
    return REGION_FLAGS_OFFSET + 4 * MAX_RANKS * flag_count

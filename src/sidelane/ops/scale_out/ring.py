"""Ring of descriptors in host memory: what a kernel has ready for ranks of other nodes, in the order of its tickets.

Many programs of a kernel put descriptors in (``device``), and one thread of the host takes them out (``proxy``)::

    program   take a ticket | wait until tail > ticket - capacity | write the entry | release: its sequence = ticket + 1
    thread    wait until the next sequence is there | read the entry | begin to send its slice
              wait until the slice of the oldest entry has left | tail + 1

The thread takes entries as they come and sends many slices at a time. It moves the tail in order, and over an entry
only when the bytes of its slice may be overwritten. So a program that finds room also knows that the slice whose entry
it overwrites has left, and a kernel that waits for the tail behind its last ticket knows that all of its slices have.
Tickets have 64 bits and never wrap around.

Words are written by one side only: the kernel writes entries, the host writes the tail and the order to give up. On a
GPU the ring is pinned host memory, where no atomic operation of the GPU would be atomic for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from sidelane.memory.ordering import full_fence
from sidelane.memory.persistent import lasting
from sidelane.memory.release import Kept
from sidelane.program.wraparound import WORD_MASK

TAIL, STOP = range(2)
"""Indices of the ring's 64-bit words: number of descriptors that the host is done with; not 0 once all waits end."""

ENTRIES = 16
"""Index of the word at which entries begin: the words before them have a cache line of their own."""

ENTRY_WORDS = 8
"""Number of 64-bit words of an entry, a cache line."""

SEQUENCE, HANDLE, EPOCH, TARGET, FLAG, SOURCE, PLACE, SHAPE = range(ENTRY_WORDS)
"""Indices of an entry's words. The shape is rows in the high 32 bits, columns in the low ones."""

END = -1
"""Target of the last descriptor of a call, which goes to all ranks of other nodes."""

MOST_CAPACITY = 1 << 20

RING, HEAD, CAPACITY, OPENED, DONE, FLAGS, NUMBER, RANKS, BOARD, NEARS = range(10)
"""Indices of the 64-bit words of a kernel's far context: addresses of the ring and of the next ticket; capacity;
addresses of the word by which the kernel opens its output, of a word for each sender that has ended, and of the slices'
flags; number of the operator's handle; number of ranks, 0 if all are on this node; addresses of the board, and of each
rank's number on this node (-1: elsewhere)."""

CONTEXT_WORDS = 10


class Descriptor(NamedTuple):
    """A slice to send.

    Attributes:
        handle: number of the operator's handle, alike on all ranks.
        epoch: generation of the launch, 32 bits.
        target: rank that gets the slice, or ``END``.
        flag: number of the slice's flag there.
        source: first element in the send buffer.
        place: first element in the output of the target.
        rows, columns: elements of the slice; its rows are contiguous here, and lie apart there.
    """

    handle: int
    epoch: int
    target: int
    flag: int
    source: int
    place: int
    rows: int
    columns: int


class HostRing:
    """The host's side of a ring.

    Args:
        capacity: number of entries, a power of two.
        device: device of the kernels.

    Attributes:
        tensor: the words, in host memory.
        head: the next ticket, in the memory of the device.

    Raises:
        ValueError: the capacity is not allowed.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        if not 1 <= capacity <= MOST_CAPACITY or capacity & (capacity - 1):
            raise ValueError(f"ring: capacity (value={capacity}, allowed=a power of two up to {MOST_CAPACITY})")
        self.capacity = capacity
        self.tensor = host_words(ENTRIES + capacity * ENTRY_WORDS, torch.int64, device)
        self.head = lasting(device, lambda: torch.zeros(1, dtype=torch.int64, device=device))
        self._words = self.tensor.numpy()
        self._taken = self._tail = 0

    def take(self) -> Descriptor | None:
        """Return the next descriptor if it is there. :meth:`release` follows for each, in order, when it has left."""
        first = ENTRIES + self._taken % self.capacity * ENTRY_WORDS
        if int(self._words[first + SEQUENCE]) != self._taken + 1:
            return None
        self._taken += 1
        full_fence()  # the entry is read behind its sequence
        entry = self._words[first : first + ENTRY_WORDS].tolist()
        shape = entry[SHAPE]
        handle, epoch, target, flag, source, place = entry[HANDLE:SHAPE]
        return Descriptor(handle, epoch & WORD_MASK, target, flag, source, place, shape >> 32, shape & WORD_MASK)

    def release(self) -> None:
        """Give the oldest entry that was taken back to the kernel."""
        self._tail += 1
        full_fence()
        self._words[TAIL] = self._tail

    def give_up(self) -> None:
        """End all waits of kernels for other nodes, now and later: the bytes that they move are garbage."""
        self._words[STOP] = 1


class _PinnedWords(Kept):
    """Owner of pinned words, for ``numpy``, whose array keeps it: kernels may poll or write them after the last
    reference, so they are released behind the idle device (``memory/release.py``).
    """

    __slots__ = ("__array_interface__",)

    def __init__(self, words: torch.Tensor, device: torch.device) -> None:
        super().__init__(words.untyped_storage(), device)
        self.__array_interface__: dict[str, Any] = words.numpy().__array_interface__


def host_words(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return words of host memory, zeros, which kernels of the device reach by the same address."""
    pinned = device.type == "cuda"
    words = lasting(torch.device("cpu"), lambda: torch.zeros(count, dtype=dtype, device="cpu", pin_memory=pinned))
    return torch.from_numpy(np.asarray(_PinnedWords(words, device))) if pinned else words

"""The symmetric blocks of a session, and where a tensor lies in them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
import threading
import weakref

import torch

from sidelane.memory.base import SymmetricBlock, SymmetricMemory

_LANE_NUMBERS = 1 << 32
"""Blocks that a lane may number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a tensor.

    Attributes:
        address: in this process.
        nbytes: size.
        block: number of the symmetric block that holds them; None for ordinary memory.
        offset: in that block.
    """

    address: int
    nbytes: int
    block: int | None = None
    offset: int = 0

    @property
    def symmetric(self) -> bool:
        return self.block is not None

    @property
    def place(self) -> tuple[int, int] | None:
        """What must be equal on all ranks for a program to reach the peers' bytes."""
        return None if self.block is None else (self.block, self.offset)


class SymmetricHeap:
    """The symmetric blocks of a session. A block has one number on all ranks, by the lane that allocated it.

    Args:
        owner: for people.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._blocks: dict[int, SymmetricBlock] = {}
        self._places: list[tuple[int, int, int]] = []  # (address, number, bytes); replaced as a whole, for readers
        self._lock = threading.Lock()
        with _heaps_lock:
            _heaps.add(self)

    def add(self, number: int, block: SymmetricBlock) -> None:
        """Know a block of all ranks."""
        with self._lock:
            self._blocks[number] = block
            self._places = sorted([*self._places, (block.tensor.data_ptr(), number, block.tensor.nbytes)])
        with _heaps_lock:
            generation_cell[0] += 1

    def locate(self, tensor: torch.Tensor) -> Region:
        """Find a contiguous tensor.

        Raises:
            ValueError: the tensor is symmetric memory of another communicator, sticks out of its block, or has no
                memory for what its shape says: a fake one, or one whose storage was resized.
        """
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        if nbytes == 0:
            return Region(address, 0)
        there = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize if address else 0
        if there < nbytes:
            raise ValueError(
                f"a tensor has no memory for its elements (value={max(there, 0)} bytes, allowed={nbytes} and more): "
                f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
            )
        number = self._find(address)
        if number is None:
            with _heaps_lock:
                heaps = list(_heaps)
            for heap in heaps:
                if heap is not self and heap._find(address) is not None:
                    raise ValueError(
                        f"a tensor is symmetric memory of another communicator ({heap.owner}); "
                        f"use this communicator's empty() ({self.owner}), or ordinary memory"
                    )
            return Region(address, nbytes)
        block = self._blocks[number]
        offset = address - block.tensor.data_ptr()
        if offset + nbytes > block.tensor.nbytes:
            raise ValueError(
                f"a tensor sticks out of its symmetric block (end={offset + nbytes}, allowed={block.tensor.nbytes})"
            )
        return Region(address, nbytes, number, offset)

    def addresses(self, region: Region) -> tuple[int, ...]:
        """Where this process reaches the region on each rank. The region must be symmetric."""
        assert region.block is not None
        return tuple(base + region.offset for base in self._blocks[region.block].addresses)

    def close(self) -> None:
        """Forget the blocks. Tensors that callers still have stay valid as ordinary memory."""
        with self._lock:
            self._blocks, self._places = {}, []
        with _heaps_lock:
            _heaps.discard(self)

    def _find(self, address: int) -> int | None:
        places = self._places
        position = bisect.bisect(places, address, key=operator.itemgetter(0)) - 1
        if position < 0:
            return None
        start, number, nbytes = places[position]
        return number if address < start + nbytes else None


class LaneMemory:
    """What one lane adds to the heap of its session, in the order of its own calls.

    Args:
        heap: of the session.
        memory: of the lane.
        number: of the lane in its session, the same on all ranks.
    """

    def __init__(self, heap: SymmetricHeap, memory: SymmetricMemory, number: int) -> None:
        self._heap, self._memory = heap, memory
        self._numbers = itertools.count(number * _LANE_NUMBERS)

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate a block on every rank. Collective, in the order of the lane's calls."""
        block = self._memory.allocate(nbytes)
        self._heap.add(next(self._numbers), block)
        return block

    def close(self) -> None:
        """Allocate no more. What was allocated stays in the heap."""
        self._memory.close()


def generation() -> int:
    """Grows with every symmetric block of this process: what an address was is not what it is for ever."""
    return generation_cell[0]


generation_cell = [0]
"""What :func:`generation` returns; whoever adds to it puts another object there."""

_heaps: weakref.WeakSet[SymmetricHeap] = weakref.WeakSet()
_heaps_lock = threading.Lock()  # communicators may be made and closed on several threads

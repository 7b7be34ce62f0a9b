"""The symmetric blocks of one communicator, and where a tensor lies in them."""

from __future__ import annotations

import bisect
import dataclasses
import threading
import weakref

import torch

from sidelane.memory.base import SymmetricBlock, SymmetricMemory


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
    """Blocks in the order of their allocation, which is the same on every rank: a number names a block on all."""

    def __init__(self, memory: SymmetricMemory, owner: str) -> None:
        self.owner = owner
        self._memory = memory
        self._blocks: list[SymmetricBlock] = []
        self._starts: list[int] = []
        self._numbers: list[int] = []
        with _heaps_lock:
            _heaps.add(self)

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate a block on every rank. Collective."""
        block = self._memory.allocate(nbytes)
        generation_cell[0] += 1
        number = len(self._blocks)
        self._blocks.append(block)
        start = block.tensor.data_ptr()
        position = bisect.bisect(self._starts, start)
        self._starts.insert(position, start)
        self._numbers.insert(position, number)
        return block

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
        self._blocks, self._starts, self._numbers = [], [], []
        with _heaps_lock:
            _heaps.discard(self)
        self._memory.close()

    def _find(self, address: int) -> int | None:
        position = bisect.bisect(self._starts, address) - 1
        if position < 0:
            return None
        number = self._numbers[position]
        return number if address < self._starts[position] + self._blocks[number].tensor.nbytes else None


def generation() -> int:
    """Grows with every symmetric block of this process: what an address was is not what it is for ever."""
    return generation_cell[0]


generation_cell = [0]
"""What :func:`generation` returns; whoever adds to it puts another object there."""

_heaps: weakref.WeakSet[SymmetricHeap] = weakref.WeakSet()
_heaps_lock = threading.Lock()  # communicators may be made and closed on several threads

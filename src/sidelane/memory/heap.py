"""Symmetric memory: blocks that all ranks of a group allocate together, and the offsets of tensors in them."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import operator
import struct
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from sidelane import forks
from sidelane.errors import Page, UnavailableError
from sidelane.memory.allocator import SEGMENT_BYTES, BlockAllocator, MemoryUse, as_text, from_text, rounded
from sidelane.memory.release import release_dropped
from sidelane.memory.storage import storage_of

Location = tuple[int, int] | None
"""Number of a symmetric block and offset in it; None for ordinary memory."""

POOL = "pool "
"""Prefix of the names of pools; names of other memory do not begin with it."""

_LANE_NUMBERS = 1 << 32
"""Number of block numbers that are reserved for each lane."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SymmetricBlock:
    """One collective allocation.

    Attributes:
        tensor: this rank's bytes, 1-d uint8 of ``nbytes``, zero when allocated.
        addresses: address of each rank's block in *this process*; that of its own rank is ``tensor.data_ptr()``.
        mapping: object that keeps the peers' memory mapped; None without peers. CPU ranks: a tensor for each rank.
    """

    tensor: torch.Tensor
    addresses: tuple[int, ...]
    mapping: object


class SymmetricMemory(Protocol):
    """Allocator of symmetric blocks for one group on one device."""

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate ``nbytes`` (> 0) on every rank. Collective: every rank calls it with the same size.

        Raises:
            MismatchError: ranks asked for different sizes.
            PeerTimeoutError: a rank did not come.
            UnavailableError: the machine does not have the memory.
        """
        ...

    def close(self) -> None:
        """Release this object's resources. Tensors that callers still hold remain valid."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a tensor.

    Attributes:
        address: address in this process.
        nbytes: size in bytes.
        block: number of the symmetric block that holds them; None for ordinary memory.
        offset: offset in that block in bytes.
    """

    address: int
    nbytes: int
    block: int | None = None
    offset: int = 0

    @property
    def symmetric(self) -> bool:
        return self.block is not None

    @property
    def location(self) -> Location:
        """Block and offset, which must be equal on all ranks for a program to reach the peers' bytes."""
        return None if self.block is None else (self.block, self.offset)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolRange:
    """Symmetric memory in which each rank places tensors independently (``session/pools.py``).

    Attributes:
        name: the same on all ranks, and never used twice.
        start: address of its first byte in this process.
        nbytes: size in bytes.
    """

    name: str
    start: int
    nbytes: int


class SymmetricHeap:
    """The symmetric blocks of lanes that share memory. A block has one number on all ranks, by the lane that made it.

    Args:
        owner: description of the communicator, for error messages.

    Attributes:
        stages_others: symmetric memory of other communicators is staged, not refused: a program may pass a tensor to
            several process groups.
    """

    def __init__(self, owner: str) -> None:
        self.owner, self.stages_others = owner, False
        self._blocks: dict[int, SymmetricBlock] = {}
        self._starts: list[tuple[int, int, int]] = []  # (address, number, bytes); replaced as a whole, for readers
        self._held: dict[int, torch.Tensor] = {}  # by address of the storage
        self._pools: dict[str, PoolRange] = {}  # by name; replaced as a whole, for readers
        self._gone_pools: collections.deque[str] = collections.deque()  # filled where a last reference is dropped
        self._lock = forks.rlock()
        global _heaps_there
        with _heaps_lock:
            _heaps_there = (*(known for known in _heaps_there if known() is not None), weakref.ref(self))

    def add(self, number: int, block: SymmetricBlock) -> None:
        """Add a block that all ranks have allocated."""
        with self._lock:
            self._blocks[number] = block
            self._starts = sorted([*self._starts, (block.tensor.data_ptr(), number, block.tensor.nbytes)])
        _begin_generation()

    def remove(self, number: int) -> None:
        """Forget a block that all ranks have given up: tensors in it are ordinary memory from now on."""
        with self._lock:
            self._blocks.pop(number, None)
            self._starts = [start for start in self._starts if start[1] != number]
        _begin_generation()

    def locate(self, tensor: torch.Tensor) -> Region:
        """Return the region of a contiguous tensor.

        Raises:
            ValueError: the tensor is symmetric memory of another communicator, exceeds its block, or has less memory
                than its shape requires: a fake one, one of ``torch.func``, or one whose storage was resized.
        """
        try:
            address, nbytes = tensor.data_ptr(), tensor.nbytes
        except RuntimeError:  # a tensor of a tracer, or of a transform of torch.func
            address, nbytes = 0, tensor.nbytes
        if nbytes == 0:
            return Region(address, 0)
        there = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize if address else 0
        if there < nbytes:
            raise ValueError(
                f"a tensor has no memory for its elements (value={max(there, 0)} bytes, allowed={nbytes} and more): "
                f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
            )
        if self._find(address) is None:
            heap = self._other_owner(address)
            if heap is not None:
                raise ValueError(
                    f"a tensor is symmetric memory of another communicator ({heap.owner}); "
                    f"use this communicator's empty() ({self.owner}), or ordinary memory"
                )
            return Region(address, nbytes)
        return self.region_at(Region(address, nbytes))

    def anchor(self, address: int, nbytes: int) -> int | None:
        """Return the address of symmetric memory, 0 for ordinary memory; None if :meth:`locate` may refuse it."""
        number = self._find(address)
        if number is None:
            return 0 if self._other_owner(address) is None else None
        block = self._blocks[number].tensor
        return address if address + nbytes <= block.data_ptr() + block.nbytes else None

    def region_at(self, region: Region) -> Region:
        """Find the block and offset of a region, which must begin in a symmetric block.

        Raises:
            ValueError: it exceeds the block.
        """
        number = self._find(region.address)
        assert number is not None
        block = self._blocks[number]
        offset = region.address - block.tensor.data_ptr()
        if offset + region.nbytes > block.tensor.nbytes:
            end = offset + region.nbytes
            raise ValueError(f"a tensor sticks out of its symmetric block (end={end}, allowed={block.tensor.nbytes})")
        return Region(region.address, region.nbytes, number, offset)

    def add_pool(self, name: str, tensor: torch.Tensor) -> PoolRange:
        """Register symmetric bytes of all ranks as a pool, in which each rank places its own tensors."""
        made = PoolRange(name, tensor.data_ptr(), tensor.nbytes)
        with self._lock:
            self._pools = {**self._pools, name: made}
        _begin_generation()  # calls are cached by the addresses of tensors that were there before
        return made

    def drop_pool(self, name: str) -> None:
        """Forget a pool that holds no tensor any more. May be called in any thread, at any point of another call."""
        self._gone_pools.append(name)

    @property
    def pools(self) -> dict[str, PoolRange]:
        """The pools by name."""
        while self._gone_pools:
            name = self._gone_pools.pop()
            with self._lock:
                self._pools = {other: found for other, found in self._pools.items() if other != name}
            _begin_generation()
        return self._pools

    def pool_at(self, address: int) -> PoolRange | None:
        """Return the pool that holds an address; None if there is none."""
        for found in self.pools.values():
            if found.start <= address < found.start + found.nbytes:
                return found
        return None

    def addresses(self, region: Region) -> tuple[int, ...]:
        """Return the address of each rank's part of a symmetric region in this process."""
        assert region.block is not None
        return tuple(base + region.offset for base in self._blocks[region.block].addresses)

    def hold(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Keep the symmetric ones among tensors until :meth:`close`: a graph holds their addresses."""
        for tensor in tensors:
            if tensor is not None and tensor.nbytes and self._find(tensor.data_ptr()) is not None:
                self._held[tensor.untyped_storage().data_ptr()] = tensor

    def close(self) -> None:
        """Forget the blocks. Tensors that callers still hold remain valid as ordinary memory."""
        with self._lock:
            self._blocks, self._starts, self._pools = {}, [], {}
            self._held.clear()

    def _other_owner(self, address: int) -> SymmetricHeap | None:
        """Return the heap of another communicator that holds an address; None if there is none."""
        for reference in () if self.stages_others else _heaps_there:
            heap = reference()
            if heap is not None and heap is not self and heap._find(address) is not None:
                return heap
        return None

    def _find(self, address: int) -> int | None:
        starts = self._starts
        position = bisect.bisect(starts, address, key=operator.itemgetter(0)) - 1
        if position < 0:
            return None
        start, number, nbytes = starts[position]
        return number if address < start + nbytes else None


class LaneMemory:
    """Symmetric memory of one lane: segments in the heap that lanes share, allocated in the order of the lane's calls.

    The bytes of a tensor become free when its storage is deleted, on each rank at another time. With the next
    allocation the ranks tell each other which ranges they have dropped; ranges that all have dropped are reused.

    Args:
        heap: heap of the lanes that share memory.
        memory: allocates the segments.
        number: number of the lane among these, the same on all ranks.
        world_size: number of ranks.
        most_bytes: largest number of bytes to reserve; None: as many as the device has.
    """

    def __init__(
        self, heap: SymmetricHeap, memory: SymmetricMemory, number: int, world_size: int, most_bytes: int | None
    ) -> None:
        self._heap, self._memory, self._most = heap, memory, most_bytes
        self._numbers = itertools.count(number * _LANE_NUMBERS)
        self._pool = BlockAllocator(world_size)
        self._segments: dict[int, SymmetricBlock] = {}
        self._dropped: collections.deque[int] = collections.deque()  # filled where a last reference is dropped
        self._unsaid: list[int] = []

    def what_is_dropped(self) -> str:
        """Return the ranges that this rank has dropped, as text for its peers: see :meth:`allocate`."""
        while self._dropped:
            bisect.insort(self._unsaid, self._dropped.popleft())
        return as_text(self._unsaid)[0]

    def allocate(self, nbytes: int, dropped: Sequence[str]) -> tuple[torch.Tensor, bool]:
        """Give out ``nbytes`` (> 0) on every rank. Collective, in the order of the lane's calls.

        Args:
            nbytes: size in bytes, the same on every rank.
            dropped: the text of :meth:`what_is_dropped` of every rank, including this one.

        Returns:
            The bytes as a 1-d tensor, and whether earlier calls may still use them on this rank's streams.

        Raises:
            UnavailableError: the device has no more memory, or the limit is reached; on every rank alike.
        """
        release_dropped()
        self._unsaid = self._unsaid[as_text(self._unsaid)[1] :]
        for text in dropped:
            self._pool.drop(from_text(text))
        taken, grows = self._pool.take(nbytes), False
        if taken is None:
            grows = True
            self._grow(rounded(nbytes, SEGMENT_BYTES))
            taken = self._pool.take(nbytes)
            assert taken is not None
        number, found = taken
        segment = self._segments[found.segment].tensor
        return storage_of(segment, found.offset, nbytes, lambda: self._dropped.append(number)), not grows

    def adopt(self, block: SymmetricBlock) -> int:
        """Add a block of all ranks that others have allocated; return its number, for ``SymmetricHeap.remove``."""
        number = next(self._numbers)
        self._heap.add(number, block)
        return number

    def use(self) -> MemoryUse:
        """Return the bytes that are reserved and used."""
        return MemoryUse(self._pool.reserved, self._pool.used, self._most)

    def close(self) -> None:
        """Allocate no more. Blocks that were allocated stay in the heap."""
        self._memory.close()
        self._segments.clear()

    def _grow(self, nbytes: int) -> None:
        if self._most is not None and self._pool.reserved + nbytes > self._most:
            raise UnavailableError(
                f"empty: {nbytes} more bytes of symmetric memory (value={self._pool.reserved + nbytes} with what is "
                f"reserved, of which {self._pool.used} are in use; allowed={self._most}, Config.memory_bytes)",
                page=Page.SETTINGS,
            )
        number = next(self._numbers)
        block = self._segments[number] = self._memory.allocate(nbytes)
        self._heap.add(number, block)
        self._pool.grow(number, nbytes)


def symmetric_ranges() -> bytes:
    """Return the begins and ends of all symmetric memory and pools of this process, as 64-bit words.

    They hold as long as :func:`generation` does.
    """
    heaps = [heap for reference in _heaps_there if (heap := reference()) is not None]
    blocks = ((start, nbytes) for heap in heaps for start, _, nbytes in heap._starts)
    pools = ((found.start, found.nbytes) for heap in heaps for found in heap.pools.values())
    return b"".join(struct.pack("=QQ", start, start + nbytes) for start, nbytes in (*blocks, *pools))


def are_outside(addresses: Sequence[int]) -> bool:
    """Return True for addresses that are neither in symmetric memory nor in a pool of this process, nor 0."""
    bounds = _bounds(generation_cell[0])
    return not any(bisect.bisect(bounds, address) % 2 for address in addresses)


@functools.lru_cache(maxsize=1)
def _bounds(generation: int) -> list[int]:
    """Return the begins and ends of symmetric memory in turns. Pools lie in it."""
    bounds = [0, 1]
    for start, end in sorted(struct.iter_unpack("=QQ", symmetric_ranges())):
        if end > bounds[-1]:
            bounds += [max(start, bounds[-1]), end]
    return bounds


def generation() -> int:
    """Return a number that grows with every symmetric block of this process, since addresses may be reused.

    A call is remembered by addresses together with this number: an older entry does not match any more.
    """
    return generation_cell[0]


def _begin_generation() -> None:
    with _heaps_lock:
        generation_cell[0] += 1


generation_cell = [0]
"""Cell with the value of :func:`generation`. Compiled code compares it by identity: adding makes another object."""

_heaps_there: tuple[weakref.ref[SymmetricHeap], ...] = ()
"""All heaps of this process; the tuple is replaced as a whole, so that readers need no lock."""

_heaps_lock = forks.rlock()  # communicators may be made and closed on several threads

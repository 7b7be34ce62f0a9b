"""Tensors in pools (``pools``): which of them lie at one place on all ranks, and how peers reach the others.

Each rank places its tensors by itself, so that no rank knows where those of its peers lie. They tell each other in the
first call that a tensor is in, by the protocol of ``reach``, and the host waits for the peers' hosts then. Where the
tensor lies at one place on all ranks it is symmetric from then on: nobody asks again as long as its storage lives. A
tensor that lies elsewhere on some rank is told of at each of its calls, and mapped: all of a pool is within reach.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sidelane.collectives.heap import Region, SymmetricHeap
from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Allocation, Mapping, OrdinaryMemory

POOL = "pool "
"""What names of pools begin with, and those of no other memory."""

MAPPING_OFF = "Config.map_memory is not on"

_SWEEP = 1024
"""Storages remembered before those that are gone are looked for."""


class ComparedStorages:
    """Storages in pools of which this lane's ranks have compared where they lie."""

    def __init__(self) -> None:
        # By address of the storage's own structure, of which there is no second one while this refers to it.
        self._known: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._most = _SWEEP

    def alike(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's storage lies at one place on all ranks, as far as they have compared."""
        return self._found(tensor) == ""

    def why_not(self, tensor: torch.Tensor) -> str:
        """Why the tensor is not symmetric."""
        found = self._found(tensor)
        return "its place in the pool has not been compared with the peers' yet" if found is None else found

    def note(self, storage: torch.UntypedStorage, why_not: str) -> None:
        """Know what was found; empty if it lies at one place."""
        if len(self._known) >= self._most:
            # What lives is never forgotten: the peers would not know that this rank asks again.
            self._known = {key: found for key, found in self._known.items() if not found[0].expired()}
            self._most = max(_SWEEP, 2 * len(self._known))
        self._known[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), why_not

    def _found(self, tensor: torch.Tensor) -> str | None:
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        # A storage that was given other memory is another one.
        return found[2] if found is not None and found[1] == storage.data_ptr() else None


class PoolMapping:
    """The bytes of a pool on another rank, which are within reach as long as the session is."""

    def __init__(self, start: int) -> None:
        self.start = start


class PooledMemory:
    """See :class:`sidelane.memory.ordinary.OrdinaryMemory`: pools, and what the device allows besides.

    Args:
        heap: that knows the pools.
        rank: of this process.
        ordinary: other memory; None where it is not mapped.
    """

    def __init__(self, heap: SymmetricHeap, rank: int, ordinary: OrdinaryMemory | None) -> None:
        self._heap, self._rank, self._ordinary = heap, rank, ordinary

    @property
    def most_held(self) -> int | None:
        return None if self._ordinary is None else self._ordinary.most_held

    @property
    def is_empty(self) -> bool:
        """True if there is nothing that peers could map."""
        return self._ordinary is None and not self._heap.pools

    @property
    def has_no_pools(self) -> bool:
        """True if that is so for pools."""
        return not self._heap.pools

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in a pool."""
        return self._heap.pool_at(tensor.data_ptr()) is not None

    def symmetric(self, region: Region) -> Region:
        """The region of a tensor that lies at one place of a pool on all ranks."""
        return self._heap.place(region)

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        pool = self._heap.pool_at(tensor.data_ptr())
        if pool is not None:
            return Allocation(pool.name, str(self._rank), pool.start, pool.nbytes)
        return MAPPING_OFF if self._ordinary is None else self._ordinary.allocation_of(tensor)

    def is_gone(self, allocation: Allocation) -> bool:
        if allocation.name.startswith(POOL):
            return allocation.name not in self._heap.pools
        return self._ordinary is None or self._ordinary.is_gone(allocation)

    def map(self, handle: str, name: str) -> Mapping:
        if name.startswith(POOL):
            pool = self._heap.pools.get(name)
            if pool is None:
                raise UnavailableError(f"{name} is no more on rank {self._rank}")
            return PoolMapping(pool.addresses[int(handle)])
        if self._ordinary is None:
            raise UnavailableError(MAPPING_OFF)
        return self._ordinary.map(handle, name)

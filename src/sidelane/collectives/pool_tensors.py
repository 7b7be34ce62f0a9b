"""Tensors in pools (``session/pools.py``): comparison of their places between ranks, and access by peers.

Each rank places its tensors independently, so that no rank knows the places of its peers' tensors. In the first call
with a tensor the ranks exchange them, by the protocol of ``reach``, and the host waits for the peers' hosts. A tensor
that lies at one place on all ranks is symmetric from then on, as long as its storage lives, without another exchange.
A tensor whose place differs between ranks is offered in each of its calls and mapped: peers reach all of a pool.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sidelane.collectives.heap import Region, SymmetricHeap
from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Allocation, Mapping, OrdinaryMemory

POOL = "pool "
"""Prefix of the names of pools; names of other memory do not begin with it."""

MAPPING_OFF = "Config.map_memory is not on"

_SWEEP = 1024
"""Number of remembered storages at which deleted ones are removed for the first time."""


class ComparedStorages:
    """Storages in pools whose places the ranks of this lane have compared."""

    def __init__(self) -> None:
        # By address of the C++ StorageImpl, which is not reused while the weak reference exists.
        self._known: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._most = _SWEEP

    def alike(self, tensor: torch.Tensor) -> bool:
        """Return True if the ranks have compared the tensor's storage, and it lies at one place on all of them."""
        return self._found(tensor) == ""

    def why_not(self, tensor: torch.Tensor) -> str:
        """Return the reason why the tensor is not symmetric."""
        found = self._found(tensor)
        return "its place in the pool has not been compared with the peers' yet" if found is None else found

    def note(self, storage: torch.UntypedStorage, why_not: str) -> None:
        """Keep the result of a comparison: empty if the storage lies at one place, else the reason."""
        if len(self._known) >= self._most:
            # Living storages are never forgotten: this rank would compare again, and its peers would not.
            self._known = {key: found for key, found in self._known.items() if not found[0].expired()}
            self._most = max(_SWEEP, 2 * len(self._known))
        self._known[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), why_not

    def _found(self, tensor: torch.Tensor) -> str | None:
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        # A storage that got other memory since (data_ptr differs) counts as another storage.
        return found[2] if found is not None and found[1] == storage.data_ptr() else None


class PoolMapping:
    """A mapping of a pool of another rank, which exists as long as the session does."""

    def __init__(self, start: int) -> None:
        self.start = start


class PooledMemory:
    """Memory that peers can map (:class:`sidelane.memory.ordinary.OrdinaryMemory`): pools and ordinary memory.

    Args:
        heap: heap with the pools.
        rank: rank of this process.
        ordinary: ordinary memory of the device; None if it is not to be mapped.
    """

    def __init__(self, heap: SymmetricHeap, rank: int, ordinary: OrdinaryMemory | None) -> None:
        self._heap, self._rank, self._ordinary = heap, rank, ordinary

    @property
    def most_held(self) -> int | None:
        return None if self._ordinary is None else self._ordinary.most_held

    @property
    def is_empty(self) -> bool:
        """True if there is no memory that peers could map."""
        return self._ordinary is None and not self._heap.pools

    @property
    def has_no_pools(self) -> bool:
        """True if there are no pools."""
        return not self._heap.pools

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor in a pool."""
        return self._heap.pool_at(tensor.data_ptr()) is not None

    def symmetric(self, region: Region) -> Region:
        """Return the symmetric region of a tensor that lies at one place of a pool on all ranks."""
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

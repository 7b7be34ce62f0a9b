"""Symmetric memory in host memory, for GPUs that cannot reach each other's memory.

Every rank maps the memory of all ranks (``host_shared``) and registers it with its driver. Copy engines and kernels of
each GPU then read and write it over PCIe, at the addresses of the host. Flags, staging and the arenas of kernels lie
there; the tensors of callers stay in GPU memory, and calls stage them.
"""

from __future__ import annotations

import sys
import weakref

import torch

from sidelane.config import HOST, name_of
from sidelane.errors import Page, UnavailableError
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.host_shared import ShmMemory
from sidelane.memory.release import DeferredRelease, deferred_bytes, lanes, release_dropped

_PORTABLE_AND_MAPPED = 3
"""Flags of ``cudaHostRegister``: for all devices of the process, at an address of the device."""


class PinnedMemory(ShmMemory):
    """Allocator of symmetric blocks in host memory that GPUs reach. All ranks on one machine.

    Args:
        exchange: connection of the ranks.
        device: GPU of this rank.
        most_bytes: largest number of bytes that this rank may register at a time (``Config.memory_bytes``); None: any.
    """

    def __init__(self, exchange: Exchange, device: torch.device, most_bytes: int | None = None) -> None:
        super().__init__(exchange)
        self._device, self._most_bytes = device, most_bytes
        self._registered: weakref.WeakSet[RegisteredMemory] = weakref.WeakSet()
        lanes.add(self)

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate ``nbytes`` (> 0) on every rank, zeroed, and register them on each. Collective.

        Raises:
            As :meth:`ShmMemory.allocate`. UnavailableError: the driver of some rank does not register so much memory.
        """
        release_dropped()
        exchange, block = self._exchange, super().allocate(nbytes)
        assert exchange is not None
        held: list[RegisteredMemory] = []

        def register() -> str:
            first, last = min(block.addresses), max(block.addresses)
            wanted = nbytes + sum(memory.part_bytes for memory in self._registered)
            if self._most_bytes is not None and wanted > self._most_bytes:
                return f"bytes of a rank (value={wanted}, allowed=0..{self._most_bytes} by Config.memory_bytes)"
            try:
                held.append(RegisteredMemory(first, last - first + nbytes, nbytes, block.mapping))
            except UnavailableError as error:
                return str(error)
            self._registered.update(held)
            return ""

        problems = exchange("host memory, registered", register)
        if any(problems):
            named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
            raise UnavailableError(
                f"allocate: no host memory of {nbytes} bytes between GPUs ({name_of('peers', HOST)}): {named}",
                page=Page.NO_PEERS,
            )
        tensor = deferred_bytes(block.tensor, self._device)
        return SymmetricBlock(tensor, block.addresses, DeferredRelease(held, self._device))

    def close(self) -> None:
        super().close()
        lanes.discard(self)
        release_dropped()


class RegisteredMemory:
    """Host memory that the driver has pinned, and that this process's GPUs reach at its own address.

    Args:
        address: address of its first byte.
        nbytes: size in bytes.
        part_bytes: bytes of this rank among them.
        owner: object that keeps the memory mapped.

    Raises:
        UnavailableError: the driver refuses it.
    """

    def __init__(self, address: int, nbytes: int, part_bytes: int, owner: object) -> None:
        self.part_bytes = part_bytes
        self._runtime, self._address, self._owner = torch.cuda.cudart(), 0, owner
        result = self._runtime.cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
        if int(result) != 0:
            raise UnavailableError(
                f"cudaHostRegister of {nbytes} bytes failed ({result}): the limits are memory that is free, and what "
                f"this user may lock (ulimit -l)"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            self._runtime.cudaHostUnregister(self._address)

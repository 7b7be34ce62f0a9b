"""The driver's calls for memory that is mapped piece by piece (``cuMemCreate``), such as expandable segments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from sidelane import forks
from sidelane.errors import SidelaneError, UnavailableError
from sidelane.execute.cuda.driver import Driver, load_api
from sidelane.memory.release import Kept


class VirtualMemory:
    """The pieces of one device. Any thread may use it, also while a graph is captured.

    Handles are integers; each returned one must be released once.

    Args:
        driver: driver of the device.

    Attributes:
        index: index of the device.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.index = driver.index

    @functools.cached_property
    def _api(self) -> Any:
        return load_api()

    @property
    def _kind(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def range_at(self, address: int) -> tuple[int, int] | None:
        """Return first byte and size of the piece that holds an address; None if there is none."""
        return self._driver.piece_at(address)

    def retain(self, address: int) -> int:
        """Return the handle of the piece that holds an address; it is unique until it is released.

        Raises:
            DriverError: there is none, or its memory was not made by ``cuMemCreate``.
        """
        return int(self._driver.call("cuMemRetainAllocationHandle", address))

    def release(self, handle: int) -> None:
        """Release a handle of :meth:`retain`. A mapping keeps the piece."""
        self._driver.call("cuMemRelease", self._api.CUmemGenericAllocationHandle(handle))

    def is_shareable(self, handle: int) -> bool:
        """Return True if a piece can be exported as a file descriptor."""
        typed = self._api.CUmemGenericAllocationHandle(handle)
        kinds = self._driver.call("cuMemGetAllocationPropertiesFromHandle", typed).requestedHandleTypes
        return bool(int(kinds) & int(self._kind))

    def export(self, handle: int) -> int:
        """Return a new file descriptor of a piece."""
        typed = self._api.CUmemGenericAllocationHandle(handle)
        return int(self._driver.call("cuMemExportToShareableHandle", typed, self._kind, 0))

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses without mappings, and return its first address."""
        return int(self._driver.call("cuMemAddressReserve", nbytes, 0, self._api.CUdeviceptr(0), 0))

    def map(self, address: int, nbytes: int, descriptor: int) -> None:
        """Map the piece of a descriptor into a part of a range, for this device to read and write."""
        with self._driver.current(), self._driver.relaxed_capture():
            handle = int(self._driver.call("cuMemImportFromShareableHandle", descriptor, self._kind))
            try:
                self.map_handle(address, nbytes, handle)
            finally:
                self.release(handle)

    def map_handle(self, address: int, nbytes: int, handle: int) -> None:
        """Map a piece as :meth:`map` does. The device is current, inside of ``Driver.relaxed_capture``."""
        start, typed = self._api.CUdeviceptr(address), self._api.CUmemGenericAllocationHandle(handle)
        self._driver.call("cuMemMap", start, nbytes, 0, typed, 0)
        try:
            access = self._api.CUmemAccessDesc()
            access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self.index
            access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._driver.call("cuMemSetAccess", start, nbytes, [access], 1)
        except Exception:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a part of a range, which no work may be using."""
        with self._driver.current(), self._driver.relaxed_capture():
            self._driver.call("cuMemUnmap", self._api.CUdeviceptr(address), nbytes)

    def give_back(self, address: int, nbytes: int) -> None:
        """Free a range, in which nothing is mapped any more."""
        self._driver.call("cuMemAddressFree", self._api.CUdeviceptr(address), nbytes)

    def synchronize(self) -> None:
        """Wait for all submitted work: unmapping does not wait by itself."""
        with self._driver.current():
            self._driver.call("cuCtxSynchronize")


class Mirror:
    """A second mapping of memory that this process has mapped already. Its users must keep the first mapping, too.

    It is unmapped with its last reference, after the device has ended all submitted work: graphs may be replayed.

    Args:
        driver: driver of the device that reads and writes there, which is current.
        blocks: address of each rank's block, each in its own allocation, all of the same size.

    Attributes:
        addresses: addresses of the same blocks, at equal distances.

    Raises:
        DriverError, UnavailableError: the device cannot map them so.
    """

    def __init__(self, driver: Driver, blocks: Sequence[int]) -> None:
        ranges = [driver.call("cuMemGetAddressRange", load_api().CUdeviceptr(block)) for block in blocks]
        bases, sizes = [int(base) for base, _ in ranges], {int(size) for _, size in ranges}
        if len(sizes) > 1:
            raise UnavailableError(f"Mirror: blocks of one size are needed (value={sorted(sizes)})")
        size, memory = sizes.pop(), VirtualMemory(driver)
        start = memory.reserve(size * len(blocks))
        places: list[int] = []
        mapping = _Mapping()
        forks.finalize(mapping, _unmap, memory, start, places, size, len(blocks))
        self._mapping = Kept(mapping, torch.device("cuda", driver.index))
        for place, base in zip(range(start, start + size * len(blocks), size), bases, strict=True):
            handle = memory.retain(base)
            try:
                memory.map_handle(place, size, handle)
                places.append(place)
            finally:
                memory.release(handle)
        self.addresses = tuple(place + block - base for place, block, base in zip(places, blocks, bases, strict=True))


class _Mapping:
    """A mapping that is unmapped with the last reference to it."""


def _unmap(memory: VirtualMemory, start: int, places: Sequence[int], size: int, count: int) -> None:
    with contextlib.suppress(SidelaneError):
        memory.synchronize()
        for place in places:
            with contextlib.suppress(SidelaneError):
                memory.unmap(place, size)
        memory.give_back(start, size * count)

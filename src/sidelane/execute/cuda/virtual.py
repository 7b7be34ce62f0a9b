"""The driver's calls for memory that is mapped piece by piece (``cuMemCreate``), such as expandable segments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sidelane import forks
from sidelane.errors import SidelaneError, UnavailableError
from sidelane.execute.cuda.driver import Driver, load_api
from sidelane.memory.release import Kept


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
        api = load_api()
        ranges = [driver.call("cuMemGetAddressRange", api.CUdeviceptr(block)) for block in blocks]
        bases, sizes = [int(base) for base, _ in ranges], {int(size) for _, size in ranges}
        if len(sizes) > 1:
            raise UnavailableError(f"Mirror: blocks of one size are needed (value={sorted(sizes)})")
        size = sizes.pop()
        total = size * len(blocks)
        start = int(driver.call("cuMemAddressReserve", total, 0, api.CUdeviceptr(0), 0))
        places: list[int] = []
        mapping = _Mapping()
        forks.finalize(mapping, _unmap, driver, start, total, places, size)
        self._mapping = Kept(mapping, torch.device("cuda", driver.index))
        for number, base in enumerate(bases):
            handle = driver.call("cuMemRetainAllocationHandle", base)
            try:
                driver.call("cuMemMap", api.CUdeviceptr(start + number * size), size, 0, handle, 0)
                places.append(start + number * size)
            finally:
                driver.call("cuMemRelease", handle)  # the mapping keeps it
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = driver.index
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.call("cuMemSetAccess", api.CUdeviceptr(start), total, [access], 1)
        self.addresses = tuple(place + block - base for place, block, base in zip(places, blocks, bases, strict=True))


class _Mapping:
    """A mapping that is unmapped with the last reference to it."""


def _unmap(driver: Driver, start: int, total: int, places: Sequence[int], size: int) -> None:
    api = load_api()
    with contextlib.suppress(SidelaneError), driver.current():
        driver.call("cuCtxSynchronize")  # as torch does for the first mapping: unmapping does not wait by itself
        for place in places:
            with contextlib.suppress(SidelaneError):
                driver.call("cuMemUnmap", api.CUdeviceptr(place), size)
        driver.call("cuMemAddressFree", api.CUdeviceptr(start), total)


class VirtualMemory(Protocol):
    """The driver functions for mapped pieces. Handles are integers; each returned one must be released once.

    Attributes:
        index: index of the device.
    """

    @property
    def index(self) -> int: ...

    def range_at(self, address: int) -> tuple[int, int] | None:
        """Return first byte and size of the piece that holds an address; None if there is none."""
        ...

    def retain(self, address: int) -> int:
        """Return the handle of the piece that holds an address; it is unique until it is released.

        Raises:
            DriverError: there is none, or its memory was not made by ``cuMemCreate``.
        """
        ...

    def release(self, handle: int) -> None:
        """Release a handle of :meth:`retain`."""
        ...

    def is_shareable(self, handle: int) -> bool:
        """Return True if a piece can be exported as a file descriptor."""
        ...

    def export(self, handle: int) -> int:
        """Return a new file descriptor of a piece."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses without mappings, and return its first address."""
        ...

    def map(self, address: int, nbytes: int, descriptor: int) -> None:
        """Map the piece of a descriptor into a part of a range, for this device to read and write."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a part of a range, which no work may be using."""
        ...

    def give_back(self, address: int, nbytes: int) -> None:
        """Free a reserved range, in which no piece may be mapped."""
        ...


class DriverVirtualMemory:
    """Implementation of :class:`VirtualMemory` by the driver. Any thread may use it, also while a graph is captured."""

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
        return self._driver.piece_at(address)

    def retain(self, address: int) -> int:
        return int(self._driver.call("cuMemRetainAllocationHandle", address))

    def release(self, handle: int) -> None:
        self._driver.call("cuMemRelease", self._api.CUmemGenericAllocationHandle(handle))

    def is_shareable(self, handle: int) -> bool:
        typed = self._api.CUmemGenericAllocationHandle(handle)
        kinds = self._driver.call("cuMemGetAllocationPropertiesFromHandle", typed).requestedHandleTypes
        return bool(int(kinds) & int(self._kind))

    def export(self, handle: int) -> int:
        typed = self._api.CUmemGenericAllocationHandle(handle)
        return int(self._driver.call("cuMemExportToShareableHandle", typed, self._kind, 0))

    def reserve(self, nbytes: int) -> int:
        return int(self._driver.call("cuMemAddressReserve", nbytes, 0, self._api.CUdeviceptr(0), 0))

    def map(self, address: int, nbytes: int, descriptor: int) -> None:
        with self._driver.current(), self._driver.relaxed_capture():
            handle = self._driver.call("cuMemImportFromShareableHandle", descriptor, self._kind)
            try:
                self._driver.call("cuMemMap", self._api.CUdeviceptr(address), nbytes, 0, handle, 0)
            finally:
                self._driver.call("cuMemRelease", handle)  # the mapping stays
            try:
                access = self._api.CUmemAccessDesc()
                access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                access.location.id = self.index
                access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                self._driver.call("cuMemSetAccess", self._api.CUdeviceptr(address), nbytes, [access], 1)
            except Exception:
                self.unmap(address, nbytes)
                raise

    def unmap(self, address: int, nbytes: int) -> None:
        with self._driver.current(), self._driver.relaxed_capture():
            self._driver.call("cuMemUnmap", self._api.CUdeviceptr(address), nbytes)

    def give_back(self, address: int, nbytes: int) -> None:
        self._driver.call("cuMemAddressFree", self._api.CUdeviceptr(address), nbytes)

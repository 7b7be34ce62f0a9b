"""The driver's calls for memory that is mapped piece by piece (``cuMemCreate``), such as expandable segments."""

from __future__ import annotations

import functools
from typing import Any

from sidelane.execute.cuda.driver import Driver, load_api


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
                self._map_handle(address, nbytes, handle)
            finally:
                self.release(handle)

    def _map_handle(self, address: int, nbytes: int, handle: int) -> None:
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

    def free_range(self, address: int, nbytes: int) -> None:
        """Free a range, in which nothing is mapped any more."""
        self._driver.call("cuMemAddressFree", self._api.CUdeviceptr(address), nbytes)

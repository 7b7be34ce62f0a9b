"""The driver's calls for memory that is mapped piece by piece (``cuMemCreate``), as that of expandable segments."""

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
    """A second mapping of memory that this process has mapped already. Whoever uses it keeps the first one as well.

    It goes with its last reference, once the device has done all that it was given: graphs may still be replayed.

    Args:
        driver: of the device that will read and write there; its device is current.
        blocks: address of each rank's block, in an allocation of its own, all of the same size.

    Attributes:
        addresses: of the same blocks, equally far apart.

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
    """What is unmapped when nobody refers to it any more."""


def _unmap(driver: Driver, start: int, total: int, places: Sequence[int], size: int) -> None:
    api = load_api()
    with contextlib.suppress(SidelaneError), driver.current():
        driver.call("cuCtxSynchronize")  # as torch does with the first mapping: to unmap does not wait by itself
        for place in places:
            with contextlib.suppress(SidelaneError):
                driver.call("cuMemUnmap", api.CUdeviceptr(place), size)
        driver.call("cuMemAddressFree", api.CUdeviceptr(start), total)


class VirtualMemory(Protocol):
    """What is asked of a driver. Handles are integers; each that is returned is to be released once.

    Attributes:
        index: of the device.
    """

    @property
    def index(self) -> int: ...

    def range_at(self, address: int) -> tuple[int, int] | None:
        """First byte and size of the piece around an address; None without one."""
        ...

    def retain(self, address: int) -> int:
        """Handle of the piece around an address: that of no other piece until it is released.

        Raises:
            DriverError: there is none, or its memory was not made by ``cuMemCreate``.
        """
        ...

    def release(self, handle: int) -> None:
        """Undo :meth:`retain`."""
        ...

    def is_shareable(self, handle: int) -> bool:
        """True if it was made to be exported as a file descriptor."""
        ...

    def export(self, handle: int) -> int:
        """A new file descriptor of a piece."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Address of a range in which nothing is mapped yet."""
        ...

    def map(self, address: int, nbytes: int, descriptor: int) -> None:
        """Map what a descriptor stands for into a part of a range, for this device to read and write."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo :meth:`map`. Nothing may be under way there."""
        ...

    def give_back(self, address: int, nbytes: int) -> None:
        """Undo :meth:`reserve`; nothing may be mapped there."""
        ...


class DriverVirtualMemory:
    """See :class:`VirtualMemory`. Callable from any thread, also while a graph is captured."""

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
                self._driver.call("cuMemRelease", handle)  # what is mapped stays
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

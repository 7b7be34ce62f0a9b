"""Blocks of all ranks, mapped once more at equal distances, so that one pitched copy reads from all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import Driver, load_api


class Mirror:
    """A second mapping of memory that this process has mapped already. Whoever uses it keeps the first one as well.

    Args:
        driver: of the device that will read and write there; its device is current.
        blocks: address of each rank's block, in an allocation of its own, all of the same size.

    Attributes:
        addresses: of the same blocks.

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
        mapped: list[tuple[int, int]] = []
        self._end = weakref.finalize(self, _unmap, driver, start, total, mapped)
        self._end.atexit = False
        for number, base in enumerate(bases):
            handle = driver.call("cuMemRetainAllocationHandle", base)
            place = api.CUdeviceptr(start + number * size)
            driver.call("cuMemMap", place, size, 0, handle, 0)
            mapped.append((int(place), size))
            driver.call("cuMemRelease", handle)  # the mapping keeps it
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = driver.index
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.call("cuMemSetAccess", api.CUdeviceptr(start), total, [access], 1)
        self.addresses = tuple(
            start + number * size + block - base for number, (block, base) in enumerate(zip(blocks, bases, strict=True))
        )

    def close(self) -> None:
        """Unmap. Nothing on the device may use the addresses any more. Idempotent."""
        self._end()


def _unmap(driver: Driver, start: int, total: int, mapped: list[tuple[int, int]]) -> None:
    api = load_api()
    for place, size in mapped:
        driver.call("cuMemUnmap", api.CUdeviceptr(place), size)
    driver.call("cuMemAddressFree", api.CUdeviceptr(start), total)

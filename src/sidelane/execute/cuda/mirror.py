"""Blocks of all ranks, mapped once more at equal distances, so that one pitched copy reads from all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from sidelane import forks
from sidelane.errors import SidelaneError, UnavailableError
from sidelane.execute.cuda.driver import Driver, load_api
from sidelane.memory.giving_back import Kept


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

"""Two disjoint sets of a device's SMs, each with its own streams: green contexts; and SMs that cuBLAS leaves to others.

Both sets result from one split of the device's resource: contexts that are made one by one, each from the whole device,
may get the same SMs.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from sidelane.errors import UnavailableError

NEEDED = (
    *("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc"),
    *("cuGreenCtxCreate", "cuGreenCtxStreamCreate", "cuGreenCtxDestroy"),
)


class PartitionDriver(Protocol):
    """The driver functions that a split needs; the driver's context is current."""

    def call(self, function: str, *arguments: Any) -> Any: ...

    def priorities(self) -> tuple[int, int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SmGroup:
    """One of the two sets.

    Attributes:
        units: number of SMs.
        stream: stream whose kernels run on them only.
        urgent: such a stream of highest priority.
    """

    units: int
    stream: int
    urgent: int


class UnitSplit:
    """The SMs of a device, divided into two sets.

    Args:
        driver: driver of the device.
        api: ``cuda.bindings.driver``.
        units: number of SMs of the first set.

    Attributes:
        taken: the first set.
        left: the set of all other SMs.

    Raises:
        UnavailableError: the binding or the device has no green contexts, or no set of exactly that size.
        DriverError: the driver refused a call.
    """

    def __init__(self, driver: PartitionDriver, api: Any, units: int) -> None:
        absent = [name for name in NEEDED if not hasattr(api, name)]
        if absent:
            raise UnavailableError(f"partitions need cuda-bindings with {absent[0]} (CUDA 12.5)")
        self._driver, self._api = driver, api
        self._contexts: list[Any] = []
        self._streams: list[Any] = []
        device = driver.call("cuCtxGetDevice")
        whole = driver.call("cuDeviceGetDevResource", device, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        if not 0 < units < whole.sm.smCount:
            raise UnavailableError(f"partition: units (value={units}, allowed=1..{whole.sm.smCount - 1})")
        groups, count, rest = driver.call("cuDevSmResourceSplitByCount", 1, whole, 0, units)
        given = groups[0].sm.smCount if count else 0
        if given != units or rest.sm.smCount != whole.sm.smCount - units:
            raise UnavailableError(
                f"partition: this device splits {whole.sm.smCount} SMs into {given} and {rest.sm.smCount}, "
                f"not into {units} and the rest"
            )
        try:
            self.taken, self.left = (self._part(device, resource) for resource in (groups[0], rest))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy streams and contexts, on which no work may be running. Idempotent."""
        while self._streams:
            self._driver.call("cuStreamDestroy", self._streams.pop())
        while self._contexts:
            self._driver.call("cuGreenCtxDestroy", self._contexts.pop())

    def _part(self, device: Any, resource: Any) -> SmGroup:
        call = self._driver.call
        flags = self._api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", call("cuDevResourceGenerateDesc", [resource], 1), device, int(flags))
        self._contexts.append(context)
        non_blocking = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        for priority in self._driver.priorities():
            self._streams.append(call("cuGreenCtxStreamCreate", context, non_blocking, priority))
        normal, urgent = self._streams[-2:]
        return SmGroup(resource.sm.smCount, int(normal), int(urgent))


@functools.cache
def cublas() -> Any:
    """Return the cuBLAS of this process; None if there is none, or several of which one is torch's."""
    with contextlib.suppress(OSError, ValueError):
        (path,) = {*re.findall(r"/\S+/libcublas\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))}
        return ctypes.CDLL(path)
    return None


@contextlib.contextmanager
def spared(units: int) -> Iterator[None]:
    """Let cuBLAS leave a number of the current device's SMs to others, for GEMMs that this thread launches in a block.

    It is a request: cuBLAS launches blocks for fewer SMs, and may choose another kernel. A handle belongs to a thread
    and reads the number at a launch, so that the number before is put back as soon as the block ends.
    """
    library, handle, before, device = (
        cublas(),
        ctypes.c_void_p(torch.cuda.current_blas_handle()),
        ctypes.c_int(),
        torch.cuda.get_device_properties(torch.cuda.current_device()),
    )
    library.cublasGetSmCountTarget(handle, ctypes.pointer(before))
    library.cublasSetSmCountTarget(handle, device.multi_processor_count - units)
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, before)

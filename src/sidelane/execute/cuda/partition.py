"""Two sets of a device's SMs that share none, each with streams of its own: green contexts.

Both come out of one split of the device's resource: contexts that are made one by one, each from the whole device, may
be given the same SMs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from sidelane.errors import UnavailableError

NEEDED = (
    *("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc"),
    *("cuGreenCtxCreate", "cuGreenCtxStreamCreate", "cuGreenCtxDestroy"),
)


class Calls(Protocol):
    """What a split needs of the driver, whose context is current."""

    def call(self, function: str, *arguments: Any) -> Any: ...

    def priorities(self) -> tuple[int, int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One of the two sets.

    Attributes:
        units: SMs.
        stream: a stream whose kernels run on them only.
        urgent: one of highest priority.
    """

    units: int
    stream: int
    urgent: int


class UnitSplit:
    """A device's SMs in two.

    Args:
        driver: of the device.
        api: ``cuda.bindings.driver``.
        units: SMs of the one part.

    Attributes:
        taken: that part.
        left: all other SMs.

    Raises:
        UnavailableError: the binding or the device has no such parts, or none of exactly that size.
        DriverError: the driver refused a call.
    """

    def __init__(self, driver: Calls, api: Any, units: int) -> None:
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
        """Destroy streams and contexts. Nothing may be under way there. Idempotent."""
        while self._streams:
            self._driver.call("cuStreamDestroy", self._streams.pop())
        while self._contexts:
            self._driver.call("cuGreenCtxDestroy", self._contexts.pop())

    def _part(self, device: Any, resource: Any) -> Part:
        call = self._driver.call
        flags = self._api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", call("cuDevResourceGenerateDesc", [resource], 1), device, int(flags))
        self._contexts.append(context)
        non_blocking = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        for priority in self._driver.priorities():
            self._streams.append(call("cuGreenCtxStreamCreate", context, non_blocking, priority))
        normal, urgent = self._streams[-2:]
        return Part(resource.sm.smCount, int(normal), int(urgent))

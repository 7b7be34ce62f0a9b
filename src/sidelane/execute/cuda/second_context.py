"""Another context on the device, for what must get through when every stream of the first one hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from sidelane.execute.cuda.native import Bound, MemoryOps


class Calls(Protocol):
    """What it needs of the driver, whose context is current."""

    def call(self, function: str, *arguments: Any) -> Any: ...

    def create_stream(self) -> int: ...

    def bind_memory_ops(self, ops: MemoryOps, stream: int) -> Bound: ...

    def submit(self, calls: Iterable[Bound]) -> None: ...

    def is_idle(self, stream: int) -> bool: ...


class SecondContext:
    """A stream with hardware channels of its own, for memory operations that must get through when all others hang.

    Device memory of the first context can be written from here: the addresses are the same.

    Args:
        driver: of the device.
        api: ``cuda.bindings.driver``.
        first: the context that is current before and after every method.

    Raises:
        DriverError: no memory for it.
    """

    def __init__(self, driver: Calls, api: Any, first: Any) -> None:
        self._driver, self._api, self._first = driver, api, first
        self._context = driver.call("cuCtxCreate", None, 0, driver.call("cuCtxGetDevice"))
        try:
            self._stream = driver.create_stream()
        finally:
            driver.call("cuCtxSetCurrent", first)

    def submit(self, batches: Sequence[MemoryOps]) -> None:
        """Run batches in order."""
        with self._entered():
            self._driver.submit(self._driver.bind_memory_ops(batch, self._stream) for batch in batches)

    def is_idle(self) -> bool:
        with self._entered():
            return self._driver.is_idle(self._stream)

    def close(self) -> None:
        """Destroy the context and its stream."""
        self._driver.call("cuCtxDestroy", self._context)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._driver.call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxSetCurrent", self._first)

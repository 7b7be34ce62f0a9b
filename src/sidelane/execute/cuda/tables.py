"""Small tables in device memory for kernels: allocated now and then, reused, freed at the end.

The last reference to a table may be dropped at any point: in a capture, in another thread, while a peer is late. So no
driver is called then. The memory is reused once the device has passed all kernels that were launched by that time.
"""

from __future__ import annotations

import collections
import contextlib
import weakref

import numpy as np
import numpy.typing as npt

from sidelane.execute.cuda.driver import Driver, DriverError

SMALLEST_BYTES = 512
CHUNK_BYTES = 1 << 20

Block = tuple[int, int]
"""A block of device memory: size in bytes, a power of two, and address."""


class DeviceTable:
    """A table in device memory, which stays at its address as long as it is referenced.

    Attributes:
        address: address of the first byte.
    """

    def __init__(self, address: int) -> None:
        self.address = address


class DeviceTables:
    """The tables of one executor, whose lock is held and whose device is current in every method.

    Args:
        driver: driver of the device.
        stream: stream for the tables alone.
    """

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._chunks: list[int] = []
        self._rest: Block = (0, 0)
        self._free: dict[int, list[int]] = collections.defaultdict(list)
        self._released: collections.deque[Block] = collections.deque()  # no longer referenced
        self._waiting: collections.deque[tuple[int, list[Block]]] = collections.deque()  # behind an event
        self._events: list[int] = []

    def store(self, values: npt.NDArray[np.int64], last_stream: int | None) -> DeviceTable:
        """Copy values to the device, also while a stream is captured (in ``Driver.relaxed_capture``).

        Args:
            values: values of the table.
            last_stream: stream of the last kernel that may read a table; None if there is none, or it is captured.

        Raises:
            DriverError: the device has no memory.
        """
        self._collect(last_stream)
        nbytes = max(SMALLEST_BYTES, 1 << (values.nbytes - 1).bit_length())
        address = self._take(nbytes)
        table = DeviceTable(address)
        weakref.finalize(table, self._released.append, (nbytes, address)).atexit = False
        self._driver.upload(address, values, self._stream)
        return table

    def close(self) -> None:
        """Free everything, which waits for the device."""
        with self._driver.relaxed_capture(), contextlib.suppress(DriverError):
            for event in (*self._events, *(event for event, _ in self._waiting)):
                self._driver.destroy_event(event)
            for chunk in self._chunks:
                self._driver.free(chunk)
        self._chunks.clear()
        self._waiting.clear()
        self._events.clear()

    def _take(self, nbytes: int) -> int:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        if nbytes >= CHUNK_BYTES:
            return self._new_chunk(nbytes)
        left, address = self._rest
        if nbytes > left:
            left, address = CHUNK_BYTES, self._new_chunk(CHUNK_BYTES)
        self._rest = (left - nbytes, address + nbytes)
        return address

    def _new_chunk(self, nbytes: int) -> int:
        self._chunks.append(self._driver.allocate(nbytes))
        return self._chunks[-1]

    def _collect(self, last_stream: int | None) -> None:
        """Collect blocks that may be reused."""
        while self._waiting and self._driver.has_passed(self._waiting[0][0]):
            event, blocks = self._waiting.popleft()
            self._events.append(event)
            for nbytes, address in blocks:
                self._free[nbytes].append(address)
        if not self._released or last_stream is None:
            return
        event = self._events.pop() if self._events else self._driver.create_event()
        blocks = [self._released.popleft() for _ in range(len(self._released))]
        try:
            self._driver.submit([self._driver.bind_record(event, last_stream)])
        except DriverError:  # of a stream that is gone, or captured by others: another time
            self._released.extend(blocks)
            self._events.append(event)
        else:
            self._waiting.append((event, blocks))

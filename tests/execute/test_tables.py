"""Tables in device memory: reused when the device has passed what read them, and never in anybody's way."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from fake_driver import FakeDriver

from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.tables import CHUNK_BYTES, SMALLEST_BYTES, DeviceTable, DeviceTables


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver()
    yield made
    made.stop()


@pytest.fixture
def tables(driver: FakeDriver) -> Iterator[DeviceTables]:
    made = DeviceTables(driver, driver.create_stream())
    yield made
    made.close()
    assert not driver.allocated


def read(table: DeviceTable, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(table.address))


def test_tables_hold_their_values_and_lie_apart(tables: DeviceTables, driver: FakeDriver) -> None:
    sizes = (1, 7, 64, 65, 1000, 5, CHUNK_BYTES // 8 + 1, 3)
    made = [tables.store(np.arange(size, dtype=np.int64) + 1000 * size, None) for size in sizes]
    for table, size in zip(made, sizes, strict=True):
        assert read(table, size) == [1000 * size + n for n in range(size)]
    starts = sorted((table.address, max(SMALLEST_BYTES, 8 * size)) for table, size in zip(made, sizes, strict=True))
    assert all(start + nbytes <= after for (start, nbytes), (after, _) in itertools.pairwise(starts))
    assert len(driver.allocated) == 2, "one chunk for all that are small"


def test_memory_is_used_again_once_the_last_kernel_has_ended(tables: DeviceTables, driver: FakeDriver) -> None:
    values, stream, kernel = np.ones(4, np.int64), driver.create_stream(), threading.Event()
    address = tables.store(values, None).address
    gc.collect()
    driver.do(stream, kernel.wait)  # a kernel that reads it, launched before it was dropped
    kept = [tables.store(values, stream) for _ in range(3)]
    assert address not in [table.address for table in kept]
    kernel.set()
    driver.synchronize()
    assert tables.store(values, stream).address == address


def test_a_stream_under_capture_is_not_asked(tables: DeviceTables, driver: FakeDriver) -> None:
    values, stream = np.ones(4, np.int64), driver.create_stream()
    address = tables.store(values, None).address
    gc.collect()
    kept = [tables.store(values, None) for _ in range(3)]  # as the executor says while the last kernel's is
    assert not driver.submitted
    tables.store(values, stream)
    driver.synchronize()
    kept.append(tables.store(values, stream))
    assert address in (kept[-1].address, tables.store(values, stream).address)


def test_a_stream_that_is_gone_is_asked_another_time(tables: DeviceTables, driver: FakeDriver) -> None:
    values, stream = np.ones(4, np.int64), driver.create_stream()
    address = tables.store(values, None).address
    gc.collect()
    driver.fail_next = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    kept = [tables.store(values, stream)]
    kept.append(tables.store(values, stream))
    driver.synchronize()
    assert tables.store(values, stream).address == address


def test_what_cannot_be_freed_keeps_nobody_from_closing(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int) -> None:
        raise DriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cuMemFree")

    tables = DeviceTables(driver, driver.create_stream())
    tables.store(np.ones(4, np.int64), None)
    monkeypatch.setattr(driver, "free", refuse)
    tables.close()
    tables.close()


def test_many_lists_that_come_and_go_take_little_memory(tables: DeviceTables, driver: FakeDriver) -> None:
    stream = driver.create_stream()
    for count in range(3000):
        table = tables.store(np.full(64 + count % 100, count, np.int64), stream)
        assert read(table, 1) == [count]
        if count % 10 == 0:
            driver.synchronize()
    assert len(driver.allocated) == 1


def test_without_memory_nothing_is_lost(
    tables: DeviceTables, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> int:
        raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "allocate", refuse)
        with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
            tables.store(np.ones(4, np.int64), None)
    assert read(tables.store(np.ones(4, np.int64), None), 4) == [1] * 4

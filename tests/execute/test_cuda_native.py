"""Prepared calls of the driver's library, with the library played by Python: layouts, values, and what is kept."""

from __future__ import annotations

import ctypes
import gc
import struct
from typing import Any

import pytest

from sidelane.errors import UnavailableError
from sidelane.execute.boxes import Box
from sidelane.execute.cuda import native
from sidelane.execute.cuda.native import Bound, LaunchConfig, MemoryOps, Pointer, bind_launch, bind_planes, bind_rows

WAIT, WRITE = 1, 2  # as in cuda.h, like the offsets below
GEQ, EQ = 0, 1


def decoded(bound: Bound) -> tuple[int, list[tuple[int, int, int, int]]]:
    """The stream and (kind, address, value, flags) of each operation, as the driver reads them."""
    _, (stream, count, array, flags) = bound
    assert flags.value == 0
    raw = ctypes.string_at(array.value, 48 * count.value)
    return stream.value, [struct.unpack_from("<I4xQI4xI", raw, 48 * index) for index in range(count.value)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "require_native", lambda name: lambda *arguments: 0)


@pytest.mark.usefixtures("library")
def test_memory_operations_are_laid_out_as_the_driver_reads_them() -> None:
    ops, high = MemoryOps(), 0x7F12_3456_789A
    ops.write(high, 7)
    ops.wait(high + 4, (1 << 32) + 8, equal=False)
    ops.wait(64, 9, equal=True)
    assert decoded(ops.bind(5)) == (5, [(WRITE, high, 7, 0), (WAIT, high + 4, 8, GEQ), (WAIT, 64, 9, EQ)])


@pytest.mark.usefixtures("library")
def test_values_change_in_place_for_every_call_that_was_bound() -> None:
    ops = MemoryOps()
    for index in range(7):
        ops.write(index, 100 + index)
    first, second = ops.bind(5, slice(0, 3)), ops.bind(6, slice(3, 7))
    setters = ops.setters([5, 0, 1, 3, 4])
    assert len(setters) == 2, "neighbours share one, calls or not"
    for set_all in setters:
        set_all(0xFFFFFFFF)
    values = [[value for _, _, value, _ in decoded(bound)[1]] for bound in (first, second)]
    assert values == [[0xFFFFFFFF, 0xFFFFFFFF, 102], [0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 106]]
    with pytest.raises(OverflowError):
        setters[0](1 << 32)


@pytest.mark.usefixtures("library")
def test_a_bound_call_keeps_its_memory() -> None:
    def bound() -> Bound:
        ops = MemoryOps()
        ops.write(1, 2)
        return ops.bind(5)

    calls = [bound() for _ in range(50)]
    gc.collect()
    assert all(decoded(call) == (5, [(WRITE, 1, 2, 0)]) for call in calls)


@pytest.mark.usefixtures("library")
def test_a_launch_is_described_as_the_driver_reads_it() -> None:
    config = LaunchConfig((3, 1, 1), (128, 1, 1), 64, 5)
    _, (_, function, arguments, extra) = bind_launch(77, 99, config)
    assert (function.value, arguments.value, extra.value) == (77, 99, None)
    assert struct.unpack("<7I4xQQI4x", bytes(config)) == (3, 1, 1, 128, 1, 1, 64, 5, 0, 0)
    assert struct.unpack("<I4xI60x", bytes(native.DEPENDENT)) == (6, 1), "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_..."


def referred(form: str, argument: object) -> tuple[int, ...]:
    """Return the words that an argument refers to."""
    address = ctypes.cast(argument, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))


@pytest.mark.usefixtures("library")
def test_rows_are_described_as_the_driver_reads_them() -> None:
    _, (copy, stream) = bind_rows(1000, 2000, (16, 512), 12, 4, 5)
    words = referred("<2QI4x4Q2QI4x4Q2Q", copy)
    source, destination = (0, 0, 2, 0, 2000, 0, 512), (0, 0, 2, 0, 1000, 0, 16)
    assert words == (*source, *destination, 12, 4)
    assert stream.value == 5


@pytest.mark.usefixtures("library")
def test_planes_are_described_as_the_driver_reads_them() -> None:
    _, (copy, stream) = bind_planes(Box(1000, 2000, 12, 4, (16, 512), 3, (64, 5120)), 5)
    words = referred("<4QI4x4Q2Q4QI4x4Q2Q3Q", copy)
    source, destination = (*[0] * 4, 2, 0, 2000, 0, 0, 512, 10), (*[0] * 4, 2, 0, 1000, 0, 0, 16, 4)
    assert words == (*source, *destination, 12, 4, 3)
    assert stream.value == 5


def test_a_pointer_keeps_what_it_points_to() -> None:
    kept: list[Any] = [ctypes.c_uint32(3)]
    pointer = Pointer(ctypes.addressof(kept[0]), kept[0])
    kept.clear()
    gc.collect()
    assert pointer.value is not None
    assert ctypes.c_uint32.from_address(pointer.value).value == 3


def test_a_library_without_a_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    native.require_native.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    ops = MemoryOps()
    ops.write(1, 2)
    with pytest.raises(UnavailableError, match="has no cuStreamBatchMemOp_v2"):
        ops.bind(5)

"""Calls that are made elsewhere by changing what follows their buffers: as if they had been prepared there."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from typing import Any
from unittest import mock

import pytest
from marks import needs_triton
from native_driver import NativeDriver

from sidelane.execute.base import Addresses, Repetition
from sidelane.execute.cuda import driver as driver_module
from sidelane.execute.cuda import native
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import Bound, Located, Pointer, locate, movable_steps, steps_of
from sidelane.program.collective import ReduceOp, Reduction

NOTHING = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
BUFFERS = [(0, "input"), (0, "output")]
AT = Addresses({(0, "input"): 0x10_0000, (0, "output"): 0x20_0000, (0, "staging"): 0x30_0000}, ())


def memory_of(argument: Any) -> Any:
    """The memory that a call reads through an argument, in words; None for a plain value."""
    values = getattr(getattr(argument, "memory", None), "values", None)  # of a kernel
    held = values if values is not None else getattr(argument, "_obj", argument)  # of ctypes.byref
    if not isinstance(held, ctypes.Array | ctypes.Structure):
        return None
    return (ctypes.c_uint64 * (ctypes.sizeof(held) // 8)).from_address(ctypes.addressof(held))


def seen(calls: Any) -> list[Any]:
    """All that the driver reads of prepared calls."""
    found: list[Any] = []
    for _, arguments in calls:
        memories = [memory_of(argument) for argument in arguments]
        found.append([a.value if m is None else list(m) for a, m in zip(arguments, memories, strict=True)])
    return found


def put(calls: Any, following: Any, addresses: Addresses) -> None:
    """As compiled code does."""
    for each in following:
        value = (addresses.buffers[each.buffer] + each.delta) % (1 << 64)
        if each.address:
            ctypes.c_uint64.from_address(each.address).value = value
        else:
            calls[each.step][1][each.argument].value = value


def made_by(prepare: Any, addresses: Addresses) -> list[Bound]:
    buffers = addresses.buffers
    return prepare(buffers[0, "output"], buffers[0, "input"], buffers[0, "staging"])


def located(prepare: Any) -> tuple[list[Bound], Any]:
    """Calls, and the values in them that follow ``BUFFERS``."""
    calls = made_by(prepare, locate(AT, BUFFERS))
    found = movable_steps(calls, AT)
    assert found is not None
    return calls, found[1]


def real(method: str, *arguments: Any) -> Bound:
    """A call as the driver prepares it, without one."""
    bare = Driver.__new__(Driver)
    bare._api = mock.MagicMock()
    bare.__dict__["_copy_order"] = Pointer(0x77, None)
    bare.__dict__["_copy_attributes"] = None
    patches = [mock.patch.object(module, "require_native", return_value=NOTHING) for module in (native, driver_module)]
    for patch in patches:
        patch.start()
    try:
        made: Bound = getattr(bare, method)(*arguments)
        return made
    finally:
        for patch in patches:
            patch.stop()


WAYS = {
    "a copy": lambda out, in_, staging: [
        real("bind_copy", staging, in_ + 64, 100, 1),
        real("bind_copy", out, staging, 1, 1),
    ],
    "copies": lambda out, in_, staging: [
        real("bind_copies", [(out, staging, 9), (out + 16, in_, 7), (out, in_ - 8, 1)], 1)
    ],
    "rows": lambda out, in_, staging: [real("bind_rows", out + 32, staging, (64, 4096), 64, 3, 1)],
    "in place": lambda out, in_, staging: [real("bind_copy", out + 64, out, 64, 1)],
    "nothing of the caller": lambda out, in_, staging: [real("bind_record", 7, 1), real("bind_wait", 7, 1)],
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_are_changed_to_what_they_would_be(way: str) -> None:
    draw = random.Random(way)
    prepare = WAYS[way]
    calls, following = located(prepare)
    assert seen(calls) == seen(made_by(prepare, AT))
    for _ in range(20):
        there = dataclasses.replace(
            AT, buffers={**AT.buffers, **{key: 16 * draw.randrange(1 << 40) for key in BUFFERS}}
        )
        put(calls, following, there)
        assert seen(calls) == seen(made_by(prepare, there))


@needs_triton
def test_arguments_of_kernels_follow_too() -> None:
    from sidelane.execute.cuda.kernel_launch import packed_for

    def prepare(out: int, in_: int, staging: int) -> list[Bound]:
        packed = packed_for(5, [out, out + 400, in_, staging], "kernel")
        with mock.patch.object(native, "require_native", return_value=NOTHING):
            return [native.bind_launch(9, packed, native.LaunchConfig((1, 1, 1), (32, 1, 1), 0, 1))]

    calls, following = located(prepare)
    there = dataclasses.replace(AT, buffers={**AT.buffers, (0, "input"): 0x1_0000_0000, (0, "output"): 0x2_0000_0000})
    put(calls, following, there)
    assert seen(calls) == seen(made_by(prepare, there))


def test_calls_that_python_makes_do_not_move() -> None:
    assert movable_steps([real("bind_copy", 1, 2, 3, 1), (lambda: None, ())], AT) is None


def test_addresses_at_a_distance_are_located_too() -> None:
    address = Located.of(16, BUFFERS[0])
    for other, value in ((address + 48, 64), (48 + address, 64), (address - 8, 8)):
        assert (other, other.buffer) == (value, BUFFERS[0])
    assert type(address % 16) is int


def test_a_made_up_driver_is_followed_as_well() -> None:
    driver = NativeDriver()

    def prepare(out: int, in_: int, staging: int) -> list[Bound]:
        reduction = Reduction(ReduceOp.SUM, "int32")
        return [driver.bind_copies([(staging, in_, 4)], 0), driver.bind_reduce(out, [in_, staging], 4, reduction, 0)]

    _, following = located(prepare)
    assert sorted((each.buffer, each.step) for each in following) == [(BUFFERS[0], 0), (BUFFERS[0], 1), (BUFFERS[1], 1)]
    driver.stop()


def test_a_repetition_has_no_followers_of_its_own() -> None:
    assert Repetition(steps_of([]), (), (), lambda index, error: None).followers == ()  # type: ignore[arg-type, return-value]

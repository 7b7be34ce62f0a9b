"""Calls in C that are made wherever their tensors lie: what they ask before they are, and what they change."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expected import versions_of
from replay_host import Host, c_step, callback

from sidelane.collectives import call_cache
from sidelane.execute.cuda import site

CPU = -1


class Shape:
    """A call that was remembered by its shape, with a step that says where it was made.

    Args:
        host: whose.
        overlaps: whether its tensors do.
        distance: of these.
        ranges: begins and ends of symmetric memory.
        device: device of the tensors, as ``get_device`` has it.
        other: of the call, as ``Host.remember`` has it.
    """

    def __init__(
        self,
        host: Host,
        overlaps: int = 0,
        distance: int = 0,
        *,
        ranges: Sequence[int] = (),
        device: int = CPU,
        **other: Any,
    ) -> None:
        self.made: list[tuple[int, ...]] = []
        self.word = ctypes.c_uint64(0)
        _kept.append(self)
        step = c_step(callback(0, 3, self.made), 0, 5, 0)
        followers = ((0, 0, 0, 0, 0), (1, 8, 0, 2, 0), (1, (1 << 64) - 16, 0, 1, ctypes.addressof(self.word)))
        words = struct.pack(f"={len(ranges)}Q", *ranges)
        host.remember((step,), shape=(words, device, overlaps, distance, followers), **other)

    def says(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the last call was made with these tensors."""
        a, b = (tensor.data_ptr() for tensor in tensors)
        return self.made[-1] == (a, 5, b + 8) and self.word.value == b - 16


def new(count: int = 8, offset: int = 0) -> torch.Tensor:
    """A tensor at an address of its own, of which it keeps those before it."""
    made = torch.zeros(64 + count)
    first = -made.data_ptr() % 64 // 4 + offset
    _kept.append(made)
    return made[first : first + count]


_kept: list[object] = []


@pytest.fixture
def tensors(host: Host) -> tuple[torch.Tensor, ...]:
    host.tensors = new(), new(4)
    return host.tensors


@pytest.mark.usefixtures("tensors")
def test_a_shape_is_made_wherever_its_tensors_lie(host: Host) -> None:
    shape, again = Shape(host), (new(), new(4))
    for turn in range(6):
        there = again if turn % 2 else (new(), new(4))
        version, _ = versions_of(there)
        assert host.run(there) is True
        assert shape.says(there)
        assert versions_of(there)[0] == version + 1
        assert (host.replay.made, host.replay.remembered) == (turn + 1, 1)
        assert host.records[(turn + 1) % 4].number == turn + 1, "posted"
    host.remember(tensors=again)
    assert host.run(again) is True
    assert host.log == ["ran"], "as it is remembered at its addresses"
    assert host.run((new(), new(4))) is True


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("which", [0, 1])
def test_symmetric_memory_is_not_made_by_its_shape(host: Host, which: int) -> None:
    there = new(), new(4)
    begin, end = there[which].data_ptr(), there[which].data_ptr() + there[which].nbytes
    for ranges, made in (((begin, end), False), ((8, 16, begin - 64, begin, end, end + 8), True), ((0, end), False)):
        shape = Shape(host, ranges=ranges)
        assert host.run(there) is made
        assert len(shape.made) == made
    assert next(host.numbers) == 2
    assert not host.lock.locked()


@pytest.mark.usefixtures("tensors")
def test_memory_of_another_device_or_too_little_is_not_made_by_its_shape(host: Host) -> None:
    shape = Shape(host, device=3)
    assert host.run((new(), new(4))) is False, "they are on the CPU"
    shape, small = Shape(host), torch.zeros(4)
    for nbytes, made in ((8, False), (16, True)):
        small.untyped_storage().resize_(nbytes)
        assert small.data_ptr() % 16 == 0 and small.nbytes == 16
        assert host.run((new(), small)) is made
    assert len(shape.made) == 1


@pytest.mark.usefixtures("tensors")
def test_another_shape_is_not_made(host: Host) -> None:
    shape = Shape(host)
    whole = new(16)
    given: dict[str, tuple[Any, ...]] = {
        "size": (new(12), new(4)),
        "dtype": (new().view(torch.int32), new(4)),
        "alignment": (new(offset=1), new(4)),
        "overlap": (whole[:8], whole[4:8]),
        "one tensor": (new(),),
        "three": (new(), new(4), new(4)),
        "none": (new(), None),
        "empty": (new(), new(0)),
        "lists": ([new()], [new(4)]),
    }
    for name, there in given.items():
        assert host.run(there) is False, name
    assert host.run((new(), new(4)), variant="b2b") is False
    assert host.run((new(), new(4)), kind="all_to_all") is False
    assert shape.made == []


def test_tensors_that_overlap_are_a_shape_by_their_distance(host: Host) -> None:
    whole = new(16)
    host.tensors = whole[:8], whole[4:8]
    Shape(host, 1, 16)
    for distance, made in ((4, True), (0, False), (4, True)):
        whole = new(16)
        assert host.run((whole[:8], whole[distance : distance + 4])) is made
    assert host.run((new(), new(4))) is False, "these are apart"


@pytest.mark.usefixtures("tensors")
def test_a_shape_that_is_none_is_refused(host: Host) -> None:
    def remember(followers: Any, **other: Any) -> None:
        host.remember((c_step(callback(0, 1, []), 1),), shape=(b"", CPU, 0, 0, followers), **other)

    for row in (
        (2, 0, 0, 0, 0),
        (-1, 0, 0, 0, 0),
        (0, 0, 1, 0, 0),
        (0, 0, -1, 0, 0),
        (0, 0, 0, 1, 0),
        (0, 0, 0, -1, 0),
    ):
        with pytest.raises(ValueError, match="an argument of a step"):
            remember((row,))
    with pytest.raises(ValueError, match="one or two tensors"):
        remember((), lists=1)
    with pytest.raises(ValueError, match="one or two tensors"):
        remember((), tensors=(new(), new(), new()))
    with pytest.raises(TypeError):
        remember(((0, 0, 0),))
    assert host.replay.remembered == 0


def test_addresses_of_one_shape_are_the_same_to_all(host: Host) -> None:
    assert host.module.UNIT == call_cache.UNIT == site.UNIT

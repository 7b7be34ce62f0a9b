"""Launches of kernels in C: on which tensors they are made, and when not. No device, no ranks."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_host import PAYLOAD, STREAM, Host

from sidelane.native import Effect


class Launch:
    """A launch of two tensors, or of one and None, whose words are written down."""

    def __init__(self, host: Host, second: torch.Tensor | None, **other: Any) -> None:
        self.host, self.words = host, (ctypes.c_uint64 * 2)()
        self.kernel = SimpleNamespace(closed=False, last=None)
        first = torch.zeros(8)
        places = tuple(
            (type(tensor), 0 if tensor is None else tensor.data_ptr(), ctypes.addressof(self.words) + 8 * number)
            for number, tensor in enumerate((first, second))
        )
        parts: dict[str, Any] = {
            "payload": PAYLOAD,
            "steps": ((self._launch, (), None),),
            "notes": ((Effect.SET_PAIR, self.kernel, "last", "launched"),),
            "guards": ((self.kernel, "closed", False),),
            "places": places if second is not None else (places[0], (type(None), 0, 0)),
            **other,
        }
        self.launch = host.replay.launch(
            *(STREAM, "all_gather", parts["payload"], parts["steps"], parts["notes"], host.failed),
            *(parts["guards"], parts["places"]),
        )
        self.run = self.launch.run

    def _launch(self) -> int:
        assert self.host.lock.locked()
        self.host.log.append(tuple(self.words))
        return 0


def test_addresses_follow(host: Host) -> None:
    launch = Launch(host, torch.zeros(8))
    for number in range(1, 4):
        a, b = torch.zeros(8), torch.zeros(3, dtype=torch.int16)
        assert launch.run(a, b) is True
        assert host.log.pop() == (a.data_ptr(), b.data_ptr())
        assert launch.kernel.last == (number, "launched")
        assert host.records[number % 4].read() == (number, 0, PAYLOAD)
    assert host.begun.value == 3
    assert not host.lock.locked()


def test_others_are_pythons(host: Host) -> None:
    class Named(torch.Tensor):
        pass

    launch, a = Launch(host, None), torch.zeros(8)
    assert launch.run(a, None) is True
    host.log.clear()
    for others in (
        (a[1:], None),
        (a.as_subclass(Named), None),
        (torch.nn.Parameter(a), None),
        (torch.zeros(0), None),
        (a.to_sparse(), None),
        (a, a),
        (None, None),
    ):
        assert launch.run(*others) is False
    for given in ((), (a,), (a, None, None)):
        with pytest.raises(TypeError, match="allowed=2"):
            launch.run(*given)
    assert host.log == []
    assert next(host.numbers) == 2
    assert not host.lock.locked()


def test_not_now(host: Host) -> None:
    launch, a = Launch(host, None), torch.zeros(8)
    for target, name, value in (
        (host.state, "closed", True),
        (host.state, "failure", ValueError()),
        (host.state, "last", STREAM + 1),
        (host.state, "last", None),
        (launch.kernel, "closed", True),
        (host, "captured", True),
        (host, "device", host.device + 1),
    ):
        before = getattr(target, name)
        setattr(target, name, value)
        assert launch.run(a, None) is None, (name, value)
        setattr(target, name, before)
    with host.lock:
        assert launch.run(a, None) is None
    host.stream = host.state.last = STREAM + 1
    assert launch.run(a, None) is False, "on another stream"
    host.stream = host.state.last = STREAM
    host.numbers = iter(())
    assert launch.run(a, None) is None, "Python renews the flags"
    assert host.log == []


def test_what_the_driver_refuses(host: Host) -> None:
    launch, a = Launch(host, None, steps=((lambda: 7, (), None),)), torch.zeros(8)
    with pytest.raises(RuntimeError, match="refused"):
        launch.run(a, None)
    assert host.failures == [(0, 7)]
    assert launch.kernel.last is None
    assert not host.lock.locked()


def test_what_is_no_launch(host: Host) -> None:
    for wrong, match in (
        ({"payload": b"x" * 1000}, "bytes of a payload"),
        ({"places": ((torch.Tensor, 0, 0),) * 200}, "tensors"),
        ({"guards": (("closed", False),)}, "a guard is"),
        ({"steps": [1]}, "tuple"),
        ({"notes": ((99, None, "", None),)}, "an effect"),
        ({"places": (1,)}, "tuple"),
    ):
        with pytest.raises((TypeError, ValueError, SystemError), match=match):
            Launch(host, None, **wrong)
    with pytest.raises(TypeError):
        type(Launch(host, None).launch)()


def test_cycles_are_collected(host: Host) -> None:
    launch = Launch(host, None)
    launch.kernel.launch = launch.launch  # which its guard knows, as its step does the whole
    gone = weakref.ref(launch)
    del launch
    gc.collect()
    assert gone() is None

"""Repeated calls in C: everything that keeps one from being repeated, and wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from replay_host import DEVICE, STREAM, Host

from sidelane.native import Effect


def _resize(host: Host) -> None:
    host.tensors[1].resize_(3)


def _move(host: Host) -> None:
    host.tensors[1].data = torch.zeros(4)


def _retype(host: Host) -> None:
    host.tensors = (host.tensors[0], host.tensors[1].view(torch.int32))


def _transpose(host: Host) -> None:
    whole = torch.zeros(2, 2)
    host.tensors = (host.tensors[0], whole)
    host.remember()
    host.tensors = (host.tensors[0], whole.t())


def _negate(host: Host) -> None:
    host.tensors = (host.tensors[0], torch._neg_view(host.tensors[1]))


def _swap(host: Host) -> None:
    host.tensors = (host.tensors[1], host.tensors[0])


def _set(name: str, value: Any) -> Callable[[Host], None]:
    return lambda host: setattr(host.state, name, value)


REASONS: dict[str, Callable[[Host], Any]] = {
    "the tensor is smaller": _resize,
    "the tensor lies elsewhere": _move,
    "another dtype": _retype,
    "not contiguous": _transpose,
    "a view that negates": _negate,
    "the other way round": _swap,
    "one tensor": lambda host: setattr(host, "tensors", host.tensors[:1]),
    "three tensors": lambda host: setattr(host, "tensors", (*host.tensors, host.tensors[0])),
    "no tensor": lambda host: setattr(host, "tensors", (host.tensors[0], None)),
    "lists": lambda host: setattr(host, "tensors", ([host.tensors[0]], [host.tensors[1]])),
    "a sparse tensor": lambda host: setattr(host, "tensors", (host.tensors[0], host.tensors[1].to_sparse())),
    "another stream": lambda host: setattr(host, "stream", STREAM + 16),
    "the default stream": lambda host: setattr(host, "stream", 0),
    "a capture": lambda host: setattr(host, "captured", True),
    "another device": lambda host: setattr(host, "device", DEVICE + 1),
    "the last call was on another stream": _set("last", STREAM + 16),
    "no call before": _set("last", None),
    "symmetric memory was allocated": lambda host: host.generation.__setitem__(0, 1001),
    "it is closed": _set("closed", True),
    "it has failed": _set("failure", OSError("peer")),
    "another thread submits": lambda host: host.lock.acquire(),
    "all is forgotten": lambda host: host.replay.forget(),
}


NOT_NOW = {
    "another stream",
    "the default stream",
    "a capture",
    "another device",
    "the last call was on another stream",
    "no call before",
    "it is closed",
    "it has failed",
    "another thread submits",
}
"""Reasons that pass, and do not make the call another one."""


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_as_it_was_is_left_to_python(host: Host, reason: str) -> None:
    host.remember()
    assert host.run() is True, "the test would prove nothing"
    before = bytes(host.memory)
    REASONS[reason](host)
    assert host.run() is (None if reason in NOT_NOW else False)
    assert (host.log, bytes(host.memory), next(host.numbers)) == (["ran"], before, 2), "something has happened"
    assert host.lock.locked() == (reason == "another thread submits")


@pytest.mark.parametrize(
    "asked",
    [{"kind": "all_to_all"}, {"variant": "b2b"}, {"beside": "compute"}, {"details": ("sum",)}],
    ids=lambda asked: next(iter(asked)),
)
def test_another_call_with_the_same_tensors(host: Host, asked: dict[str, Any]) -> None:
    host.remember()
    assert host.run(**asked) is False
    host.remember((host.step("other"),), **asked)
    assert (host.run(**asked), host.run()) == (True, True)
    assert host.log == ["other", "ran"]


def test_a_call_is_remembered_in_one_place(host: Host) -> None:
    for number in range(20):
        host.remember((host.step(number),))
    assert host.replay.remembered == 1
    assert host.run()
    assert host.log == [19]
    host.generation[0] = 2000
    host.remember((host.step("new"),))
    assert host.replay.remembered == 1, "the old one will never come again"
    assert host.run()


def test_ctrl_c_in_a_question_gets_out(host: Host) -> None:
    class Asking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    host.tensors = (host.tensors[0], host.tensors[1].as_subclass(Asking))
    with pytest.raises(KeyboardInterrupt):
        host.run()
    assert not host.lock.locked()


def test_many_sizes_and_ways_to_run_one_call_have_places(host: Host) -> None:
    """A study tries every variant with every size, at the same two addresses."""
    names, whole = [f"variant {number}" for number in range(12)], host.tensors
    hosts = [(name, (whole[0][: 2 * n], whole[1][:n])) for name in names for n in (1, 2, 3, 4)]
    for name, host.tensors in hosts:
        host.remember((host.step(name),), variant=name)
    for name, host.tensors in hosts:
        assert host.run(variant=name), name


def test_equal_words_are_the_same_words(host: Host) -> None:
    host.remember(variant="one_shot", details=("sum", 3))
    assert host.run(variant="".join(["one", "_shot"]), details=("".join(["su", "m"]), int("3")))


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "too many arguments": ({"steps": ((1, tuple(range(9)), None),)}, ValueError),
    "no function": ({"steps": ((0, (), None),)}, ValueError),
    "a negative argument": ({"steps": ((1, (-1,), None),)}, OverflowError),
    "a step of two": ({"steps": ((1, ()),)}, TypeError),
    "an unknown effect": ({"notes": ((9, [], "", None),)}, ValueError),
    "a tally that is no list": ({"notes": ((Effect.COUNT, (1,), "", None),)}, ValueError),
    "words nowhere": ({"words": ((0, 1),)}, TypeError),
    "no tensors": ({"tensors": ()}, ValueError),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused(host: Host, what: str) -> None:
    arguments, error = WRONG[what]
    with pytest.raises(error):
        host.remember(**arguments)
    assert host.replay.remembered == 0


def test_a_replay_is_made_whole(module: ModuleType) -> None:
    with pytest.raises(TypeError):
        module.Replay()
    half = module.Replay.__new__(module.Replay)
    with pytest.raises(TypeError):
        half.run("all_gather", (), (), "auto", None)
    with pytest.raises(TypeError):
        half.remember()
    with pytest.raises(TypeError):
        Host(module).replay.run("all_gather", ())

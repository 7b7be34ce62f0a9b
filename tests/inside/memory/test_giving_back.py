"""When memory of a GPU is given back; the device is made up."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sidelane.execute.cuda.driver import HostWords
from sidelane.memory import release
from sidelane.memory.release import DeferredRelease, release_dropped

GPU = torch.device("cuda", 0)


class Memory:
    """Says when it is freed."""

    def __init__(self, freed: list[int], number: int = 0) -> None:
        self._freed, self._number = freed, number

    def __del__(self) -> None:
        self._freed.append(self._number)


class Submitter:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.armed = False

    def waits_for_the_host(self) -> bool:
        return self.armed


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that is idle, and captures nothing, with an open lane."""
    found = SimpleNamespace(idle=threading.Event(), capturing=False, lane=Submitter())
    found.idle.set()

    def synchronize(device: torch.device) -> None:
        assert device == GPU
        found.idle.wait(30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(release, "PATIENCE_S", 0.05)
    release.lanes.add(found.lane)
    return found


def test_what_is_dropped_is_given_back_when_asked_for(device: SimpleNamespace):
    freed: list[int] = []
    kept = [DeferredRelease(Memory(freed, number), GPU) for number in range(3)]
    kept.clear()
    assert freed == []
    assert release_dropped() and freed == [0, 1, 2]


def test_without_lanes_it_is_given_back_at_once(device: SimpleNamespace):
    freed: list[int] = []
    release.lanes.discard(device.lane)
    DeferredRelease(Memory(freed), GPU)
    assert freed == [0]


def test_garbage_is_given_back_at_no_moment_of_its_own(device: SimpleNamespace):
    freed: list[int] = []
    cycle: list[object] = [DeferredRelease(Memory(freed), GPU)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert freed == []
    assert release_dropped() and freed == [0]


def test_not_in_a_capture(device: SimpleNamespace):
    freed: list[int] = []
    release.lanes.discard(device.lane)
    device.capturing = True
    DeferredRelease(Memory(freed), GPU)
    assert not release_dropped() and freed == []
    device.capturing = False
    assert release_dropped() and freed == [0]


def test_not_while_a_call_waits_for_its_trigger(device: SimpleNamespace):
    freed: list[int] = []
    one = Submitter()
    release.submitters.add(one)
    one.armed = True
    DeferredRelease(Memory(freed), GPU)
    assert not release_dropped() and freed == []
    one.armed = False
    assert release_dropped() and freed == [0]
    assert not one.lock.locked()


def test_not_in_the_middle_of_a_call(device: SimpleNamespace):
    freed: list[int] = []
    one = Submitter()
    release.submitters.add(one)
    DeferredRelease(Memory(freed), GPU)
    with one.lock:
        assert not release_dropped() and freed == []
    assert release_dropped() and freed == [0]


def test_a_device_that_does_not_become_idle_is_asked_again(device: SimpleNamespace):
    freed: list[int] = []
    device.idle.clear()
    DeferredRelease(Memory(freed), GPU)
    assert not release_dropped() and not release_dropped() and freed == []
    assert sum(thread.name == f"sidelane-waits-{GPU}" for thread in threading.enumerate()) == 1
    device.idle.set()
    assert release_dropped() and freed == [0]


def test_what_gives_back_more(device: SimpleNamespace):
    """Memory that keeps other memory, and some that is dropped in the middle of it all."""
    freed: list[int] = []

    class Both(Memory):
        def __init__(self) -> None:
            super().__init__(freed, 1)
            self.other = DeferredRelease(Memory(freed, 2), GPU)

        def __del__(self) -> None:
            super().__del__()
            DeferredRelease(Memory(freed, 3), GPU)
            nested.append(release_dropped())

    nested: list[bool] = []
    DeferredRelease(Both(), GPU)
    assert not release_dropped() and freed == [1] and nested == [False]  # one at a time
    assert release_dropped() and sorted(freed) == [1, 2, 3]


def test_what_is_held_is_told_from_what_waits(device: SimpleNamespace):
    assert release_dropped()
    before, _ = release.held_bytes()
    kept = [DeferredRelease(torch.empty(1000, dtype=torch.uint8), GPU), DeferredRelease(Memory([]), GPU)]
    assert release.held_bytes() == (before + 1000, 0)
    kept.clear()
    assert release.held_bytes() == (before, 1000)
    assert release_dropped() and release.held_bytes() == (before, 0)


def in_a_fork(job: Callable[[], None]) -> int:
    """The exit status of a forked copy of this process that does a job: 0 if it ended well."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        job()
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def among_nodes() -> object:
    """Make words that a kernel among nodes polls, and return a view of them."""
    pytest.importorskip("triton")
    from sidelane.ops.scale_out.words import host_words

    return host_words(4, GPU)[1:].numpy()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
@pytest.mark.parametrize("make", [lambda: HostWords(4, GPU), among_nodes], ids=["of a driver", "among nodes"])
def test_words_that_a_stream_may_still_write_are_given_back_behind_it(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *given, pin_memory, **more: zeros(*given, **more))
    words = make()
    gc.collect()
    assert release_dropped()
    assert len(release._deferred) == 1, "a view keeps them"
    device.idle.clear()
    del words
    assert not release_dropped()
    device.idle.set()
    assert release_dropped()


def test_a_forked_process_gives_its_own_back_and_leaves_its_parents_alone(device: SimpleNamespace):
    """As ranks are made that are forked from a process which has imported everything."""
    freed: list[int] = []
    waits = [DeferredRelease(Memory(freed, 1), GPU), DeferredRelease(Memory(freed, 2), GPU)]
    waits.pop()
    armed = Submitter()
    armed.armed = True
    release.submitters.add(armed)

    def job() -> None:
        lane = Submitter()
        release.lanes.add(lane)
        mine = [DeferredRelease(Memory(freed, 3), GPU)]
        mine.clear()
        waits.clear()
        assert freed == []
        assert release_dropped() and freed == [3]
        assert release.held_bytes() == (0, 0)

    with release._giving_back:  # as another thread might
        assert in_a_fork(job) == 0
    release.submitters.discard(armed)
    waits.clear()
    assert release_dropped() and sorted(freed) == [1, 2]


def test_what_goes_when_the_names_of_its_module_are_gone_raises_nothing() -> None:
    """The interpreter sets them to None at its end, before it ends the last objects."""
    owner = DeferredRelease(Memory([]), GPU)
    with mock.patch.multiple(release, sys=None, _deferred={}):
        owner.__del__()

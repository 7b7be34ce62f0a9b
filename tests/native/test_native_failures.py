"""Repeated calls in C: failures on the way, memory and threads."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from expected import versions_of
from replay_host import Host, c_step, callback

from sidelane.memory.record import Record
from sidelane.native import Effect


@pytest.mark.parametrize("kind", ["C", "Python"])
def test_a_refused_step_ends_the_call(host: Host, kind: str) -> None:
    refused = c_step(callback(719, 0, host.log)) if kind == "C" else ((lambda: 719), (), None)
    host.remember((c_step(callback(0, 0, host.log)), refused, host.step("late")), (), ((Effect.COUNT, [0], "", None),))
    versions = versions_of(host.tensors)
    with pytest.raises(RuntimeError, match="refused"):
        host.run()
    assert host.failures == [(1, 719)]
    assert "late" not in host.log
    assert versions_of(host.tensors) == versions
    assert not host.lock.locked()


def test_what_a_step_raises_is_told(host: Host) -> None:
    def step() -> None:
        raise KeyError("inside")

    host.remember(((step, (), None), host.step("late")))
    with pytest.raises(RuntimeError, match="refused"):
        host.run()
    ((index, error),) = host.failures
    assert (index, type(error), host.log) == (0, KeyError, [])
    assert error.__traceback__ is not None
    assert not host.lock.locked()


@pytest.mark.parametrize("where", ["post", "note", "version"])
def test_errors_around_the_steps_get_out(host: Host, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(*_: Any) -> None:
        raise KeyboardInterrupt

    notes = ((Effect.APPEND_PAIR, bad, "", None),) if where == "note" else ()
    if where == "post":
        monkeypatch.setattr(Record, "write", bad)
        host.post_lock.acquire()  # so that Python posts
    if where == "version":
        with torch.inference_mode():
            host.tensors = (torch.zeros(8), host.tensors[1])
    host.remember(None, (), notes)
    if where == "version":
        assert host.run(), "tensors of inference have no version, which is no error"
    else:
        with pytest.raises(KeyboardInterrupt):
            host.run()
    assert not host.lock.locked()


class Kept:
    """Something that an entry holds, and that may hold the table of entries."""

    host: Host


def test_the_table_is_bounded_and_lets_go(host: Host) -> None:
    whole = torch.zeros(40_000)
    pairs = [(whole[4 * i : 4 * i + 2], whole[4 * i + 2 : 4 * i + 4]) for i in range(10_000)]
    kept = []
    for pair in pairs:
        owner = Kept()
        kept.append(weakref.ref(owner))
        host.remember(((host.log.append, (len(kept),), owner),), tensors=pair)
    del owner
    alive = [index for index, owner in enumerate(kept) if owner() is not None]
    assert 3900 < len(alive) == host.replay.remembered <= 4096
    for index, pair in enumerate(pairs):
        host.tensors = pair
        assert host.run() == (index in alive)
    assert host.log == [index + 1 for index in alive]
    host.replay.forget()
    assert host.replay.remembered == 0
    assert not any(owner() for owner in kept)


def test_a_cycle_is_collected(module: ModuleType) -> None:
    host = Host(module)
    owner = Kept()
    owner.host = host
    host.remember(((host.log.append, (1,), owner),))
    found = weakref.ref(owner)
    del host, owner
    gc.collect()
    assert found() is None


def test_an_entry_that_is_dropped_while_it_runs_lives_until_its_end(host: Host) -> None:
    kept = []

    def drop() -> None:
        host.replay.forget()
        whole = torch.zeros(4096)
        for index in range(600):
            host.remember((host.step(index),), tensors=(whole[4 * index : 4 * index + 4], whole[:2]))
        gc.collect()

    owner = Kept()
    kept.append(weakref.ref(owner))
    host.remember(((drop, (), owner), c_step(callback(0, 1, host.log), 9), host.step("end")))
    del owner
    assert host.run()
    assert host.log == [(9,), "end"]
    assert kept[0]() is None


class Forgetting(str):
    """Compares by way of Python, which forgets everything."""

    host: Host

    def __eq__(self, other: object) -> bool:
        self.host.replay.forget()
        gc.collect()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_entries_that_are_forgotten_while_they_are_compared(host: Host) -> None:
    gc.collect()
    gc.freeze()  # each comparison collects: what other tests have left is not to be looked through again and again
    variant = Forgetting("auto")
    variant.host = host
    for _ in range(5):
        host.remember(variant=variant)
        host.remember(variant="auto")
        assert host.run(variant=variant) in (False, True)
        assert host.replay.remembered <= 2


def test_a_blocked_driver_lets_other_threads_run(host: Host) -> None:
    entered, go = threading.Event(), threading.Event()

    def block() -> int:
        entered.set()
        assert go.wait(20)
        return 0

    host.remember((c_step(ctypes.CFUNCTYPE(ctypes.c_int)(block)),))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(host.run()))
    thread.start()
    assert entered.wait(20)
    assert host.run() is None, "the lock is held: Python waits for it"
    go.set()
    thread.join(20)
    assert answers == [True]
    assert next(host.numbers) == 2


def test_many_calls_in_any_order_leak_nothing(host: Host) -> None:
    randoms = random.Random(5)
    whole = torch.zeros(2048)
    pairs = [(whole[4 * i : 4 * i + 2], whole[4 * i + 2 : 4 * i + 4]) for i in range(400)]
    owner, word = Kept(), ctypes.c_uint32()
    before = None
    for turn in range(3000):
        host.tensors = randoms.choice(pairs)
        if not host.run():
            host.remember(
                ((int, ("0",), owner),), ((0, 1, (ctypes.addressof(word), 4, 1)),), ((Effect.COUNT, [0], "", None),)
            )
        if turn == 1500:
            before = len(gc.get_objects())
    assert before is not None
    assert len(gc.get_objects()) < before + 2000
    host.replay.forget()
    assert len(gc.get_referrers(owner)) <= 1

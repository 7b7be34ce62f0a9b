"""The CPU executor as a whole, with ranks that share this process: arming, failing, stopping, leaving nothing."""

from __future__ import annotations

import dataclasses
import gc
import threading

import pytest
from worlds import LocalWorld

from sidelane.errors import CommunicatorClosedError, PeerError
from sidelane.program.builders import build
from sidelane.program.collective import all_gather
from sidelane.program.ir import (
    Engine,
    EngineKind,
)

DMA, LOCAL = Engine(EngineKind.DMA), Engine(EngineKind.LOCAL)
NBYTES = 64


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sidelane-")]


def test_engine_threads_persist_between_invocations_and_end_with_the_executor() -> None:
    assert not threads()
    world = LocalWorld(3)
    loaded = world.load(build(all_gather([100] * 3), "pcpy"))
    assert not threads(), "no thread before there is something to run"
    loaded.run_checked(1)
    first = threads()
    assert sorted(thread.name for thread in first) == sorted(
        f"sidelane-{queue.rank}-{queue.engine}" for queue in loaded.ranks[0].program.queues
    )
    loaded.run_checked(2)
    loaded.run_checked(7)
    assert threads() == first
    for executor in world.executors:
        executor.close()
        executor.close()
    assert not threads()
    for method in (loaded.ranks[0].start, world.executors[0].load):
        with pytest.raises(CommunicatorClosedError, match="the executor was closed"):
            method(loaded.ranks[0].program, None) if method == world.executors[0].load else method(8)


def test_a_forgotten_executor_ends_its_threads() -> None:
    world = LocalWorld(2)
    world.load(build(all_gather([8] * 2), "b2b")).run_checked(1)
    assert threads()
    del world
    gc.collect()
    assert not threads()


def test_start_checks_its_arguments() -> None:
    with LocalWorld(1) as world:
        (loaded,) = world.load(build(all_gather([8]), "pcpy")).ranks
        with pytest.raises(ValueError, match=r"epochs begin at 1 \(value=0\)"):
            loaded.start(0)


def test_a_rank_without_queues_is_done_at_once() -> None:
    program = dataclasses.replace(build(all_gather([8] * 2), "pcpy"), queues=())
    with LocalWorld(2) as world:
        (pending, _) = world.load(program).start(3)
        pending.wait()
        assert pending.done()
        assert world.state.ended == [3, 3]


def test_a_start_that_a_close_overtakes_fails_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start has seen that the executor is open, and hands over its queues when it no longer is."""
    with LocalWorld(2) as world:
        loaded = world.load(build(all_gather([8] * 2), "b2b"))
        loaded.run_checked(1)
        world.executors[0].close()
        monkeypatch.setattr(world.executors[0], "check_open", lambda method: None)
        pending = loaded.ranks[0].start(2)
        with pytest.raises(CommunicatorClosedError, match="closed its executor"):
            pending.wait()
        assert not [thread for thread in threads() if thread.name.startswith("sidelane-0")]
        with pytest.raises(PeerError, match="closed its executor"):
            loaded.ranks[1].start(2).wait()

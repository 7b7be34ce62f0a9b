"""The CUDA executor when a peer or the driver fails: who is named, and that the streams drain."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from cuda_world import World, world_of
from fake_driver import FakeDriver, Stream
from hip_world import hip_world
from started import start

from sidelane.errors import PeerError, PeerTimeoutError, SidelaneError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import release, site
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.release import FLAG_CAPACITY, LANES
from sidelane.program import collective as define
from sidelane.program.builders import build
from sidelane.program.transform import freeze


@pytest.mark.parametrize("channels", [None, 1])
def test_a_peer_that_does_not_come_is_named_and_the_streams_drain(channels: int | None) -> None:
    """With one channel neither reads nor writes of other streams pass the stuck one: only a second context does."""
    with world_of(3, timeout_s=0.3, channels=channels) as world:
        loaded = world.load(build(define.all_gather([8] * 3), "b2b"))
        loaded.start()
        world.synchronize()
        pending = loaded.start(ranks=[0, 1])
        for rank, each in enumerate(pending):
            with pytest.raises(PeerTimeoutError, match=r"rank 2 .*has not come") as caught:
                each.wait()
            assert caught.value.ranks == (2,)
            assert "dma:0 command" in str(caught.value)
            with pytest.raises(PeerTimeoutError):
                world.executors[rank].check()
            with pytest.raises(PeerTimeoutError):
                start(loaded.ranks[rank], 9, world.streams[rank])
        for driver in world.drivers[:2]:
            driver.synchronize()
            assert driver.second_contexts == (channels == 1)


def test_copies_that_do_not_return_keep_no_stream_from_being_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as another thread loads a kernel, which waits for the streams that are to be let go."""
    with world_of(2, timeout_s=0.3) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        loaded.start()
        world.synchronize()
        driver, (pending,) = world.drivers[0], loaded.start(ranks=[0])
        bind_copy = driver.bind_copy

        def late(*arguments: object) -> object:
            if threading.current_thread() is not threading.main_thread():
                driver.synchronize()
            return bind_copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(driver, "bind_copy", late)
        with pytest.raises(PeerTimeoutError, match=r"rank 1 .*has not come"):
            pending.wait()
        driver.synchronize()


def test_a_peer_that_stops_half_way_is_told_apart_from_those_that_wait_for_it() -> None:
    with world_of(3, timeout_s=0.4) as world:
        loaded = world.load(build(define.all_gather([8] * 3, in_place=True), "b2b"))
        stuck = threading.Event()
        world.drivers[1].do(world.streams[1].cuda_stream, stuck.wait)  # rank 1 has called, but its stream does not move
        pending = loaded.start()
        world.monitor.begun_calls = [1, 1, 1]
        for rank in (0, 2):
            text = r"rank 1 .*has not signalled \(queue dma:0 command [01] \(signal rank"
            with pytest.raises(PeerTimeoutError, match=text) as caught:
                pending[rank].wait()
            assert caught.value.ranks == (1,)
        stuck.set()
        for driver in world.drivers:
            driver.synchronize()


def test_a_peer_that_died_is_reported_before_the_time_out() -> None:
    with world_of(2, timeout_s=60.0) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        (pending,) = loaded.start(ranks=[0])
        world.monitor.dead.add(1)
        with pytest.raises(PeerError, match=r"rank 1 died .*queue dma:0 command 1 \(wait flag") as caught:
            pending.wait()
        assert caught.value.ranks == (1,)
        world.drivers[0].synchronize()


def test_a_wait_that_lasts_is_one_line_for_its_call() -> None:
    with world_of(2, timeout_s=1000.0) as world:
        world.monitor.warn_s = 0.05
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        (pending,) = loaded.start(ranks=[0])
        while not world.monitor.warned:
            time.sleep(0.01)
        (((rank, call), (title, ranks)),) = world.monitor.warned.items()
        assert (rank, call, ranks) == (0, 1, (1,)) and title.startswith("all_gather(2 ranks")
        world.monitor.dead.add(1)
        with pytest.raises(PeerError, match="rank 1 died"):
            pending.wait()
        world.drivers[0].synchronize()


def test_ctrl_c_in_one_rank_lets_its_streams_go_and_tells_the_peers() -> None:
    """What a communicator does when Ctrl-C hits a wait: it says so to all, and closes. The time-out is far away."""
    with world_of(3, timeout_s=1000.0) as world:
        loaded = world.load(build(define.all_gather([64] * 3), "b2b"))
        pending = loaded.start(ranks=[0, 1])
        world.monitor.of(0).abort("rank 0 was interrupted", (0,))
        world.executors[0].close()
        for one in pending:
            with pytest.raises(PeerError, match="rank 0 was interrupted") as caught:
                one.wait()
            assert caught.value.ranks == (0,)
        for driver in world.drivers[:2]:
            driver.synchronize()
        # The one that comes late hears of it too: what its peers have let pass would look like their part of its call.
        while world.executors[2].watch.failure is None:
            time.sleep(0.01)
        with pytest.raises(PeerError, match="rank 0 was interrupted"):
            start(loaded.ranks[2], 1, world.streams[2])


@pytest.mark.parametrize("channels", [None, 1])
def test_a_replay_without_its_peer_drains_too(channels: int | None) -> None:
    with world_of(2, timeout_s=0.3, channels=channels) as world:
        loaded = world.load(freeze(build(define.all_gather([8] * 2), "b2b")), frozen=True)
        world.drivers[0].begin_capture()
        start(loaded.ranks[0], 1, world.streams[0])
        graph = world.drivers[0].end_capture()
        for _ in range(3):
            world.drivers[0].replay(graph)
        world.drivers[0].synchronize()
        with pytest.raises(PeerTimeoutError, match="replayed from a graph") as caught:
            world.executors[0].check()
        assert caught.value.ranks == (1,)


def test_a_call_that_a_peer_refuses_does_not_end_a_replay() -> None:
    with world_of(2, timeout_s=20.0) as world:
        loaded = world.load(freeze(build(define.all_gather([8] * 2), "b2b")), frozen=True)
        graphs = []
        for rank, driver in enumerate(world.drivers):
            driver.begin_capture()
            start(loaded.ranks[rank], 1, world.streams[rank])
            graphs.append(driver.end_capture())
        expected = loaded.fill(0)
        world.drivers[0].replay(graphs[0])
        world.monitor.refused[world.executors[0].watch.last_epoch + 1] = 1
        time.sleep(0.8)
        world.executors[0].check()
        world.drivers[1].replay(graphs[1])  # late, and as it should be
        for driver in world.drivers:
            driver.synchronize()
        loaded.check(expected)


def test_a_long_queue_in_front_is_not_a_late_peer() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        expected = loaded.fill(0)
        ends = threading.Event()
        for driver, stream in zip(world.drivers, world.streams, strict=True):
            driver.do(stream.cuda_stream, ends.wait)
        loaded.start()
        world.look_later()
        ends.set()
        world.synchronize()
        loaded.check(expected)


def test_a_driver_error_in_the_middle_breaks_the_executor_and_tells_the_peers() -> None:
    with world_of(2, timeout_s=5.0) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        world.drivers[0].fail_next = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
            start(loaded.ranks[0], 1, world.streams[0])
        with pytest.raises(SidelaneError, match=r"^all_gather\(2 ranks, .*\) b2b: rank 0 could not submit it: Driver"):
            world.executors[0].check()
        with pytest.raises(PeerError, match="CUDA_ERROR_UNKNOWN"):
            start(loaded.ranks[1], 1, world.streams[1]).wait()


REFUSAL = DriverError("CUDA_ERROR_OUT_OF_MEMORY", "a call")


def submit_up_to(world: World, number: int, error: BaseException, streams: list[int] | None = None) -> bool:
    """Start a call on rank 0, and raise before one of its calls to the driver. False if it has fewer of them.

    Streams of the call are added to ``streams``.
    """
    driver, numbers, create = world.drivers[0], itertools.count(), world.drivers[0].create_stream

    def created(**options: bool) -> int:
        made: int = create(**options)
        if streams is not None:
            streams.append(made)
        return made

    driver.create_stream = created
    loaded = world.load(build(define.all_gather([4096] * 2), "b2b"))
    real: Callable[[Iterable[Bound]], None] = driver.submit

    def submit(calls: Iterable[Bound]) -> None:
        for call in calls:
            if next(numbers) == number:
                raise error
            real([call])

    driver.submit = submit
    try:
        loaded.start(ranks=[0])
    except type(error):
        return True
    finally:
        driver.submit = real
    world.monitor.of(0).abort("the end of the test", (0,))
    return False


def becomes_idle(world: World) -> bool:
    """True once the stream of rank 0's caller has nothing left."""
    deadline = time.monotonic() + 10
    while not world.drivers[0].is_idle(world.streams[0].cuda_stream):
        if time.monotonic() > deadline:
            for flags in world.flags:  # to end it
                flags[:] = 1 << 20
            return False
        time.sleep(1e-3)
    return True


@pytest.mark.parametrize("error", [REFUSAL, KeyboardInterrupt("between two calls")], ids=["refused", "ctrl-c"])
@pytest.mark.parametrize("make", [world_of, hip_world])
def test_a_start_that_ends_half_way_lets_the_callers_stream_go_though_the_rank_closes_at_once(
    make: Callable[[int], AbstractContextManager[World]], error: BaseException
) -> None:
    for number in range(20):
        with make(2) as world:
            streams: list[int] = []
            is_half = submit_up_to(world, number, error, streams)
            # Nothing of it runs any more: the caller's next work may have the memory of these tensors.
            assert streams and (all(map(world.drivers[0].is_idle, streams)) or not is_half), f"call {number}"
            world.executors[0].close()
            assert becomes_idle(world), f"call {number}"
            if not is_half:
                break
    assert 5 < number < 20


def test_a_start_that_ends_half_way_lets_the_callers_stream_go_though_its_flags_are_freed_at_once() -> None:
    with world_of(2) as world:
        assert submit_up_to(world, 2, REFUSAL)
        world.executors[0].forget_flags([world.flags[0].ctypes.data], world.flags[0])
        assert becomes_idle(world)


def test_ctrl_c_behind_the_last_call_to_the_driver_is_one_in_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers would wait for the rest of an invocation of which the watch does not know."""
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(world.executors[0].watch, "issued", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loaded.start(ranks=[0])
        world.executors[0].close()
        assert becomes_idle(world)
        assert world.monitor.aborted is not None
        assert "rank 0 could not submit it: KeyboardInterrupt" in world.monitor.aborted[0]


def slow_lanes(
    driver: FakeDriver, lanes: Iterable[int], monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]
) -> None:
    """Let streams do some work in front of all that is submitted to them."""
    slow, put = set(lanes), driver.put

    def late(kind: str, stream: int, then: Callable[[], Any]) -> None:
        put(kind, stream, (lambda: (work(), then())) if stream in slow else then)

    monkeypatch.setattr(driver, "put", late)


def test_nothing_is_stored_once_an_executor_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is over for the watch when one of its streams is through; the others may still have all before them."""
    with world_of(2) as world:
        driver, executor = world.drivers[0], world.executors[0]
        lanes = list(driver.urgent)  # of the rescue: nothing is loaded yet
        slow_lanes(driver, lanes[1:], monkeypatch, lambda: time.sleep(0.2))
        assert submit_up_to(world, 2, REFUSAL)
        executor.close()
        assert all(map(driver.is_idle, lanes))


def test_nothing_is_read_once_an_executor_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(define.all_gather([8] * 2), "b2b")
    with world_of(2) as world:
        driver, executor = world.drivers[0], world.executors[0]
        lanes = list(driver.urgent)  # of the rescue: nothing is loaded yet
        slow_lanes(driver, lanes, monkeypatch, lambda: time.sleep(0.1))
        executor.rescue.read(program, Addresses({}, tuple(flags.ctypes.data for flags in world.flags)), 0.01)
        assert not all(map(driver.is_idle, lanes))
        executor.close()
        assert all(map(driver.is_idle, lanes))


def test_a_store_that_does_not_end_keeps_flags_and_words_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "SUBMIT_S", 0.1)
    monkeypatch.setattr(site, "stuck", [])  # else no memory of this process would be given back any more
    goes_on = threading.Event()
    with world_of(2) as world:
        driver, executor = world.drivers[0], world.executors[0]
        slow_lanes(driver, driver.urgent[1:], monkeypatch, goes_on.wait)
        assert submit_up_to(world, 2, REFUSAL)
        executor.close()
        assert executor.waits_for_the_host(), "memory would be given back"
        memory = weakref.ref(owner := Stream(0))
        executor.forget_flags([world.flags[0].ctypes.data], owner)
        del owner
        assert memory() is not None
        goes_on.set()


def test_streams_for_the_rescue_are_made_at_the_start() -> None:
    with world_of(1) as world:
        assert len(world.drivers[0].urgent) == LANES and not world.drivers[0].second_contexts


def test_whoever_waits_hears_that_a_peer_gave_up_before_it_let_its_streams_go() -> None:
    """What such a peer let go on looks like the end of a call: the watching thread may not have looked since."""
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        loaded.start()
        world.synchronize()
        for executor in world.executors:
            executor.watch.stop()  # it looks some twenty times a second
        world.monitor.of(0).abort("it waited for too long", (1,), timed_out=True)
        with pytest.raises(PeerTimeoutError, match="waited for too long"):
            world.executors[1].synchronize()
        for executor in world.executors * 2:  # to notice, and to release
            executor.watch.poll(time.monotonic())


def test_calls_that_end_between_two_looks_have_ended() -> None:
    """Memory that peers have freed is let go of behind the calls that may read there."""
    with world_of(2) as world:
        for executor in world.executors:
            executor.watch.stop()
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        for _ in range(3):
            loaded.start()
            world.synchronize()
        for executor in world.executors:
            executor.watch.poll(time.monotonic())
        assert world.monitor.ended_calls == [executor.watch.last_epoch for executor in world.executors]


def test_flags_that_are_gone_are_not_stored_to() -> None:
    program = build(define.all_gather([8] * 2), "b2b")
    with world_of(2) as world:
        driver, executor = world.drivers[0], world.executors[0]
        executor.watch.stop()
        words = [np.zeros(program.flag_count, np.uint32) for _ in range(3)]
        for each in words:
            executor.rescue.register(program, 0, Addresses({}, (each.ctypes.data,) * 2))
        executor.forget_flags([words[0].ctypes.data], words[0])
        executor.rescue.release(7)
        executor.forget_flags([words[1].ctypes.data], words[1])
        words[1][:] = 0
        executor.rescue.release(7)
        driver.synchronize()
        assert [bool(each.any()) for each in words] == [False, False, True]


def test_memory_of_flags_is_kept_while_a_store_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(define.all_gather([8] * 2), "b2b")
    monkeypatch.setattr(release, "SUBMIT_S", 0.1)
    with world_of(2) as world:
        driver, executor = world.drivers[0], world.executors[0]
        executor.watch.stop()
        words, goes_on = np.zeros(program.flag_count, np.uint32), threading.Event()
        executor.rescue.register(program, 0, Addresses({}, (words.ctypes.data,) * 2))
        driver.do(driver.urgent[3], goes_on.wait)
        executor.rescue.release(7)
        memory = weakref.ref(owner := Stream(0))
        executor.forget_flags([words.ctypes.data], owner)
        del owner
        assert memory() is not None
        goes_on.set()


def test_programs_that_were_closed_leave_room_for_others() -> None:
    program = build(define.all_gather([8] * 2), "b2b")
    with world_of(2) as world:
        rescue, each = world.executors[0].rescue, FLAG_CAPACITY // 2 // program.flag_count
        for base in range(0, 4096 * 3 * each, 4096):
            rescue.register(program, 0, Addresses({}, (base, base)))
            rescue.forget([base])
        with pytest.raises(ValueError, match="flags"):
            for base in range(0, 4096 * 3 * each, 4096):
                rescue.register(program, 0, Addresses({}, (base, base)))
        rescue.forget(range(0, 4096 * 3 * each, 4096))  # there is no such memory

"""Repeated calls on GPUs, with a made-up driver: their order, streams that change, captures in between, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_world import Loaded, World, world_of
from fake_driver import LEGACY, FakeDriver

from sidelane.collectives import backend_cuda
from sidelane.collectives.arguments import identities, identity
from sidelane.collectives.backend_cuda import CudaBackend
from sidelane.errors import CommunicatorClosedError, PeerTimeoutError
from sidelane.execute.cuda import DriverFeatures
from sidelane.execute.cuda import driver as driver_module
from sidelane.execute.cuda import loaded as loaded_module
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.machine.peers import PeerMemory
from sidelane.program import collective as define
from sidelane.program.builders import build
from sidelane.program.ir import Program
from sidelane.program.transform import freeze


class Ranks:
    """Backends of all ranks of a world, called in step."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        monkeypatch.setattr(backend_cuda, "TorchSymmetricMemory", lambda *_: None)
        monkeypatch.setattr(backend_cuda, "agree_on_peers", lambda *_: PeerMemory())
        monkeypatch.setattr(backend_cuda, "probe", lambda *_: DriverFeatures("13.0", 3, True, True))
        self.backends = []
        for rank, executor in enumerate(world.executors):
            monkeypatch.setattr(backend_cuda, "CudaExecutor", lambda *_, executor=executor: executor)
            exchange = SimpleNamespace(rank=rank, world_size=world.world_size)
            self.backends.append(CudaBackend(exchange, torch.device("cpu"), None, 1.0))  # type: ignore[arg-type]
        self.second = [driver.create_stream() for driver in world.drivers]
        self.on(0)

    def on(self, which: int) -> list[int]:
        """Make the first or the second stream of each rank the caller's; their handles."""
        handles = self.second if which else [stream.cuda_stream for stream in self.world.streams]
        for driver, handle in zip(self.world.drivers, handles, strict=True):
            driver.caller = handle
        return handles

    def call(self, loaded: Loaded, ranks: range | None = None) -> None:
        self.world.epoch += 1
        for rank in ranks or range(self.world.world_size):
            backend = self.backends[rank]
            backend.run(loaded.ranks[rank], self.world.epoch, False, (), backend.caller_stream())

    def submitted(self, rank: int = 0) -> list[tuple[str, int]]:
        """What a rank's driver was given since the last look."""
        found = list(self.world.drivers[rank].submitted)
        for driver in self.world.drivers:
            driver.submitted.clear()
        return found

    def finish(self, loaded: Loaded, expected: list[Any]) -> None:
        self.world.synchronize()
        for driver in self.world.drivers:
            driver.synchronize()
        loaded.check(expected)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    with world_of(2) as world:
        yield Ranks(world, monkeypatch)


def gather(nbytes: int = 8) -> Program:
    return build(define.all_gather([nbytes] * 2), "b2b")


def test_a_repeated_call_submits_the_same_without_working_it_out_again(
    pair: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes: list[int] = []
    choose = loaded_module.choose_route

    def count(handle: int, *rest: bool) -> Any:
        routes.append(handle)
        return choose(handle, *rest)

    monkeypatch.setattr(loaded_module, "choose_route", count)
    loaded = pair.world.load(gather())
    seen = []
    for repeat in range(5):
        expected = loaded.fill(repeat)
        pair.submitted()
        pair.call(loaded)
        seen.append(pair.submitted())
        pair.finish(loaded, expected)
    assert seen[1:] == seen[:1] * 4
    assert len(routes) == 2, "once a rank"
    ledger = pair.world.executors[0].ledger
    assert ledger.last is not None
    assert ledger.total() == ledger.last.counts * 5


def test_calls_on_another_stream_follow_the_last_one(pair: Ranks) -> None:
    loaded = pair.world.load(gather())
    pair.call(loaded)
    pair.world.synchronize()
    for repeat, which in enumerate((1, 1, 0, 0, 1)):
        before, after = pair.world.drivers[0].caller, pair.on(which)[0]
        held = threading.Event()
        pair.world.drivers[0].do(before, held.wait)  # behind the last call, in front of this one
        expected = loaded.fill(repeat)
        pair.submitted()
        pair.call(loaded)
        calls = pair.submitted()
        ordered = [("record", before), ("wait", after)]
        assert (calls[:2] == ordered) == (before != after)
        time.sleep(0.01)
        assert not pair.world.executors[0].watch.finished(pair.world.epoch), "it does not wait for its turn"
        held.set()
        pair.finish(loaded, expected)


def test_a_capture_between_two_eager_calls_disturbs_neither(pair: Ranks) -> None:
    eager, frozen = pair.world.load(gather()), pair.world.load(freeze(gather()), frozen=True)
    graphs: list[list[Callable[[], None]]] = []
    for repeat in range(3):
        expected = eager.fill(repeat)
        pair.submitted()
        pair.call(eager)
        first = pair.submitted()
        pair.finish(eager, expected)
        graphs = pair.world.captured(lambda: pair.call(frozen))
        assert pair.submitted() == [], "a capture submits nothing"
        expected = eager.fill(repeat + 10)
        pair.call(eager)
        assert pair.submitted() == first, "as before, on the stream that was captured"
        pair.finish(eager, expected)
    expected = frozen.fill(20)
    pair.world.replay(graphs)
    frozen.check(expected)
    pair.submitted()
    with pytest.raises(ValueError, match="loaded for a graph"):
        pair.call(frozen)
    assert pair.submitted() == []


def test_the_default_stream_goes_by_way_of_the_internal_one_every_time(pair: Ranks) -> None:
    loaded = pair.world.load(gather())
    for repeat in range(3):
        for driver in pair.world.drivers:
            driver.caller = LEGACY
        expected = loaded.fill(repeat)
        pair.submitted()
        pair.call(loaded)
        calls = [call for call in pair.submitted() if call[0] != "copies"]
        internal = pair.world.executors[0].internal
        assert ("record", LEGACY) in calls
        assert calls[-2:] == [("record", internal), ("wait", LEGACY)]
        pair.finish(loaded, expected)
        expected = loaded.fill(repeat + 10)
        pair.on(0)
        pair.call(loaded)
        pair.finish(loaded, expected)


def test_more_streams_than_are_remembered(pair: Ranks) -> None:
    loaded = pair.world.load(gather())
    for repeat in range(70):
        for driver in pair.world.drivers:
            driver.caller = driver.create_stream()
        expected = loaded.fill(repeat)
        pair.call(loaded)
        pair.finish(loaded, expected)


def test_a_failed_executor_takes_no_repeated_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_of(2, timeout_s=0.3) as world:
        ranks = Ranks(world, monkeypatch)
        loaded = world.load(gather())
        expected = loaded.fill(0)
        ranks.call(loaded)
        ranks.finish(loaded, expected)
        ranks.call(loaded, range(1))
        with pytest.raises(PeerTimeoutError):
            world.executors[0].synchronize()
        world.drivers[0].synchronize()
        before, counted = world.executors[0].watch.last_epoch, world.executors[0].ledger.total()
        with pytest.raises(PeerTimeoutError):
            ranks.call(loaded, range(1))
        assert (world.executors[0].watch.last_epoch, world.executors[0].ledger.total()) == (before, counted)


def test_a_refused_repetition_ends_the_executor(pair: Ranks) -> None:
    loaded = pair.world.load(gather())
    expected = loaded.fill(0)
    pair.call(loaded)
    pair.finish(loaded, expected)
    pair.world.drivers[0].fail_next = "CUDA_ERROR_UNKNOWN"
    with pytest.raises(DriverError):
        pair.call(loaded, range(1))
    assert "could not submit it" in str(pair.world.executors[0].watch.failure)


def test_a_closed_executor_takes_no_repeated_call(pair: Ranks) -> None:
    loaded = pair.world.load(gather())
    expected = loaded.fill(0)
    pair.call(loaded)
    pair.finish(loaded, expected)
    pair.world.executors[0].close()
    pair.submitted()
    with pytest.raises(CommunicatorClosedError):
        pair.call(loaded, range(1))
    assert pair.submitted() == []


def test_calls_while_another_device_is_current(pair: Ranks) -> None:
    loaded = pair.world.load(gather())
    for repeat in range(3):
        for driver in pair.world.drivers:
            driver.device_is_current = repeat == 1
        expected = loaded.fill(repeat)
        pair.call(loaded)
        assert all(driver.device_is_current == (repeat == 1) for driver in pair.world.drivers)
        for driver in pair.world.drivers:
            driver.device_is_current = True
        pair.finish(loaded, expected)


# --- where a caller stands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "device", "expected", "asked"),
    [
        (0, 3, (0, False), []),  # an error to ask, while another stream is captured
        (5, 3, (5, True), ["torch"]),
        (5, 0, (5, "by handle"), [5]),  # torch would answer for the other device
    ],
)
def test_a_place_is_asked_for_with_care(
    stream: int, device: int, expected: object, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(driver_module, "_raw_stream", lambda index: stream if index == 3 else -1)
    monkeypatch.setattr(driver_module, "_current_device", lambda: device)
    monkeypatch.setattr(driver_module, "_is_current_capturing", lambda: seen.append("torch") or True)
    monkeypatch.setattr(Driver, "is_capturing", lambda self, handle: seen.append(handle) or "by handle")
    driver = object.__new__(Driver)
    driver.index = 3
    assert driver.caller_stream() == expected
    assert seen == asked
    assert driver.is_current() == (device == 3)


# --- what makes a call the same ---------------------------------------------------------------------------------------


def test_the_identity_of_a_tensor_tells_apart_what_is_checked() -> None:
    whole = torch.zeros(4, 4)
    number = torch.zeros(1, dtype=torch.complex64)
    different = [
        whole,
        whole[1:],
        whole[:3],
        whole.t(),
        whole.view(torch.int32),
        number,
        number.conj(),
        number.conj().imag,
        number.imag,
        whole.to_sparse(),
        torch.empty(0),
        torch.empty(0, device="meta"),
        torch.empty(2, device="meta"),
        whole.untyped_storage(),
        None,
    ]
    assert len({identity(tensor) for tensor in different}) == len(different)
    assert identity(whole) == identity(whole.view(16)) == identity(whole.detach())
    pairs = [pair for one in different for pair in ((one, whole), (whole, one), (one, number), (one,))]
    # Whatever else they are: a call with two dtypes is refused, and what was refused is not remembered.
    pairs = [pair for pair in pairs if len({getattr(one, "dtype", None) for one in pair}) == 1]
    found = {identities(pair): pair for pair in pairs}
    assert len(found) == len({tuple(map(id, pair)) for pair in pairs})
    assert identities((whole, whole)) == identities((whole.view(16), whole.detach()))
    assert identities((number, number)) != identities((number, number.conj()))


def test_the_fake_driver_notices_calls_without_its_device() -> None:
    driver = FakeDriver()
    driver.device_is_current = False
    with pytest.raises(AssertionError):
        driver.submit([])
    driver.stop()


def test_a_renewed_executor_has_nothing_to_wait_for():
    """Its last invocation was more than 2**31 calls ago, or there was none: it would count as still to come."""
    with world_of(2) as world:
        for executor in world.executors:
            executor.renew(2**32 - 50)
        waiting = threading.Thread(target=world.synchronize, daemon=True)
        waiting.start()
        waiting.join(10)
        hangs = waiting.is_alive()
        for executor in world.executors:
            executor.renew(0)
        assert not hangs

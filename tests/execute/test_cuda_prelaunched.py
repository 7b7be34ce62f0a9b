"""Programs that are armed and fired, on the driver without a device: what is submitted when, and right bytes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_world import MakeWorld, World, world_of
from hip_world import hip_world
from small_programs import programs

from sidelane.collectives.backend_cuda import CudaBackend
from sidelane.errors import PeerError, PeerTimeoutError, UnavailableError
from sidelane.execute.cuda import streams
from sidelane.execute.cuda.calls import HostWord, MemOps, StreamCall, StreamPlan, WaitEvent, WaitValue, WriteValue
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.trigger import CUDA_CHANNELS, CudaTrigger
from sidelane.program import collective as define
from sidelane.program.builders import build
from sidelane.program.collective import Buffer
from sidelane.program.ir import EPOCH, Flag, Program
from sidelane.program.transform import held_by, hold, without_callers
from sidelane_lab.sim.prelaunch import prelaunch


class Armed:
    """A program on all ranks, each of which waits for its trigger on a stream of the executor."""

    def __init__(self, world: World, program: Program, ahead: Callable[[Program], Program] = hold) -> None:
        self.world, program = world, ahead(program)
        self.data = world.load(without_callers(program))
        self.triggers: list[CudaTrigger] = []
        self.addresses: list[int] = []
        for rank, loaded in enumerate(self.data.ranks):
            flag = held_by(program, rank)
            assert flag is not None
            self.addresses.append(loaded.addresses.flag(flag))
            backend = SimpleNamespace(executor=world.executors[rank], channels=CUDA_CHANNELS)
            self.triggers.append(CudaBackend.bind_trigger(backend, [(self.addresses[rank], EPOCH)], loaded))

    def _ranks(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.world.world_size) if ranks is None else ranks

    def arm(self, ranks: Sequence[int] | None = None) -> None:
        self.world.epoch += 1
        for rank in self._ranks(ranks):
            executor = self.world.executors[rank]
            executor.order(self.world.streams[rank].cuda_stream, executor.held_stream())
            self.data.ranks[rank].run(self.world.epoch, (executor.held_stream(), False))

    def fire(self, ranks: Sequence[int] | None = None, stream: int | None = None, *, follows: bool = True) -> None:
        for rank in self._ranks(ranks):
            handle = self.world.streams[rank].cuda_stream if stream is None else stream
            self.triggers[rank].fire(self.world.epoch, (handle, False), follows=follows)

    def fire_from_host(self, ranks: Sequence[int] | None = None) -> None:
        for rank in self._ranks(ranks):
            self.triggers[rank].fire_from_host(self.world.epoch)

    def follow(self, rank: int, *, fired: bool = True) -> None:
        """Let the caller's stream follow the end. Not ``fired``: a kernel of the stream fires."""
        caller = (self.world.streams[rank].cuda_stream, False)
        self.triggers[rank].follow(self.world.epoch, caller, fired=fired)

    def store(self, rank: int) -> Callable[[], None]:
        """Return the store of a kernel that fires."""
        address, epoch = self.addresses[rank], self.world.epoch

        def kernel() -> None:
            ctypes.c_uint32.from_address(address).value = epoch

        return kernel


def submitted(world: World) -> list[list[tuple[str, int]]]:
    """What the drivers were given since the last look."""
    found = [list(driver.submitted) for driver in world.drivers]
    for driver in world.drivers:
        driver.submitted.clear()
    return found


@pytest.fixture
def pair() -> Iterator[World]:
    with world_of(2) as world:
        yield world


@pytest.fixture
def hasty() -> Iterator[World]:
    """Two ranks whose time is soon over."""
    with world_of(2, timeout_s=0.5) as world:
        yield world


def gather(n: int, nbytes: int = 64, *, in_place: bool = False) -> Program:
    return build(define.all_gather([nbytes] * n, in_place=in_place), "b2b")


def without_end(held: StreamPlan, ended: WriteValue) -> StreamPlan:
    """A plan without the flag that is set at its end, in front of no word but that of the host."""
    last = held.steps[-1]
    assert isinstance(last.call, MemOps) and last.stream == 0
    at = last.call.ops.index(ended)
    assert last.call.ops[at + 1 :] in ((), (WriteValue(HostWord.FINISHED, EPOCH),))
    rest = (*last.call.ops[:at], *last.call.ops[at + 1 :])
    return dataclasses.replace(held, steps=(*held.steps[:-1], *((StreamCall(0, MemOps(rest)),) if rest else ())))


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer_writes", [True, False])
@pytest.mark.parametrize("ahead", [hold, prelaunch])
def test_a_held_plan_is_the_plan_behind_its_trigger(peer_writes: bool, ahead: Callable[[Program], Program]) -> None:
    for program in programs(4):
        plan, trigger = plan_calls(program, 1, peer_writes=peer_writes), Flag(1, program.flag_count)
        held = plan_calls(ahead(program), 1, peer_writes=peer_writes)
        if ahead is hold:
            held = without_end(held, WriteValue(Flag(1, program.flag_count + 1), EPOCH))
        assert (held.streams, held.events, held.signal_words) == (plan.streams, plan.events, plan.signal_words)
        first, *others = held.steps
        assert first.stream == 0 and isinstance(first.call, MemOps)
        assert first.call.ops[0] == WaitValue(trigger, EPOCH)
        rest = first.call.ops[1:]
        assert (*((StreamCall(0, MemOps(rest)),) if rest else ()), *others) == plan.steps
        for stream in range(1, held.streams):  # every other stream forks behind the wait
            assert isinstance(held.calls(stream)[0], WaitEvent)


# --- what is submitted when -------------------------------------------------------------------------------------------


def test_everything_goes_ahead_and_the_trigger_is_one_write(pair: World) -> None:
    armed = Armed(pair, gather(2))
    expected = armed.data.fill(1)
    submitted(pair)
    armed.arm()
    for rank, calls in enumerate(submitted(pair)):
        kinds = [kind for kind, _ in calls]
        assert kinds[:2] == ["record", "wait"], "behind the caller"
        assert set(kinds[2:]) == {"memory_ops", "copy", "record", "wait"}
        streams = {stream for _, stream in calls[1:]}
        assert pair.executors[rank].held_stream() in streams and len(streams) == 2, "one more for the own part"
        assert pair.streams[rank].cuda_stream not in streams
    time.sleep(0.05)
    assert all((output != good).any() for output, good in zip(armed.data.outputs(), expected, strict=True)), "too soon"
    armed.fire()
    for rank, calls in enumerate(submitted(pair)):
        assert calls == [("memory_ops", pair.streams[rank].cuda_stream)]
    pair.synchronize()
    armed.data.check(expected)


def test_the_trigger_follows_the_stream_and_is_followed_by_it(pair: World) -> None:
    armed = Armed(pair, gather(2))
    for repeat in range(20):
        armed.arm()
        expected = armed.data.fill(repeat)
        inputs = [armed.data.memory[rank, Buffer.INPUT] for rank in range(2)]
        made = [input.copy() for input in inputs]
        seen: dict[int, list[int]] = {}

        def produce(rank: int, inputs: list[np.ndarray] = inputs, made: list[np.ndarray] = made) -> None:
            time.sleep(0.003 * (rank + 1))
            inputs[rank][:] = made[rank]

        def consume(rank: int, seen: dict[int, list[int]] = seen) -> None:
            seen[rank] = armed.data.outputs()[rank].tolist()

        for rank, driver in enumerate(pair.drivers):
            inputs[rank][:] = 0
            stream = pair.streams[rank].cuda_stream
            driver.do(stream, functools.partial(produce, rank))
            armed.fire([rank])
            driver.do(stream, functools.partial(consume, rank))
        for driver in pair.drivers:
            driver.synchronize()
        assert [seen[rank] for rank in range(2)] == [good.tolist() for good in expected]


def test_work_behind_a_trigger_of_a_loaded_program_does_not_wait_for_its_end(pair: World) -> None:
    """The caller's stream follows a program that it has loaded where it waits for the work: the peer may fire later."""
    armed = Armed(pair, gather(2))
    expected = armed.data.fill(1)
    armed.arm()
    went_on = threading.Event()
    armed.fire([0], follows=False)
    pair.drivers[0].do(pair.streams[0].cuda_stream, went_on.set)
    assert went_on.wait(10)
    armed.fire([1], follows=False)
    pair.synchronize()
    armed.data.check(expected)


@pytest.mark.parametrize(
    ("make", "inline_bytes"), [(world_of, 0), (world_of, streams.INLINE_BYTES), (hip_world, streams.INLINE_BYTES)]
)
@pytest.mark.parametrize("peer_writes", [True, False])
def test_every_builder_moves_the_right_bytes(
    make: MakeWorld, peer_writes: bool, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "INLINE_BYTES", inline_bytes)
    with make(3, peer_writes=peer_writes) as world:
        for seed, program in enumerate(programs(3)):
            armed, plain = Armed(world, program), world.load(program)
            for repeat in range(3):
                armed.arm()
                expected = armed.data.fill(3 * seed + repeat)
                armed.fire(stream=0 if repeat == 2 and make is world_of else None)  # by way of an internal stream
                world.synchronize()
                armed.data.check(expected)
                expected = plain.fill(3 * seed + repeat + 100)
                plain.start()  # an ordinary call in between
                world.synchronize()
                plain.check(expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_one_rank_alone_has_a_trigger_too(in_place: bool) -> None:
    """In place it has nothing to do, and no queue."""
    with world_of(1) as world:
        armed = Armed(world, gather(1, in_place=in_place))
        for repeat in range(3):
            armed.arm()
            time.sleep(0.01)
            assert not world.executors[0].watch.finished(world.epoch)
            expected = armed.data.fill(repeat)
            armed.fire()
            world.synchronize()
            world.drivers[0].synchronize()
            armed.data.check(expected)


def test_the_host_fires_beside_the_callers_stream(pair: World) -> None:
    armed = Armed(pair, gather(2))
    for repeat in range(3):
        armed.arm()
        expected = armed.data.fill(repeat)
        submitted(pair)
        armed.fire_from_host()
        assert submitted(pair) == [[("memory_ops", executor.internal)] for executor in pair.executors]
        for rank in range(2):
            armed.follow(rank)
        for driver in pair.drivers:
            driver.synchronize()
        armed.data.check(expected)


def test_a_kernel_fires_by_a_store(pair: World) -> None:
    armed = Armed(pair, gather(2))
    for repeat in range(5):
        armed.arm()
        expected = armed.data.fill(repeat)
        for rank, driver in enumerate(pair.drivers):
            stream = pair.streams[rank].cuda_stream
            driver.do(stream, armed.store(rank))
            armed.follow(rank, fired=False)
        for driver in pair.drivers:
            driver.synchronize()
        armed.data.check(expected)


def test_handles_take_turns(pair: World) -> None:
    first, second = Armed(pair, gather(2)), Armed(pair, build(define.all_to_all([[8, 8], [8, 8]]), "pcpy"))
    for repeat in range(30):
        armed = (first, second)[repeat % 2]
        armed.arm()
        expected = armed.data.fill(repeat)
        armed.fire()
        if repeat % 5 == 0:
            pair.synchronize()
        for driver in pair.drivers:
            driver.synchronize()
        armed.data.check(expected)


def test_counts_say_what_was_submitted_ahead(pair: World) -> None:
    armed = Armed(pair, gather(2))
    armed.arm()
    last = pair.executors[0].ledger.last
    assert last is not None
    assert (last.variant, last.counts.peer_copies, last.counts.kernels) == ("b2b+hold", 1, 0)
    armed.fire()
    pair.synchronize()


# --- misuse and failures ----------------------------------------------------------------------------------------------


def test_streams_that_would_take_every_channel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_of(2) as world:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        with pytest.raises(UnavailableError, match="2 streams back, of 1 hardware channels"):
            Armed(world, gather(2))
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
        Armed(world, gather(2))


def test_nobody_is_late_before_the_trigger(pair: World) -> None:
    armed = Armed(pair, gather(2))
    armed.arm()
    pair.look_later()
    expected = armed.data.fill(1)
    armed.fire()
    pair.synchronize()
    armed.data.check(expected)


@pytest.mark.parametrize("arms", [True, False])
def test_a_rank_that_never_arms_or_never_fires_is_named(hasty: World, arms: bool) -> None:
    armed = Armed(hasty, gather(2))
    armed.arm([0, 1] if arms else [0])
    armed.fire([0])
    with pytest.raises(PeerTimeoutError, match=r"rank 0 waited .*rank 1 .*has not") as caught:
        hasty.executors[0].synchronize()
    assert caught.value.ranks == (1,)
    hasty.drivers[0].synchronize()
    if arms:  # it hears of that, and its armed streams drain
        with pytest.raises(PeerError):
            hasty.executors[1].synchronize()
        hasty.drivers[1].synchronize()
        with pytest.raises(PeerError):
            armed.fire([1])


def test_a_kernel_that_never_fires_is_a_time_out_of_its_own_rank(hasty: World) -> None:
    armed = Armed(hasty, gather(2))
    armed.arm()
    for rank in range(2):
        armed.follow(rank, fired=False)
    with pytest.raises(PeerTimeoutError, match="has not signalled"):
        hasty.synchronize()
    for driver in hasty.drivers:
        driver.synchronize()


def test_a_dead_peer_is_noticed_while_armed(pair: World) -> None:
    armed = Armed(pair, gather(2))
    armed.arm()
    pair.monitor.dead.add(1)
    with pytest.raises(PeerError, match="rank 1 died"):
        pair.executors[0].synchronize()
    pair.drivers[0].synchronize()
    with pytest.raises(PeerError, match="rank 1 died"):
        armed.fire([0])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_refusal_raises_when_what_was_submitted_has_ended(pair: World, number: int) -> None:
    """Of a program that is being armed, and of its trigger: the caller may free the memory of its tensors then."""
    armed, driver, executor = Armed(pair, gather(2)), pair.drivers[0], pair.executors[0]
    real, count = driver.submit, 0

    def submit(calls: Iterable[Bound]) -> None:
        nonlocal count
        for call in calls:
            count += 1
            if count == number:
                raise DriverError("CUDA_ERROR_UNKNOWN", "a call")
            real([call])

    if number == 1:
        armed.arm([0])
    driver.submit = submit
    with pytest.raises(DriverError):
        armed.fire([0]) if number == 1 else armed.arm([0])
    driver.submit = real
    assert all(map(driver.is_idle, executor._streams))


def test_a_refused_trigger_ends_it_for_all(pair: World) -> None:
    armed = Armed(pair, gather(2))
    armed.arm()
    pair.drivers[0].fail_next = "CUDA_ERROR_UNKNOWN"
    with pytest.raises(DriverError):
        armed.fire([0])
    with pytest.raises(PeerError, match="CUDA_ERROR_UNKNOWN"):
        armed.fire_from_host([1])
        # What rank 0 had armed was let go: rank 1 may have got its bytes, which are garbage, before it heard.
        for _ in range(200):
            pair.executors[1].synchronize()
            time.sleep(0.02)
    for driver in pair.drivers:
        driver.synchronize()

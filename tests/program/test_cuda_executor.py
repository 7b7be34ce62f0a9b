"""The CUDA executor, all but the driver: ranks in one process, streams as threads, host memory as device memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from fake_driver import FakeDriver, Stream

from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError, SidelaneError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import CudaExecutor, CudaProgram, DriverFeatures, plan
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.release import LANES
from sidelane.program import collective as define
from sidelane.program.build import Transport, build, variants
from sidelane.program.build.alternating import alternating
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower, prelaunch

SUM = Reduction(ReduceOp.SUM, "int32")
FLAGS = 256
SLOT = 256


class Monitor:
    """What a ControlBlock does, for ranks of one process."""

    def __init__(self, world_size: int) -> None:
        self.begun_calls = [0] * world_size
        self.ended_calls = [0] * world_size
        self.aborted: tuple[str, tuple[int, ...], bool] | None = None
        self.dead: set[int] = set()

    def of(self, rank: int) -> RankMonitor:
        return RankMonitor(self, rank)


class RankMonitor:
    def __init__(self, shared: Monitor, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def begin(self, call: int, step: str) -> None:
        self.shared.begun_calls[self.rank] = call

    def note(self, call: int, step: str) -> None:
        pass

    def end(self, call: int) -> None:
        self.shared.ended_calls[self.rank] = call

    def check(self, call: int) -> None:
        if self.shared.aborted:
            text, ranks, timed_out = self.shared.aborted
            raise (PeerTimeoutError if timed_out else PeerError)(f"a rank gave up: {text}", ranks)
        for rank in self.shared.dead:
            raise PeerError(f"rank {rank} died", (rank,))

    def absent(self, call: int) -> Sequence[int]:
        return [rank for rank, begun in enumerate(self.shared.begun_calls) if begun < call]

    def describe(self, rank: int, call: int = 0) -> str:
        return f"rank {rank}"

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        if self.shared.aborted is None:
            self.shared.aborted = (message, tuple(ranks), timed_out)


class World:
    """Ranks with their drivers, executors and memory."""

    def __init__(
        self, world_size: int, *, timeout_s: float = 30.0, peer_writes: bool = True, channels: int | None = None
    ) -> None:
        self.world_size = world_size
        self.monitor = Monitor(world_size)
        self.drivers = [FakeDriver(channels=channels) for _ in range(world_size)]
        self.own_drivers = list(self.drivers)
        features = DriverFeatures("13.0", 3, stream_memory_ops=True, peer_writes=peer_writes, copy_batches=True)
        self.executors = [
            CudaExecutor(rank, None, self.monitor.of(rank), timeout_s, features, driver=self.drivers[rank])  # type: ignore[arg-type]
            for rank in range(world_size)
        ]
        self.flags = [np.zeros(2 * FLAGS, np.uint32) for _ in range(world_size)]
        self.streams = [Stream(driver.create_stream()) for driver in self.drivers]
        self.epoch = 0

    def load(self, program: Program, *, frozen: bool = False, staging_distance: int | None = None) -> Loaded:
        return Loaded(self, program, frozen, staging_distance)

    def synchronize(self) -> None:
        for executor in self.executors:
            executor.synchronize()

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        for driver in self.own_drivers:
            driver.stop()
        self.own_drivers = []


class Loaded:
    """A program on all ranks, with its buffers."""

    def __init__(self, world: World, program: Program, frozen: bool, staging_distance: int | None = None) -> None:
        self.world, self.program, self.collective = world, program, program.collective
        self.memory = {
            (rank, buffer): np.zeros(max(1, program.buffer_bytes(rank, buffer)), np.uint8)
            for rank in range(world.world_size)
            for buffer in Buffer
        }
        if staging_distance is not None:
            staging = np.zeros(world.world_size * staging_distance, np.uint8)
            for rank in range(world.world_size):
                assert program.staging_bytes[rank] <= staging_distance
                self.memory[rank, Buffer.STAGING] = staging[rank * staging_distance :][:staging_distance]
        buffers = {place: array.ctypes.data for place, array in self.memory.items()}
        offset = 4 * FLAGS if frozen else 0
        assert program.flag_count <= FLAGS
        flags = tuple(flags.ctypes.data + offset for flags in world.flags)
        addresses = Addresses(buffers, flags, spread=staging_distance is not None)
        self.ranks: list[CudaProgram] = [executor.load(program, addresses) for executor in world.executors]

    def fill(self, seed: int) -> list[np.ndarray]:
        """Random inputs and poisoned outputs; the expected output of each rank."""
        random = np.random.default_rng(seed)
        for array in self.memory.values():
            array[:] = random.integers(0, 256, len(array))
        inputs = []
        for rank in range(self.world.world_size):
            span = self.collective.input_span(rank, 0, self.collective.input_bytes(rank))
            inputs.append(self.memory[rank, span.buffer][span.offset : span.end].copy())
        return expected_outputs(self.collective, inputs)

    def start(self, streams: Sequence[Stream] | None = None, ranks: Sequence[int] | None = None) -> list:
        self.world.epoch += 1
        streams = streams or self.world.streams
        chosen = range(self.world.world_size) if ranks is None else ranks
        return [self.ranks[rank].start(self.world.epoch, streams[rank]) for rank in chosen]

    def outputs(self) -> list[np.ndarray]:
        found = []
        for rank in range(self.world.world_size):
            span = self.collective.output_span(rank, 0, self.collective.output_bytes(rank))
            found.append(self.memory[rank, span.buffer][span.offset : span.end].copy())
        return found

    def check(self, expected: list[np.ndarray]) -> None:
        for rank, (want, have) in enumerate(zip(expected, self.outputs(), strict=True)):
            covered = want >= 0
            assert np.array_equal(want[covered], have[covered]), f"rank {rank} of {self.program.variant}"


def expected_outputs(collective: Collective, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What ``chunks`` defines, as int64 per byte; -1 where a collective leaves bytes alone."""
    outputs = [np.full(collective.output_bytes(rank), -1, np.int64) for rank in range(collective.world_size)]
    if collective.reduction:
        for chunk in collective.chunks():
            part = inputs[chunk.src_rank][chunk.src_offset : chunk.src_offset + chunk.nbytes].view(np.int32)
            place = slice(chunk.dst_offset, chunk.dst_offset + chunk.nbytes)
            before = outputs[chunk.dst_rank][place]
            total = part if before[0] < 0 else before.astype(np.uint8).view(np.int32) + part
            outputs[chunk.dst_rank][place] = total.view(np.uint8)
        if collective.kind is define.Kind.ALL_REDUCE:
            whole = np.maximum.reduce(outputs)
            outputs = [whole] * collective.world_size
        return outputs
    for chunk in collective.chunks():
        place = slice(chunk.dst_offset, chunk.dst_offset + chunk.nbytes)
        outputs[chunk.dst_rank][place] = inputs[chunk.src_rank][chunk.src_offset : chunk.src_offset + chunk.nbytes]
    return outputs


@contextlib.contextmanager
def world_of(world_size: int, **options: object) -> Iterator[World]:
    world = World(world_size, **options)  # type: ignore[arg-type]
    try:
        yield world
    finally:
        world.close()


def programs(world_size: int) -> list[Program]:
    shards = [4 * (3 + rank) for rank in range(world_size)]
    odd = [[1 + (i * 3 + j) % 5 for j in range(world_size)] for i in range(world_size)]
    even = [[8] * world_size] * world_size
    cases: list[tuple[Collective, list[Transport]]] = [
        (define.all_gather([5 * rank for rank in range(world_size)]), list(Transport)),
        (define.all_gather(shards, in_place=True), [Transport.PUSH, Transport.PULL]),
        (define.all_to_all(odd), list(Transport)),
        (define.all_to_all(even), [Transport.PUSH]),
        (define.all_to_all(even, in_place=True), [Transport.STAGED]),
        (define.broadcast(13, world_size, 1, in_place=True), [Transport.PUSH]),
        (define.scatter(shards, 0), [Transport.PULL]),
        (define.gather(shards, world_size - 1), [Transport.STAGED]),
        (define.reduce_scatter(shards, SUM), [Transport.PUSH]),
        (define.all_reduce(shards, SUM, in_place=True), [Transport.PUSH]),
    ]
    made = []
    for collective, transports in cases:
        for variant in variants(collective.kind):
            if variant == "swap" and collective.counts != tuple(map(tuple, even)):
                continue
            for transport in transports:
                if variant in ("bcst", "swap") and transport is not Transport.PUSH:
                    continue
                made.append(lower(build(collective, variant, transport), {Copy}))
    for collective, _ in cases[:-2]:
        made += [alternating(collective, 1, slot_bytes=256), alternating(collective, 0, slot_bytes=256, opening=True)]
    return made


@pytest.mark.parametrize("inline_bytes", [0, plan.INLINE_BYTES])
@pytest.mark.parametrize("channels", [None, 1])
@pytest.mark.parametrize("peer_writes", [True, False])
def test_every_builder_moves_the_right_bytes(
    peer_writes: bool, channels: int | None, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "INLINE_BYTES", inline_bytes)
    with world_of(3, peer_writes=peer_writes, channels=channels) as world:
        for seed, program in enumerate(programs(3)):
            loaded = world.load(program)
            for repeat in range(2):
                expected = loaded.fill(2 * seed + repeat)
                pending = loaded.start()
                for each in pending:
                    each.wait()
                assert all(each.done() for each in pending)
                loaded.check(expected)


def test_prelaunched_programs_move_the_right_bytes() -> None:
    with world_of(3) as world:
        for program in programs(3)[::3]:
            loaded = world.load(prelaunch(program))
            expected = loaded.fill(1)
            for rank in loaded.ranks:
                rank.arm(world.epoch + 1)
            time.sleep(0.01)
            loaded.start()
            world.synchronize()
            loaded.check(expected)
            expected = loaded.fill(2)
            loaded.start()  # arms by itself
            world.synchronize()
            loaded.check(expected)


@pytest.mark.parametrize("inline_bytes", [0, plan.INLINE_BYTES])
def test_captured_programs_are_replayed_and_their_flags_come_back(
    inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "INLINE_BYTES", inline_bytes)
    with world_of(3) as world:
        for program in [*programs(3), prelaunch(programs(3)[0])]:
            loaded = world.load(freeze(program), frozen=True)
            for driver in world.drivers:
                driver.begin_capture()
            assert all(pending.done() for pending in loaded.start())
            graphs = [driver.end_capture() for driver in world.drivers]
            for repeat in range(3):
                expected = loaded.fill(repeat)
                for driver, graph in zip(world.drivers, graphs, strict=True):
                    driver.replay(graph)
                for driver in world.drivers:
                    driver.synchronize()
                loaded.check(expected)
            assert all(kind != "rows" for driver in world.drivers for kind, _ in driver.submitted), "not mapped for it"
            assert not any(flags[FLAGS:].any() for flags in world.flags)


@pytest.mark.parametrize("distance", [None, 3 * SLOT])
@pytest.mark.parametrize(
    "collective",
    [
        define.all_gather([24] * 3),
        define.all_gather([24] * 3, in_place=True),
        define.all_to_all([[8] * 3] * 3),
        define.all_to_all([[8] * 3] * 3, in_place=True),
        define.all_gather([5, 0, 9]),
    ],
    ids=str,
)
def test_captured_turns_move_the_right_bytes_as_rows_where_slots_lie_evenly(
    collective: Collective, distance: int | None
) -> None:
    opening = alternating(collective, 0, slot_bytes=SLOT, opening=True, frozen=True)
    with world_of(3) as world:
        loaded = world.load(opening, frozen=True, staging_distance=distance)
        for driver in world.drivers:
            driver.begin_capture()
        loaded.start()
        graphs = [driver.end_capture() for driver in world.drivers]
        for repeat in range(3):
            expected = loaded.fill(repeat)
            for driver, graph in zip(world.drivers, graphs, strict=True):
                driver.submitted.clear()
                driver.replay(graph)
            for driver in world.drivers:
                driver.synchronize()
            loaded.check(expected)
            rows = [kind for kind, _ in world.drivers[0].submitted].count("rows")
            even = len({nbytes for line in collective.counts for nbytes in line}) == 1
            assert rows == (distance is not None and even)
        assert not any(flags[FLAGS:].any() for flags in world.flags)


@pytest.mark.parametrize("channels", [None, 1])
def test_frozen_programs_are_one_launch_outside_of_captures(channels: int | None) -> None:
    with world_of(3, channels=channels) as world:
        for program in programs(3):
            loaded = world.load(freeze(program), frozen=True)
            for repeat in range(4):
                expected = loaded.fill(repeat)
                streams = [Stream(0)] * 3 if repeat == 3 else None
                for driver in world.drivers:
                    driver.submitted.clear()
                loaded.start(streams)
                world.synchronize()
                for driver in world.drivers:
                    driver.synchronize()
                loaded.check(expected)
                if repeat:  # the first records
                    assert [kind for kind, _ in world.drivers[0].submitted].count("graph") == 1
            assert not any(flags[FLAGS:].any() for flags in world.flags)


def test_a_launch_without_its_peer_names_the_invocation_and_drains() -> None:
    with world_of(2, timeout_s=0.3) as world:
        loaded = world.load(freeze(build(define.all_gather([8] * 2), "b2b")), frozen=True)
        loaded.start()
        world.synchronize()
        (pending,) = loaded.start(ranks=[0])
        with pytest.raises(PeerTimeoutError, match=r"invocation 2: rank 0 waited .*rank 1") as caught:
            pending.wait()
        assert caught.value.ranks == (1,)
        world.drivers[0].synchronize()


def test_a_capture_needs_a_frozen_program() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([4, 4]), "b2b"))
        world.drivers[0].begin_capture()
        with pytest.raises(ValueError, match=r"transform\.freeze"):
            loaded.ranks[0].start(1, world.streams[0])
        assert world.drivers[0].end_capture() == []
        world.executors[0].check()


def test_the_default_stream_goes_by_way_of_an_internal_one() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([4, 4]), "b2b"))
        expected = loaded.fill(0)
        legacy = Stream(0)
        held = threading.Event()
        for driver in world.drivers:
            driver.do(0, held.wait)  # the caller's earlier work
        pending = loaded.start([legacy, legacy])
        time.sleep(0.02)
        assert not any(each.done() for each in pending), "ordered behind the default stream"
        held.set()
        for driver in world.drivers:
            done: list[bool] = []
            driver.do(0, lambda done=done, pending=pending: done.append(True))
            driver.synchronize()
        assert all(each.done() for each in pending), "the default stream is ordered behind the collective"
        loaded.check(expected)


def test_a_thousand_invocations_back_to_back_with_delays() -> None:
    random = np.random.default_rng(7)
    with world_of(3) as world:
        gather = world.load(build(define.all_gather([8] * 3), "b2b"))
        reduce = world.load(build(define.all_reduce([8] * 3, SUM), "b2b"))
        for step in range(60):
            chosen = gather if step % 2 else reduce
            expected = chosen.fill(step)
            world.epoch += 1 + int(random.integers(3))  # epochs grow by any step
            for rank in range(3):
                pause = float(random.integers(3)) * 1e-3
                world.drivers[rank].do(world.streams[rank].cuda_stream, lambda pause=pause: time.sleep(pause))
                chosen.ranks[rank].start(world.epoch, world.streams[rank])
            world.synchronize()
            chosen.check(expected)
        # Without a host in between: ranks run ahead of each other as far as the flags let them.
        expected = gather.fill(1000)
        for _ in range(300):
            gather.start()
        world.synchronize()
        gather.check(expected)


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
                loaded.ranks[rank].start(9, world.streams[rank])
        for driver in world.drivers[:2]:
            driver.synchronize()
            assert driver.second_contexts == (channels == 1)


def test_a_peer_that_stops_half_way_is_told_apart_from_those_that_wait_for_it() -> None:
    with world_of(3, timeout_s=0.4) as world:
        loaded = world.load(build(define.all_gather([8] * 3, in_place=True), "b2b"))
        stuck = threading.Event()
        world.drivers[1].do(world.streams[1].cuda_stream, stuck.wait)  # rank 1 has called, but its stream does not move
        pending = loaded.start()
        world.monitor.begun_calls = [1, 1, 1]
        for rank in (0, 2):
            text = r"rank 1 has not signalled \(queue dma:0 command [01] \(signal rank"
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
        began = time.monotonic()
        world.monitor.dead.add(1)
        with pytest.raises(PeerError, match=r"rank 1 died .*queue dma:0 command 1 \(wait flag") as caught:
            pending.wait()
        assert caught.value.ranks == (1,) and time.monotonic() - began < 30
        world.drivers[0].synchronize()


def test_ctrl_c_in_one_rank_lets_its_streams_go_and_tells_the_peers() -> None:
    """What a communicator does when Ctrl-C hits a wait: it says so to all, and closes. The time-out is far away."""
    with world_of(3, timeout_s=1000.0) as world:
        loaded = world.load(build(define.all_gather([64] * 3), "b2b"))
        pending = loaded.start(ranks=[0, 1])
        began = time.monotonic()
        world.monitor.of(0).abort("rank 0 was interrupted", (0,))
        world.executors[0].close()
        for one in pending:
            with pytest.raises(PeerError, match="rank 0 was interrupted") as caught:
                one.wait()
            assert caught.value.ranks == (0,)
        assert time.monotonic() - began < 30
        for driver in world.drivers[:2]:
            driver.synchronize()
        # The one that comes late hears of it too: what its peers have let pass would look like their part of its call.
        while world.executors[2].watch.failure is None:
            assert time.monotonic() - began < 30
            time.sleep(0.01)
        with pytest.raises(PeerError, match="rank 0 was interrupted"):
            loaded.ranks[2].start(1, world.streams[2])


@pytest.mark.parametrize("channels", [None, 1])
def test_a_replay_without_its_peer_drains_too(channels: int | None) -> None:
    with world_of(2, timeout_s=0.3, channels=channels) as world:
        loaded = world.load(freeze(build(define.all_gather([8] * 2), "b2b")), frozen=True)
        world.drivers[0].begin_capture()
        loaded.ranks[0].start(1, world.streams[0])
        graph = world.drivers[0].end_capture()
        for _ in range(3):
            world.drivers[0].replay(graph)
        world.drivers[0].synchronize()
        with pytest.raises(PeerTimeoutError, match="replayed from a graph") as caught:
            world.executors[0].check()
        assert caught.value.ranks == (1,)


def test_a_long_queue_in_front_is_not_a_late_peer() -> None:
    with world_of(2, timeout_s=0.2) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        expected = loaded.fill(0)
        for driver, stream in zip(world.drivers, world.streams, strict=True):
            driver.do(stream.cuda_stream, lambda: time.sleep(0.6))
        loaded.start()
        world.synchronize()
        loaded.check(expected)


def test_a_driver_error_in_the_middle_breaks_the_executor_and_tells_the_peers() -> None:
    with world_of(2, timeout_s=5.0) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        world.drivers[0].fail_next = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
            loaded.ranks[0].start(1, world.streams[0])
        with pytest.raises(SidelaneError, match="could not submit"):
            world.executors[0].check()
        with pytest.raises(PeerError, match="CUDA_ERROR_UNKNOWN"):
            loaded.ranks[1].start(1, world.streams[1]).wait()


def test_wrong_calls_are_refused_and_harm_nothing() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        program = loaded.ranks[0]
        for wrong in (
            lambda: program.start(0, world.streams[0]),
            lambda: program.start(1, None),
            lambda: program.arm(1),
        ):
            with pytest.raises(ValueError, match="start|arm"):
                wrong()
        with pytest.raises(ValueError, match="number of flag memories"):
            world.executors[0].load(loaded.program, Addresses({}, (1,)))
        with pytest.raises(ValueError, match="no address of buffer"):
            world.executors[0].load(loaded.program, Addresses({}, (0, 0)))
        armed = world.load(prelaunch(build(define.all_gather([8] * 2), "b2b")))
        for rank in armed.ranks:
            rank.arm(1)
        with pytest.raises(ValueError, match="armed already"):
            armed.ranks[0].arm(2)
        expected = armed.fill(0)
        armed.start()
        world.synchronize()
        armed.check(expected)
    world.close()
    with pytest.raises(CommunicatorClosedError):
        program.start(5, world.streams[0])


def test_two_executors_on_the_same_streams_do_not_disturb_each_other() -> None:
    with world_of(2) as first, world_of(2) as second:
        loaded = []
        for world in (first, second):
            world.drivers, world.streams = first.drivers, first.streams
            loaded.append(world.load(build(define.all_to_all([[4, 4], [4, 4]]), "pcpy")))
        for round_number in range(20):
            expected = [each.fill(round_number) for each in loaded]
            for each in loaded:
                each.start()
            for world in (first, second):
                world.synchronize()
            for each, want in zip(loaded, expected, strict=True):
                each.check(want)


def test_streams_for_the_rescue_are_made_at_the_start() -> None:
    with world_of(1) as world:
        assert len(world.drivers[0].urgent) == LANES and not world.drivers[0].second_contexts


def test_threads_end_with_their_executor() -> None:
    def watching() -> int:
        return sum(thread.name.startswith("sidelane-watch") for thread in threading.enumerate())

    world = World(2)
    assert watching() == 2
    world.close()
    assert watching() == 0

"""Ranks of the CUDA executor in one process, all but the driver: streams as threads, host memory as device memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from fake_driver import FakeDriver, Stream
from started import start

from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import CudaExecutor, CudaProgram, DriverFeatures
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build, variants, writes_into_outputs
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import lower

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
        self.warn_s = 30.0
        self.warned: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.refused: dict[int, int] = {}  # by whom, by call

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

    def check_present(self, call: int) -> None:
        if self.shared.aborted:
            text, ranks, timed_out = self.shared.aborted
            raise (PeerTimeoutError if timed_out else PeerError)(f"a rank gave up: {text}", ranks)
        for rank in self.shared.dead:
            raise PeerError(f"rank {rank} died", (rank,))

    def check(self, call: int) -> None:
        self.check_present(call)
        if self.shared.refused.get(call, self.rank) != self.rank:
            rank = self.shared.refused[call]
            raise PeerError(f"rank {rank} refused call {call}", (rank,))

    def absent(self, call: int) -> Sequence[int]:
        return [rank for rank, begun in enumerate(self.shared.begun_calls) if begun < call]

    def at_fault(self, ranks: Sequence[int]) -> Sequence[int]:
        return ranks

    def lasts(self, call: int, title: str, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        if waited_s > self.shared.warn_s:
            self.shared.warned.setdefault((self.rank, call), (title, tuple(ranks)))

    def describe(self, rank: int, call: int = 0) -> str:
        return f"rank {rank}"

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        if self.shared.aborted is None:
            self.shared.aborted = (message, tuple(ranks), timed_out)


class World:
    """Ranks with their drivers, executors and memory."""

    executor_type = CudaExecutor

    def __init__(
        self, world_size: int, *, timeout_s: float = 30.0, peer_writes: bool = True, channels: int | None = None
    ) -> None:
        self.world_size = world_size
        self.monitor = Monitor(world_size)
        self.drivers = [self.make_driver(channels) for _ in range(world_size)]
        self.own_drivers = list(self.drivers)
        features = self.features(peer_writes)
        self.executors = [
            self.executor_type(rank, None, self.monitor.of(rank), timeout_s, features, driver=self.drivers[rank])
            for rank in range(world_size)
        ]
        self.flags = [np.zeros(2 * FLAGS, np.uint32) for _ in range(world_size)]
        self.streams = [Stream(driver.create_stream()) for driver in self.drivers]
        self.epoch = 0
        self.owned: list[object] = []  # buffers of programs, which streams may still read after a failure

    def make_driver(self, channels: int | None) -> Any:
        return FakeDriver(channels=channels)

    def features(self, peer_writes: bool) -> DriverFeatures:
        return DriverFeatures("13.0", 3, stream_memory_ops=True, peer_writes=peer_writes, copy_batches=True)

    def load(self, program: Program, *, frozen: bool = False) -> Loaded:
        return Loaded(self, program, frozen)

    def start(self, ranks: Sequence[Any]) -> None:
        """Start a program that is loaded on all ranks."""
        self.epoch += 1
        for rank, loaded in enumerate(ranks):
            start(loaded, self.epoch, self.streams[rank])

    def captured(self, work: Callable[[], object]) -> list[Any]:
        """Return a graph of each rank of all that ``work`` starts."""
        for driver in self.drivers:
            driver.begin_capture()
        work()
        return [driver.end_capture() for driver in self.drivers]

    def replay(self, graphs: Sequence[Any]) -> None:
        """Replay a graph of each rank, and wait for the end."""
        for driver, graph in zip(self.drivers, graphs, strict=True):
            driver.replay(graph)
        for driver in self.drivers:
            driver.synchronize()

    def look_later(self) -> None:
        """Let each watch look now, and as if it were long after the time-out: whatever the machine's load is."""
        for executor in self.executors:
            for later_s in (0.0, 1e6, 2e6, 3e6):
                executor.watch.poll(time.monotonic() + later_s)
            assert executor.watch.failure is None

    def synchronize(self) -> None:
        for executor in self.executors:
            executor.synchronize()

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        for driver in self.own_drivers:
            driver.stop()
        self.own_drivers = []
        self.owned.clear()


class Loaded:
    """A program on all ranks, with its buffers."""

    def __init__(self, world: World, program: Program, frozen: bool) -> None:
        self.world, self.program, self.collective = world, program, program.collective
        self.memory = {
            (rank, buffer): np.zeros(max(1, program.buffer_bytes(rank, buffer)), np.uint8)
            for rank in range(world.world_size)
            for buffer in Buffer
        }
        world.owned.append(self.memory)
        buffers = {place: array.ctypes.data for place, array in self.memory.items()}
        offset = 4 * FLAGS if frozen else 0
        assert program.flag_count <= FLAGS
        flags = tuple(flags.ctypes.data + offset for flags in world.flags)
        addresses = Addresses(buffers, flags)
        self.ranks: list[CudaProgram] = [
            executor.load(program, addresses, captured=frozen) for executor in world.executors
        ]

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
        return [start(self.ranks[rank], self.world.epoch, streams[rank]) for rank in chosen]

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
    world = World(world_size, **options)
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
                if writes_into_outputs(variant) and transport is not Transport.PUSH:
                    continue
                made.append(lower(build(collective, variant, transport), {Copy}))
    return made

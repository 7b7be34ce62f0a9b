"""Ranks of the CUDA executor in one process, all but the driver: streams as threads, host memory as device memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fake_driver import FakeDriver, Stream
from monitor import Monitor
from started import start
from worlds import POISON, fill, output_of

from sidelane.execute.base import Addresses
from sidelane.execute.cuda import CudaExecutor, CudaProgram, DriverFeatures
from sidelane.program.collective import Buffer, ReduceOp, Reduction
from sidelane.program.ir import Program

SUM = Reduction(ReduceOp.SUM, "int32")
FLAGS = 256
SLOT = 256


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
        """Write inputs and poison all else; the expected output of each rank."""
        for array in self.memory.values():
            array[:] = POISON
        for rank in range(self.world.world_size):
            places = (torch.from_numpy(self.memory[rank, buffer]) for buffer in (Buffer.INPUT, Buffer.OUTPUT))
            fill(self.collective, rank, seed, *places)
        return [output_of(self.collective, rank, seed).numpy() for rank in range(self.world.world_size)]

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
            assert np.array_equal(want, have), f"rank {rank} of {self.program.variant}"


MakeWorld = Callable[..., contextlib.AbstractContextManager[World]]
"""``world_of`` here, or ``hip_world``."""


@contextlib.contextmanager
def world_of(world_size: int, **options: object) -> Iterator[World]:
    world = World(world_size, **options)
    try:
        yield world
    finally:
        world.close()

"""Ranks of the HIP executor on the stand-in runtime (``hip/standin.c``), in one process or in several."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cuda_world import World
from fake_driver import FakeHostWords, Stream
from made_up_gpus import OwnedMemory

from sidelane import Communicator
from sidelane.collectives import backend_cuda, backend_hip
from sidelane.execute.base import CallerStream
from sidelane.execute.cuda import DriverFeatures
from sidelane.execute.cuda.native import Bound
from sidelane.execute.hip import HipDriver, HipExecutor
from sidelane.execute.hip.runtime import Runtime
from sidelane.native.build import find_compiler
from sidelane.session import communicator, making

UNITS = 304
LDS_BYTES = 64 << 10
SOURCE = Path(__file__).parent / "hip" / "standin.c"


@functools.cache
def standin() -> ctypes.CDLL:
    """Compile and load the stand-in."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the stand-in for the HIP runtime needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "standin.so"
        subprocess.run([*compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-lpthread"], check=True)
        return ctypes.CDLL(str(built))


class StandinDriver(HipDriver):
    """A driver whose runtime is the stand-in; what torch for ROCm would say is made up.

    Args:
        queues: number of hardware queues that the streams of a priority share; None: each stream has its own.
    """

    numbers = itertools.count()

    def __init__(self, queues: int | None = None) -> None:
        self.library = standin()
        self.number, self.queues = next(self.numbers), queues or 0
        self.caller, self.captured, self.spares = 0, False, 0
        self.allocated: list[int] = []
        self.owned: list[object] = []  # what streams may write until they have ended, whoever has closed meanwhile
        super().__init__(torch.device("cuda", 0), Runtime(self.library))

    def make_stream(self, priority: int) -> int:
        self.library.standin_share(self.number, self.queues)
        return super().make_stream(priority)

    def second_context(self) -> Any:
        self.spares += 1
        return super().second_context()

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def is_current(self) -> bool:
        return True

    def caller_stream(self) -> CallerStream:
        return self.caller, self.is_capturing(self.caller)

    def questions(self) -> None:
        return None

    def host_words(self, count: int) -> Any:
        self.owned.append(words := FakeHostWords(count))
        return words

    def device_words(self, count: int) -> tuple[int, object]:
        return self.allocate(4 * count), None

    def allocate(self, nbytes: int) -> int:
        self.allocated.append(super().allocate(nbytes))
        return self.allocated[-1]

    def attribute(self, name: str) -> int:
        made_up = {"MULTIPROCESSOR_COUNT": UNITS, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": LDS_BYTES}
        return made_up[name] if name in made_up else super().attribute(name)

    def bind_reduce(self, dst: int, srcs: Sequence[int], nbytes: int, reduction: Any, stream: int) -> Bound:
        if not nbytes:
            return lambda: 0, ()
        sources = (ctypes.c_uint64 * len(srcs))(*srcs)
        divisor = 0 if reduction.dtype != "float32" else len(srcs) if reduction.op == "avg" else 1
        arguments = (ctypes.c_void_p(dst), sources, ctypes.c_uint(len(srcs)), ctypes.c_size_t(nbytes))
        return self.library.standin_add, (*arguments, ctypes.c_uint(divisor), ctypes.c_void_p(stream))

    def array(self, nbytes: int) -> np.ndarray:
        """Return device memory as an array."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.allocate(nbytes)))

    @contextlib.contextmanager
    def capturing(self, stream: int) -> Iterator[list[int]]:
        """Capture what is submitted; the list holds the executable graph afterwards."""
        made: list[int] = []
        graph = ctypes.c_void_p()
        self.runtime.call("hipStreamBeginCapture", stream, 2)
        try:
            yield made
        finally:
            self.runtime.call("hipStreamEndCapture", stream, ctypes.addressof(graph))
        made.append(int(self.runtime.query(ctypes.c_void_p, "hipGraphInstantiate", graph, None, None, 0)))
        self.runtime.call("hipGraphDestroy", graph)

    def capture(self, stream: int, work: Callable[[], object]) -> int:
        """Return an executable graph of what ``work`` submits."""
        with self.capturing(stream) as made:
            work()
        return made[0]

    def stop(self, patience_s: int = 10) -> None:
        """End all streams, which must have nothing left that blocks: no thread may touch memory that a test frees."""
        assert not self.library.standin_stop(self.number, patience_s), "a stream is stuck"
        self.owned.clear()


@contextlib.contextmanager
def hip_gpus() -> Iterator[StandinDriver]:
    """Communicators of this rank are on an AMD GPU that is the stand-in; symmetric memory is that of CPU ranks."""
    driver = StandinDriver()
    driver.caller = driver.create_stream()

    def in_order(method: Callable[..., object]) -> Callable[..., None]:
        """Return a method of Communicator that waits, unless it is captured: memory of the host is given back early."""

        def call(comm: Communicator, *arguments: Any, **options: Any) -> None:
            *asked, _ = arguments
            method(comm, *asked, False, **options)  # an asynchronous call takes a stream of torch's
            if not driver.is_capturing(driver.caller):
                comm.synchronize()
                driver.runtime.call("hipStreamSynchronize", driver.caller)

        return call

    features = DriverFeatures("6.4", 16, stream_memory_ops=True, peer_writes=True)
    patches = (
        mock.patch.object(backend_cuda, "TorchSymmetricMemory", lambda exchange, *_: OwnedMemory(exchange, driver)),
        mock.patch.object(backend_hip, "probe", return_value=features),
        mock.patch.object(backend_hip, "HipDriver", return_value=driver),
        mock.patch.object(backend_hip.HipBackend, "_make_exported", return_value=None),
        mock.patch.object(backend_hip.HipBackend, "wait_for_stores"),
        mock.patch.object(communicator, "make_backend", backend_hip.HipBackend),
        mock.patch.object(making, "choose_device", return_value=torch.device("cpu")),
        mock.patch.object(Communicator, "_call", in_order(Communicator._call)),
        mock.patch.object(Communicator, "_run", in_order(Communicator._run)),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield driver
    driver.stop()


class HipWorld(World):
    """See ``cuda_world.World``."""

    executor_type = HipExecutor

    def __init__(self, world_size: int, **options: Any) -> None:
        self.graphs: list[tuple[StandinDriver, int]] = []
        super().__init__(world_size, **options)

    def close(self) -> None:
        for driver, graph in self.graphs:
            driver.destroy_graph(graph)
        self.graphs.clear()
        super().close()

    def make_driver(self, channels: int | None) -> StandinDriver:
        return StandinDriver(channels)

    def features(self, peer_writes: bool) -> DriverFeatures:
        return DriverFeatures("6.4", 16, stream_memory_ops=True, peer_writes=peer_writes)

    def captured(self, work: Callable[[], object]) -> list[int]:
        with contextlib.ExitStack() as captures:
            found = [captures.enter_context(driver.capturing(stream.cuda_stream)) for driver, stream in self.streamed()]
            work()
        self.graphs += [(driver, graph) for (driver, _), (graph,) in zip(self.streamed(), found, strict=True)]
        return [graph for (graph,) in found]

    def replay(self, graphs: Sequence[int]) -> None:
        for (driver, stream), graph in zip(self.streamed(), graphs, strict=True):
            driver.submit([driver.bind_graph(graph, stream.cuda_stream)])
        deadline = time.monotonic() + 30
        while not all(driver.is_idle(stream.cuda_stream) for driver, stream in self.streamed()):
            assert time.monotonic() < deadline, "a graph does not end"
            time.sleep(1e-4)

    def streamed(self) -> list[tuple[StandinDriver, Stream]]:
        """Each rank's driver, and its caller's stream."""
        return list(zip(self.drivers, self.streams, strict=True))


@contextlib.contextmanager
def hip_world(world_size: int, **options: Any) -> Iterator[HipWorld]:
    world = HipWorld(world_size, **options)
    try:
        yield world
    finally:
        world.close()

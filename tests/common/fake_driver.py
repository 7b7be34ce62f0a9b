"""A driver without a device: streams are threads, device memory is host memory, graphs are lists of calls.

It has the methods of ``sidelane.execute.cuda.driver.Driver`` that executors use, so that a whole ``CudaExecutor``, its
watching thread included, runs on any machine. With ``channels=1`` all streams share one first-in-first-out channel, the
worst case of what CUDA may do.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sidelane.execute.base import CallerStream, Questions
from sidelane.execute.boxes import Box
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.native import Bound

LEGACY = 0
WORD = 0xFFFFFFFF
NOT_READY = 600


class FakeHostWords:
    def __init__(self, count: int) -> None:
        self.array = np.zeros(count, np.uint32)
        self.address = self.array.ctypes.data


class FakeMemoryOps:
    def __init__(self) -> None:
        self.ops: list[tuple[str, int, ctypes.c_uint32]] = []

    def write(self, address: int, value: int) -> None:
        self.ops.append(("write", address, ctypes.c_uint32(value)))

    def wait(self, address: int, value: int, *, equal: bool) -> None:
        self.ops.append(("equal" if equal else "reached", address, ctypes.c_uint32(value)))

    def __len__(self) -> int:
        return len(self.ops)

    def strided_words(self, indices: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(ctypes.addressof(self.ops[index][2]), 4, 1) for index in indices]

    def setters(self, indices: Sequence[int]) -> list[Callable[[int], None]]:
        def set_all(word: int) -> None:
            assert 0 <= word <= WORD, "memory operations have 32 bits"
            for index in indices:
                self.ops[index][2].value = word

        return [set_all]


class Stream:
    """Something that holds a handle, as torch's streams do."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class FakeDriver:
    def __init__(self, *, channels: int | None = None) -> None:
        self.index = 0
        self.submitted: list[tuple[str, int]] = []
        self.graph: list[Callable[[], None]] | None = None
        self.captures = 0
        self.urgent: list[int] = []
        self.fail_next: str | None = None
        self.second_contexts = 0
        self.allocated: dict[int, FakeHostWords] = {}
        self.owned: list[object] = []  # what streams may write until they have ended, whoever has closed meanwhile
        self.caller = LEGACY  # the caller's current stream
        self.device_is_current = True
        self.is_copy = False  # this process is a forked one
        self.graphs: dict[int, tuple[list[Callable[[], None]], int]] = {}
        self._all_channels: list[_Channel] = []
        self._channels = [self.new_channel() for _ in range(channels)] if channels else None
        self.streams: dict[int, _Channel] = {}
        self.pending: dict[int, int] = {}
        self.events: dict[int, threading.Event] = {}
        self.reached_ns: dict[int, int] = {}
        self.numbers = iter(range(100, 1_000_000))
        self._lock = threading.Lock()
        self._add_stream(LEGACY)

    # --- what Driver has ----------------------------------------------------------------------------------------------

    def create_stream(self, *, urgent: bool = False) -> int:
        handle = next(self.numbers)
        self._add_stream(handle, urgent=urgent)
        return handle

    def destroy_stream(self, stream: int) -> None:
        del self.streams[stream]

    def create_event(self, *, timing: bool = False) -> int:
        handle = next(self.numbers)
        self.events[handle] = threading.Event()
        return handle

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def host_words(self, count: int) -> FakeHostWords:
        self.owned.append(words := FakeHostWords(count))
        return words

    def device_words(self, count: int) -> tuple[int, object]:
        words = self.host_words(count)
        return words.address, words

    def allocate(self, nbytes: int) -> int:
        memory = FakeHostWords(-(-nbytes // 4))
        self.allocated[memory.address] = memory
        return memory.address

    def free(self, address: int) -> None:
        del self.allocated[address]

    def upload(self, address: int, values: np.ndarray, stream: int) -> None:
        done = threading.Event()
        values = values.copy()

        def run() -> None:
            ctypes.memmove(address, values.ctypes.data, values.nbytes)
            done.set()

        self._enqueue(stream, run)
        assert done.wait(10), "an upload waits for what does not end"

    def has_passed(self, event: int) -> bool:
        return self.events[event].is_set()

    def memory_ops(self) -> FakeMemoryOps:
        return FakeMemoryOps()

    def bind_memory_ops(self, ops: FakeMemoryOps, stream: int, part: slice = slice(None)) -> Bound:
        def submit() -> None:
            if stream == LEGACY:
                raise DriverError("CUDA_ERROR_NOT_SUPPORTED", "cuStreamBatchMemOp")
            now = [(kind, address, word.value) for kind, address, word in ops.ops[part]]
            self.put("memory_ops", stream, lambda: _run_memory_ops(now))

        return submit, ()

    def bind_copy(self, dst: int, src: int, nbytes: int, stream: int) -> Bound:
        return lambda: self.put("copy", stream, lambda: _move(dst, src, nbytes)), ()

    def bind_copies(self, copies: Sequence[tuple[int, int, int]], stream: int) -> Bound:
        def run() -> None:
            for dst, src, nbytes in reversed(copies):  # in no order among themselves
                _move(dst, src, nbytes)

        def submit() -> None:
            if stream == LEGACY:
                raise DriverError("CUDA_ERROR_NOT_SUPPORTED", "cuMemcpyBatchAsync")
            self.put("copies", stream, run)

        return submit, ()

    def bind_rows(self, dst: int, src: int, pitches: tuple[int, int], nbytes: int, rows: int, stream: int) -> Bound:
        def run() -> None:
            for row in range(rows):
                ctypes.memmove(dst + row * pitches[0], src + row * pitches[1], nbytes)

        return lambda: self.put("rows", stream, run), ()

    def bind_planes(self, box: Box, stream: int) -> Bound:
        def run() -> None:
            for plane in range(box.planes):
                for row in range(box.rows):
                    dst, src = (
                        at + plane * distance + row * pitch
                        for at, distance, pitch in zip((box.dst, box.src), box.distances, box.pitches, strict=True)
                    )
                    ctypes.memmove(dst, src, box.width)

        assert all(distance % pitch == 0 for distance, pitch in zip(box.distances, box.pitches, strict=True))
        return lambda: self.put("planes", stream, run), ()

    def bind_record(self, event: int, stream: int, *, external: bool = False) -> Bound:
        def submit() -> None:
            reached = self.events[event] = threading.Event()

            def run() -> None:
                self.reached_ns[event] = time.perf_counter_ns()
                reached.set()

            self.put("record", stream, run)

        return submit, ()

    def bind_wait(self, event: int, stream: int) -> Bound:
        return lambda: self.put("wait", stream, self.events[event].wait), ()

    def bind_reduce(self, dst: int, srcs: Sequence[int], nbytes: int, reduction: Any, stream: int) -> Bound:
        def run() -> None:
            total = sum((_ints(src, nbytes).copy() for src in srcs[1:]), start=_ints(srcs[0], nbytes).copy())
            _ints(dst, nbytes)[:] = total

        if not nbytes:  # loads the kernel; a capture does not see it
            return lambda: None, ()
        return lambda: self.put("reduce", stream, run), ()

    def make_graph(self, calls: Iterable[Bound], stream: int) -> int:
        self.begin_capture()
        self.submit(calls)
        handle = next(self.numbers)
        self.graphs[handle] = (self.end_capture(), stream)
        return handle

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def has_normal_priority(self, stream: int) -> bool:
        return stream not in self.urgent

    def questions(self) -> Questions:
        functions: dict[Callable[..., int | None], int] = {
            lambda event, stream: self.bind_record(event, stream)[0](): 2,
            lambda stream, event, _: self.bind_wait(event, stream)[0](): 3,
            lambda event: 0 if self.has_passed(event) else NOT_READY: 1,
            lambda found, _: _set(found, ctypes.c_uint64, self.create_event()): 2,
            self.destroy_event: 1,
            lambda stream, found: _set(found, ctypes.c_int, self.is_capturing(stream)): 2,
        }
        streams = addresses_of([c_function(*each) for each in functions.items()])
        own = (lambda index: self.caller, lambda: self.is_capturing(self.caller), self._device, self.index)
        return Questions(*own, streams)

    def _device(self) -> int:
        assert not self.is_copy, "torch.cuda raises in a forked copy"
        return self.index if self.device_is_current else self.index + 1

    def bind_graph(self, graph: int, stream: int, *, owner: object = None) -> Bound:
        """The recorded calls run on the stream of their recording, between two events of the launching stream."""
        calls, inner = self.graphs[graph]

        def submit(kept: object = owner) -> None:
            self.submitted.append(("graph", stream))
            before, after = threading.Event(), threading.Event()
            if stream != inner:
                self._enqueue(stream, before.set)
                self._enqueue(inner, before.wait)
            self.replay(calls)
            if stream != inner:
                self._enqueue(inner, after.set)
                self._enqueue(stream, after.wait)

        return submit, ()

    def submit(self, calls: Iterable[Bound]) -> None:
        assert self.device_is_current, "calls go to the device of the caller's context"
        for function, arguments in calls:
            if self.fail_next:
                name, self.fail_next = self.fail_next, None
                raise DriverError(name, "a call")
            if self.graph is not None:
                self.graph.append(function.captured() if hasattr(function, "captured") else function)
            else:
                function(*arguments)

    def is_capturing(self, stream: int) -> bool:
        return self.graph is not None

    def caller_stream(self) -> CallerStream:
        return self.caller, self.graph is not None

    def is_current(self) -> bool:
        return self.device_is_current

    def capture_of(self, stream: int) -> int:
        return self.captures if self.graph is not None else 0

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        before, self.device_is_current = self.device_is_current, True
        yield
        self.device_is_current = before

    def elapsed_us(self, first: int, second: int) -> float:
        return (self.reached_ns[second] - self.reached_ns[first]) / 1e3

    def relaxed_capture(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def attach_thread(self) -> None:
        pass

    def second_context(self) -> FakeSecondContext:
        self.second_contexts += 1
        return FakeSecondContext(self)

    def is_idle(self, stream: int) -> bool:
        with self._lock:
            return self.pending[stream] == 0

    # --- for tests ----------------------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        self.captures += 1
        self.graph = []

    def end_capture(self) -> list[Callable[[], None]]:
        graph, self.graph = self.graph, None
        assert graph is not None
        return graph

    def replay(self, graph: list[Callable[[], None]]) -> None:
        """Run a graph once more, each call behind what its stream has, events afresh."""
        for function in graph:
            function()

    def synchronize(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while any(self.pending[stream] for stream in self.streams):
            assert time.monotonic() < deadline, "streams do not get on"
            time.sleep(1e-3)

    def stop(self) -> None:
        """End all streams, which must have nothing left that blocks: no thread may touch memory that a test frees."""
        for channel in self._all_channels:
            channel.stop()
        self.owned.clear()

    def do(self, stream: int, work: Callable[[], Any]) -> None:
        """Put a user's own work on a stream."""
        self._enqueue(stream, work)

    def _add_stream(self, handle: int, *, urgent: bool = False) -> None:
        if urgent:
            self.urgent.append(handle)
        if self._channels:  # priorities share them
            self.streams[handle] = self._channels[handle % len(self._channels)]
        else:
            self.streams[handle] = self.new_channel()
        self.pending[handle] = 0

    def new_channel(self) -> _Channel:
        self._all_channels.append(_Channel())
        return self._all_channels[-1]

    def put(self, kind: str, stream: int, work: Callable[[], Any]) -> None:
        self.submitted.append((kind, stream))
        self._enqueue(stream, work)

    def _enqueue(self, stream: int, work: Callable[[], Any]) -> None:
        with self._lock:
            self.pending[stream] += 1

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self.pending[stream] -= 1

        self.streams[stream].put(run)


class FakeSecondContext:
    """Has a channel of its own."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._handle = next(driver.numbers)
        driver.streams[self._handle] = driver.new_channel()
        driver.pending[self._handle] = 0

    def submit(self, batches: Sequence[FakeMemoryOps]) -> None:
        self._driver.submit(self._driver.bind_memory_ops(batch, self._handle) for batch in batches)

    def is_idle(self) -> bool:
        return self._driver.is_idle(self._handle)

    def close(self) -> None:
        self._driver.destroy_stream(self._handle)


class _Channel:
    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive(), "a stream is stuck"

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _move(dst: int, src: int, nbytes: int) -> None:
    """Move bytes with ``memmove``, which AddressSanitizer looks at, but store a word once.

    The C library stores four bytes twice. A flag that its waiter resets in between would be set again.
    """
    if nbytes != 4:
        ctypes.memmove(dst, src, nbytes)
        return
    word = ctypes.c_uint32()
    for address in (dst, src):
        ctypes.memmove(ctypes.addressof(word), address, 4)
    ctypes.c_uint32.from_address(dst).value = word.value


def _run_memory_ops(ops: list[tuple[str, int, int]]) -> None:
    word = ctypes.c_uint32()
    here = ctypes.addressof(word)
    for kind, address, value in ops:
        if kind == "write":
            word.value = value
            _move(address, here, 4)
            continue
        pause = 0.0
        while ctypes.memmove(here, address, 4) and not (
            word.value == value if kind == "equal" else (word.value - value) & WORD < 0x80000000
        ):
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)


def _ints(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.int32)


def c_function(work: Callable[..., int | None], arguments: int) -> Any:
    """Return a C function of integers, whose result is what ``work`` returns, or 0."""

    def call(*values: int | None) -> int:
        return work(*(value or 0 for value in values)) or 0

    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * arguments)(call)


def addresses_of(functions: Sequence[Any]) -> tuple[object, ...]:
    """Return C functions, to keep them, and the address of each."""
    return functions, *(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


def _set(address: int, kind: Any, value: int) -> None:
    kind.from_address(address).value = value

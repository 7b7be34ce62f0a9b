"""Resources that programs and kernels of one rank's executor share: driver, streams, words, watch and ledger."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from sidelane import forks
from sidelane.device.layout import MAX_BLOCKS
from sidelane.errors import CommunicatorClosedError, SidelaneError
from sidelane.execute.base import Addresses, Repetition
from sidelane.execute.cuda.bind import Moving
from sidelane.execute.cuda.calls import DEFAULT_STREAMS, HostWord, Route, StreamPlan, counts_of
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.native import Bound, movable_steps, steps_of
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.execute.cuda.release import FlagRescue
from sidelane.execute.cuda.tables import DeviceTable, DeviceTables
from sidelane.execute.cuda.watch import BUSY, FINISHED, HOST_WORDS, STARTED, STATUS, DeviceWatch
from sidelane.execute.submitted import Counts, Entry, SubmissionLedger
from sidelane.memory.control import ControlBlock
from sidelane.memory.release import submitters
from sidelane.native import Effect, Note
from sidelane.program.caching import Once
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelCall, KernelProgram
from sidelane.program.wraparound import WORD_BYTES, WORD_MASK


class Plans:
    """Cache of the plans of programs on this rank's streams.

    A call at new addresses is bound anew; without the cache most of that time would go into ordering the commands.

    Args:
        rank: rank whose queues are planned.
        features: features of the driver.
    """

    def __init__(self, rank: int, features: DriverFeatures) -> None:
        self._rank, self._features = rank, features
        self._plans = {captured: Once(functools.partial(self._plan, captured)) for captured in (False, True)}
        self._counts = {route: Once(functools.partial(counts_of, route=route)) for route in Route}

    def of(self, program: Program, captured: bool = False) -> StreamPlan:
        """Return the plan of a program, for a graph or not.

        Raises:
            ValueError: the driver does not support a command of the program.
        """
        return self._plans[captured](program)

    def counts(self, plan: StreamPlan, route: Route) -> Counts:
        """Return the commands that an invocation by a route submits."""
        return self._counts[route](plan)

    def _plan(self, captured: bool, program: Program) -> StreamPlan:
        return plan_calls(
            program,
            self._rank,
            peer_writes=bool(self._features.peer_writes),
            copy_batches=self._features.copy_batches,
            in_rows=self._features.rows_by_engines,
            captured=captured,
        )


MOST = 512
"""Largest number of programs and kernels of which a loaded one is kept; the oldest is dropped first."""

UNIT = 16
"""Largest alignment in bytes for which kernels are compiled."""


class LoadedPrograms:
    """Cache of one loaded program or kernel per program object, by identity: callers pass the same objects."""

    def __init__(self) -> None:
        self._by_program: dict[int, Any] = {}

    def find(self, program: object, addresses: Addresses) -> Any:
        """Return what differs only in the addresses of its buffers, by multiples of ``UNIT``; None if there is none."""
        known = self._by_program.get(id(program))
        return known if known is not None and differ_by_addresses(known.addresses, addresses) else None

    def add(self, loaded: Any) -> None:
        """Keep a loaded program in place of an earlier one of the same program."""
        if len(self._by_program) >= MOST:
            del self._by_program[next(iter(self._by_program))]
        self._by_program[id(loaded.program)] = loaded

    def clear(self) -> None:
        self._by_program.clear()


def differ_by_addresses(a: Addresses, b: Addresses) -> bool:
    """Return True if only the addresses of buffers differ, by multiples of ``UNIT``.

    >>> a = Addresses({(0, "input"): 4096, (1, "input"): 8192}, (100, 200))
    >>> [differ_by_addresses(a, Addresses({(0, "input"): 4096 + by, (1, "input"): 0}, (100, 200))) for by in (32, 8)]
    [True, False]
    """
    before, after = a.buffers, b.buffers
    if (a.flags, a.arenas, len(before)) != (b.flags, b.arenas, len(after)) or a.pieces or b.pieces:
        return False
    for key, address in before.items():
        other = after.get(key)
        if other is None or (address - other) % UNIT:
            return False
    return True


MOST_LAUNCH_GRAPHS = 256  # 28 MB of device memory

SIGNAL_WORDS = 4096  # signals to peers in one program, where they go as 4-byte copies
_DRAIN_S = 2.0
stuck: list[CudaSite] = []  # streams of these may still write: no memory of the process is given back


class CudaSite:
    """The device resources of a rank's executor. Loaded programs use them; :class:`CudaExecutor` loads programs.

    Args:
        rank, device, monitor, timeout_s, features, driver: see :class:`CudaExecutor`.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        monitor: ControlBlock,
        timeout_s: float,
        features: DriverFeatures,
        *,
        driver: Driver | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"CudaExecutor: timeout_s must be positive (value={timeout_s!r})")
        features.require()
        self.rank, self.features = rank, features
        self.driver = driver if driver is not None else Driver(device)
        self.lock = forks.lock()
        self.ledger = SubmissionLedger()
        self.plans = Plans(rank, features)
        self.loaded = LoadedPrograms()
        self.timeout_s = timeout_s
        self.closed = False
        self.armed_epoch: int | None = None  # of the last invocation that may have waited for a trigger
        self._streams: list[int] = []
        self._sides: list[int] = []
        self._held: int | None = None
        self._never_freed: list[object] = []
        self._launch_graphs: weakref.WeakSet[ExecutableGraph] = weakref.WeakSet()
        with self.driver.current():
            words = self._words = self.driver.host_words(HOST_WORDS)
            self.words: dict[HostWord, int] = {
                word: words.address + WORD_BYTES * index
                for word, index in ((HostWord.STARTED, STARTED), (HostWord.FINISHED, FINISHED), (HostWord.BUSY, BUSY))
            }
            self.status_words = words.address + WORD_BYTES * STATUS
            self.kernel_stream: int | None = None  # of the last kernel that went to the device
            self.signal_words, self._signal_words_owner = self.driver.device_words(SIGNAL_WORDS + MAX_BLOCKS)
            self.counters = self.signal_words + WORD_BYTES * SIGNAL_WORDS  # of kernels (``device/launch``)
            self.internal = self.create_stream()
            self.into, self.out_of, self._between = (self.driver.create_event() for _ in range(3))
            self.rescue = FlagRescue(self.driver)
            self._tables = DeviceTables(self.driver, self.create_stream())
        self.watch = DeviceWatch(self.driver, rank, words, monitor, self.rescue, timeout_s)
        self.watch.start()
        submitters.add(self)
        forks.in_copies_of(self, forks.never_finalize)  # with its words and streams
        # For an executor that is dropped without close. The thread holds the watch, not this object.
        self._end_watch = weakref.finalize(self, self.watch.stop)

    def order(self, first: int, second: int) -> None:
        """Let the next work of stream ``second`` follow what ``first`` has so far; both are captured, or neither is."""
        self.check_open("order")
        driver = self.driver
        with self.lock, driver.current():
            driver.submit([driver.bind_record(self._between, first), driver.bind_wait(self._between, second)])

    def bind_on(self, stream: int, bind: Callable[[int], Sequence[Bound]]) -> Sequence[Bound]:
        """Prepare calls in order with the work of any stream.

        Default streams (``calls``) do not support all of them: for these they run on the internal stream, between two
        events.
        """
        if stream not in DEFAULT_STREAMS:
            return bind(stream)
        driver = self.driver
        return [
            driver.bind_record(self.into, stream),
            driver.bind_wait(self.into, self.internal),
            *bind(self.internal),
            driver.bind_record(self.out_of, self.internal),
            driver.bind_wait(self.out_of, stream),
        ]

    def renew(self, epoch: int) -> None:
        """Set all words that hold epochs as if ``epoch`` had written them, while no invocation is under way."""
        with self.lock:
            self.watch.last_epoch = epoch  # a wait for a very old epoch would count it as one to come
            self._words.array[STARTED] = self._words.array[FINISHED] = epoch & WORD_MASK

    def waits_for_the_host(self) -> bool:
        """Return True if the device may have work that waits for an act of this host: armed, or stuck."""
        return self in stuck or not (self.armed_epoch is None or self.closed or self.watch.finished(self.armed_epoch))

    def check(self) -> None:
        """Raise the error of any invocation that has failed so far.

        Raises:
            PeerError, PeerTimeoutError: a peer failed, died or did not come; the text names rank and command.
        """
        self.watch.raise_failure()

    def check_end(self) -> None:
        """Check as :meth:`check` does, after an invocation has ended and before its output is read."""
        self.watch.look_for_aborts()
        self.check()

    def synchronize(self) -> None:
        """Block the host until every eager invocation has finished. Raises as :meth:`check` does."""
        self.watch.wait(self.watch.last_epoch)
        self._wait_for_kernels()
        self.check_end()

    def close(self) -> None:
        """Wait until running work ends or times out, stop the thread, release streams and events. Idempotent."""
        if self.closed:
            return
        self.closed = True
        try:
            self.synchronize()
        except SidelaneError:
            self.drain()
        self.loaded.clear()
        with self.driver.current():
            if self not in stuck:
                with self.lock:
                    self._tables.close()  # while the thread still releases waits that cannot end
            self._end_watch()
            with self.driver.relaxed_capture():
                if not self.rescue.close() and self not in stuck:
                    stuck.append(self)
            for event in (self.into, self.out_of, self._between):
                self.driver.destroy_event(event)
            for stream in self._streams:
                self.driver.destroy_stream(stream)

    # --- for loaded programs ------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        self._streams.append(self.driver.create_stream())
        return self._streams[-1]

    @property
    def side_streams(self) -> Sequence[int]:
        """Handles of the side streams that programs have used so far."""
        return tuple(self._sides)

    def shared_sides(self, count: int) -> list[int]:
        """Return side streams that all programs share; they do not conflict, since invocations are ordered."""
        while len(self._sides) < count:
            self._sides.append(self.create_stream())
        return self._sides[:count]

    def held_stream(self) -> int:
        """Return the stream on which prelaunched programs wait for their trigger."""
        if self._held is None:
            with self.driver.current():
                self._held = self.create_stream()
        return self._held

    def launch_graph(self, launch: Iterable[Bound]) -> ExecutableGraph | None:
        """Make a graph of a launch that is bound to the internal stream; None at the limit, or without memory.

        Launching it took the host 1.4 us instead of 3.3 for the launch of the kernel, and the device 0.1 us more (H200,
        CUDA 13.0: results/notes/performance.md). It takes 110 KB of device memory.
        """
        if len(self._launch_graphs) >= MOST_LAUNCH_GRAPHS:
            return None
        try:
            with self.driver.relaxed_capture():
                graph = ExecutableGraph(self.driver, launch, self.internal)
        except DriverError:
            return None
        self._launch_graphs.add(graph)
        return graph

    def store_table(self, values: npt.NDArray[np.int64], *, frozen: bool) -> DeviceTable:
        """Copy a table to device memory for kernels; the lock is held, inside of ``Driver.relaxed_capture``.

        Args:
            values: values of the table.
            frozen: a stream is being captured, so that other streams must not be queried.

        Raises:
            DriverError: the device has no memory.
        """
        last = None if frozen else self.kernel_stream
        return self._tables.store(values, None if last is None or self.driver.is_capturing(last) else last)

    def forget_flags(self, bases: Sequence[int], memory: object) -> None:
        """Let the watch store to flag memories of this rank no more, since ``memory``, in which they lie, is dropped.

        After a failure, streams first pass the waits that the watch releases. If they do not, or if a store may still
        come, this object keeps the memory.
        """
        if self.closed:
            has_ended = self not in stuck
        else:
            with self.driver.current(), self.driver.relaxed_capture():
                has_drained = self.watch.failure is None or (self not in stuck and self.drain())
                has_ended = has_drained and self.rescue.forget(bases)
        if not has_ended:
            self._never_freed.append(memory)

    def check_usable(self, method: str) -> None:
        self.check_open(method)
        if self.watch.failure is not None:
            self.watch.raise_failure()  # a call only where there is something to raise: this is the way of every start

    def repetition(
        self,
        calls: Sequence[Bound],
        program: Program | KernelProgram | KernelCall,
        notes: tuple[Note, ...],
        words: Moving = (),
        moving: Addresses | None = None,
    ) -> Repetition | None:
        """Return an invocation as data for compiled code.

        Args:
            calls: its calls to the driver.
            program: the program.
            notes: side effects on Python objects.
            words: words that depend on the number of the call.
            moving: addresses of which the calls were prepared at :func:`native.locate`; None: no value of them moves.

        Returns:
            The invocation; None if its values move, and Python must make one of the calls.
        """
        found = (steps_of(calls), ()) if moving is None else movable_steps(calls, moving)
        if found is None:
            return None
        steps, followers = found
        return Repetition(steps, words, notes, self.failing(calls, program), followers=followers)

    def kernel_notes(self, handle: int, program: KernelProgram | KernelCall, entry: Entry) -> tuple[Note, ...]:
        """Return the side effects of a launch on a stream that is not captured, for compiled code."""
        launched = self.watch.launch_notes(program)
        return ((Effect.SET, self, "kernel_stream", handle), *launched, *self.ledger.notes(entry))

    def failing(
        self, calls: Sequence[Bound], program: Program | KernelProgram | KernelCall
    ) -> Callable[[int, Any], NoReturn]:
        """Return the function that raises for a failed call of an invocation, given the call's index and error."""

        def failed(index: int, error: Any) -> NoReturn:
            if not isinstance(error, BaseException):
                error = self.driver.refused(calls[index][0], error)
            self.fail_submission(f"{program.collective} {program.variant}", error)
            raise error

        return failed

    def fail_submission(self, title: str, error: BaseException, *, captured: bool = False) -> None:
        """Fail after an incomplete submission, tell the peers, and wait for what was submitted.

        The caller's stream does not wait for it any more, so that its next work may have the memory of these tensors.

        Args:
            title: the part of the program that was to be submitted, or its name.
            error: the driver's refusal, or an interruption.
            captured: it was to become part of a graph: nothing runs.
        """
        self.watch.fail_submission(title, error)
        if not captured:
            self._has_passed(time.monotonic() + _DRAIN_S)

    def check_open(self, method: str) -> None:
        if self.closed:
            raise CommunicatorClosedError(f"CudaExecutor.{method}: the executor was closed")

    def _wait_for_kernels(self) -> None:
        """Wait for the stream of kernels, since kernels do not report their end to the host."""
        with self.driver.current():
            while self.watch.failure is None and not self._kernels_idle():
                time.sleep(1e-4)

    def _kernels_idle(self) -> bool:
        handle = self.kernel_stream
        if handle is None or self.driver.is_capturing(handle):  # a stream under capture may not be asked
            return True
        return self.driver.is_idle(handle)

    def drain(self) -> bool:
        """Wait, after a failure, until the watch has released all waits and streams have passed them.

        A stream of a caller may come to a wait later, and passes it, too, as long as the flags are not freed.

        Returns:
            True; False if a stream has not passed them in time.
        """
        if self._has_passed(time.monotonic() + _DRAIN_S):
            return True
        with self.driver.current():
            if not self._are_released():
                stuck.append(self)  # streams may still write to its memory
        return False

    def _has_passed(self, deadline: float) -> bool:
        """Return True once all waits are released and streams have passed them; False if they have not in time."""
        with self.driver.current():
            while not (self._are_released() and self.watch.is_at_rest):
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
        return True

    def _are_released(self) -> bool:
        """Return True once the watch has released all waits, and the executor's streams have nothing left."""
        return self.rescue.has_stored and self._kernels_idle() and all(map(self.driver.is_idle, self._streams))


class ExecutableGraph:
    """Calls to the driver as one graph, destroyed with the last reference; running launches still complete.

    Args:
        driver: driver of the device.
        calls: calls to record, bound to ``stream``.
        stream: idle stream of the executor.
    """

    def __init__(self, driver: Driver, calls: Iterable[Bound], stream: int) -> None:
        self._driver = driver
        self._graph = driver.make_graph(calls, stream)
        forks.finalize(self, driver.destroy_graph, self._graph)

    def bind(self, stream: int) -> Bound:
        """Prepare its launch on ``stream``, which is not captured; the call keeps the graph."""
        return self._driver.bind_graph(self._graph, stream, owner=self)

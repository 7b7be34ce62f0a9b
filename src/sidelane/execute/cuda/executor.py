"""The CUDA executor: one rank's queues on copy engines and stream memory operations, ordered by the caller's stream.

What a failure leaves behind: the streams drain, because every wait is let pass; so the outputs of all invocations that
had not finished hold garbage, on this rank and on its peers, and the executor refuses further work for good.

Memory: an invocation's side streams fork from the caller's stream and join it, so memory is in use exactly until the
caller's stream has passed the invocation; what the caching allocator knows about that stream is enough. Buffers of an
armed program must live until it was started.
"""

from __future__ import annotations

import threading
import time
import weakref

import torch

from sidelane.errors import CommunicatorClosedError, SidelaneError, UnavailableError
from sidelane.execute.base import Addresses, Capabilities, LoadedProgram
from sidelane.execute.cuda.bind import BoundPlan, Resolver
from sidelane.execute.cuda.cached import CachedGraph
from sidelane.execute.cuda.calls import Gate, HostWord, LaunchReduce, RecordStamp, Route, choose_route
from sidelane.execute.cuda.count import counts_of
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.held import Gates
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.execute.cuda.release import FlagRescue
from sidelane.execute.cuda.watch import BOARD, BUSY, FINISHED, HOST_WORDS, STARTED, Subject, Watch
from sidelane.execute.monitor import PeerMonitor
from sidelane.execute.submitted import Entry, Ledger, Submitted
from sidelane.program.ir import Copy, Program, has_epochs
from sidelane.program.kernel import KernelProgram

DEFAULT_REDUCE_BLOCKS = 32
"""Thread blocks of a reduction: a quarter of an H200, enough to read peers' slots at memory speed."""

_CELLS = 4096  # signals to peers in one program, where they go as 4-byte copies
_DRAIN_S = 2.0
_stuck: list[CudaExecutor] = []


class CudaExecutor:
    """Runs one rank's queues of programs on its device.

    Invocations of one executor must be ordered among each other, as the communicator does: they share flags.

    Args:
        rank: whose queues.
        device: of this rank.
        monitor: what is known about the peers; a ``ControlBlock``.
        timeout_s: seconds that an invocation may take, from its turn on its stream, before it becomes PeerTimeoutError.
        features: what the driver can do (``probe``).
        reduce_blocks: most thread blocks of a reduction.
        driver: for tests without a device.

    Raises:
        UnavailableError: no driver, no ``cuda.bindings``, or no stream memory operations.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        monitor: PeerMonitor,
        timeout_s: float,
        features: DriverFeatures,
        *,
        reduce_blocks: int = DEFAULT_REDUCE_BLOCKS,
        driver: Driver | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"CudaExecutor: timeout_s must be positive (value={timeout_s!r})")
        features.require()
        self.rank, self.features, self.reduce_blocks = rank, features, reduce_blocks
        self.driver = driver if driver is not None else Driver(device)
        self.lock = threading.Lock()
        self.ledger = Ledger()
        self.timeout_s = timeout_s
        self._closed = False
        self._streams: list[int] = []
        self._sides: list[int] = []
        self._held: int | None = None
        with self.driver.current():
            words, self.gates = self.driver.host_words(HOST_WORDS), Gates(self.driver)
            self.host: dict[HostWord | Gate, int] = {
                word: words.address + 4 * index
                for word, index in ((HostWord.STARTED, STARTED), (HostWord.FINISHED, FINISHED), (HostWord.BUSY, BUSY))
            }
            self.host.update(self.gates.addresses)
            self.board = words.address + 4 * BOARD
            self.kernel_stream: int | None = None  # of the last kernel that went to the device
            self.cells, self._cells_owner = self.driver.device_words(_CELLS)
            self.internal = self.create_stream()
            self.into, self.out_of = self.driver.create_event(), self.driver.create_event()
            self.rescue = FlagRescue(self.driver)
            for gate in (Gate.TRIGGER, Gate.HOST_TRIGGER):  # whoever has passed one writes DONE itself
                self.rescue.register_word(self.gates.addresses[gate])
        self.watch = Watch(self.driver, rank, words, monitor, self.rescue, timeout_s)
        self.watch.start()
        # For an executor that is dropped without close. The thread holds the watch, not this object.
        self._end_watch = weakref.finalize(self, self.watch.stop)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({Copy}), "cuda")

    def load(self, program: Program, addresses: Addresses) -> CudaProgram:
        """Bind this rank's queues of ``program`` (see :class:`sidelane.execute.base.Executor`).

        Works while a stream is being captured. ``addresses`` are used as they are: the caller keeps the memory.
        """
        self._check_open("load")
        if len(addresses.flags) != program.world_size:
            counts = f"value={len(addresses.flags)}, allowed={program.world_size}"
            raise ValueError(f"CudaExecutor.load: number of flag memories ({counts})")
        with self.lock, self.driver.current(), self.driver.relaxed_capture():
            return CudaProgram(self, program, addresses)

    def load_kernel(self, program: KernelProgram, addresses: Addresses, *, frozen: bool) -> LoadedProgram:
        """Compile, load and bind the kernel of a collective. ``frozen``: for a graph under capture, in which it works.

        Raises:
            UnavailableError: Triton is not installed.
        """
        self._check_open("load_kernel")
        try:
            from sidelane.execute.cuda.kernel_program import CudaKernel
        except ImportError as error:
            raise UnavailableError(f"collectives in kernels need Triton ({error}): pip install triton") from error
        with self.lock, self.driver.current(), self.driver.relaxed_capture():
            return CudaKernel(self, program, addresses, frozen=frozen)

    def check(self) -> None:
        """Raise what went wrong with any invocation so far.

        Raises:
            PeerError, PeerTimeoutError: a peer failed, died or did not come; the text names rank and command.
        """
        self.watch.raise_failure()

    def synchronize(self) -> None:
        """Block the host until every eager invocation has finished. Raises as :meth:`check` does."""
        self.watch.wait(self.watch.last_epoch)
        self._wait_for_kernels()
        self.check()

    def close(self) -> None:
        """Wait for what runs (until it ends or times out), stop the thread, release streams and events. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.synchronize()
        except SidelaneError:
            self.drain()
        with self.driver.current():
            self._end_watch()
            self.rescue.close()
            for event in (self.into, self.out_of):
                self.driver.destroy_event(event)
            for stream in self._streams:
                self.driver.destroy_stream(stream)

    # --- for loaded programs ------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        self._streams.append(self.driver.create_stream())
        return self._streams[-1]

    def shared_sides(self, count: int) -> list[int]:
        """Side streams that all programs share: invocations are ordered, so they do not meet there."""
        while len(self._sides) < count:
            self._sides.append(self.create_stream())
        return self._sides[:count]

    def held_stream(self) -> int:
        """The stream on which prelaunched programs wait for their trigger."""
        if self._held is None:
            self._held = self.create_stream()
        return self._held

    def check_usable(self, method: str) -> None:
        self._check_open(method)
        if self.watch.failure is not None:
            self.watch.raise_failure()  # a call only where there is something to raise: this is the way of every start

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise CommunicatorClosedError(f"CudaExecutor.{method}: the executor was closed")

    def _wait_for_kernels(self) -> None:
        """Kernels tell the host nothing when they end, but their stream does."""
        with self.driver.current():
            while self.watch.failure is None and not self._kernels_idle():
                time.sleep(1e-4)

    def _kernels_idle(self) -> bool:
        handle = self.kernel_stream
        if handle is None or self.driver.is_capturing(handle):  # a stream under capture may not be asked
            return True
        return self.driver.is_idle(handle)

    def drain(self) -> None:
        """After a failure, let the streams pass the waits that the thread lets go: none may be destroyed stuck."""
        deadline = time.monotonic() + _DRAIN_S
        with self.driver.current():
            while not (self._kernels_idle() and all(map(self.driver.is_idle, self._streams))):
                if time.monotonic() > deadline:
                    _stuck.append(self)  # streams may still write to its memory
                    return
                time.sleep(1e-3)


class CudaProgram:
    """A program bound to addresses on one rank (see :class:`sidelane.execute.base.LoadedProgram`).

    Attributes:
        program: what was loaded.
    """

    def __init__(self, executor: CudaExecutor, program: Program, addresses: Addresses) -> None:
        self.program = program
        self._executor = executor
        self._addresses = addresses
        self._frozen = not has_epochs(program)
        self._armed: int | None = None
        self._events: list[int] = []
        self._stamps: dict[int, int] = {}
        self._eager: BoundPlan | None = None
        self._captured: BoundPlan | None = None
        self._busy = 0
        self._graph: CachedGraph | None = None
        self._by_default_stream: dict[int, list[Bound]] = {}
        self._entries: dict[Route, Entry] = {}
        if self._frozen:
            self._captured = self._bind(captured=True)
        else:
            self._eager = self._bind(captured=False)
        executor.rescue.register(program, executor.rank, addresses)
        weakref.finalize(self, destroy_events, executor.driver, self._events).atexit = False

    def arm(self, epoch: int) -> None:
        """Submit everything but the ``caller`` queue of invocation ``epoch``, which must be the executor's next one.

        Unlike on CPUs there is no way back: what was armed must be started.

        Raises:
            ValueError: the program is not prelaunched, or is armed for another epoch.
        """
        executor = self._executor
        executor.check_usable("arm")
        if not self.program.prelaunched or self._frozen:
            raise ValueError(f"arm: not a prelaunched program with epochs (value={self.program.variant!r})")
        with executor.lock, executor.driver.current():
            self._arm(epoch)

    def start(self, epoch: int, stream: torch.Stream | None) -> CudaPending:
        """Submit this rank's queues (see :class:`sidelane.execute.base.LoadedProgram`).

        On a stream that is being captured the invocation becomes part of the graph. Returns at once.

        Raises:
            ValueError: no stream, an epoch below 1, or a capture of a program that holds epochs.
            PeerError, PeerTimeoutError: an earlier invocation failed; nothing was submitted.
            DriverError: the driver refused a call. The executor is of no use any more.
        """
        executor = self._executor
        executor.check_usable("start")
        if stream is None:
            raise ValueError("start: a stream is needed (value=None)")
        if epoch < 1:
            raise ValueError(f"start: epochs begin at 1 (value={epoch})")
        handle = stream_handle(stream)
        with executor.lock, executor.driver.current():
            route = choose_route(handle, executor.driver.is_capturing(handle), self._frozen)
            try:
                if route is Route.CAPTURE:
                    return self._capture(epoch, handle)
                return self._run(epoch, handle, route)
            except ValueError:
                raise  # found before anything was submitted
            except BaseException as error:
                executor.watch.fail_submission(f"{self.program.collective} {self.program.variant}", error)
                raise

    def elapsed_us(self, first: int, last: int) -> float:
        """Microseconds between two stamp slots of the last invocation or replay, which must have finished."""
        return self._executor.driver.elapsed_us(self._stamps[first], self._stamps[last])

    def _run(self, epoch: int, handle: int, route: Route) -> CudaPending:
        executor = self._executor
        direct = route in (Route.DIRECT, Route.LAUNCH)
        stream = handle if direct else executor.internal
        if self._frozen:
            bound, calls = self._launch(epoch, stream)
        else:
            assert self._eager is not None, "programs that are not frozen bind this plan when loaded"
            bound = self._eager
            bound.set_epoch(epoch)
            if bound.ahead:
                self._arm(epoch)
                self._armed = None
            calls = bound.steps(stream)
        executor.driver.submit(calls if direct else self._by_way_of_internal(calls, handle))
        executor.watch.issued(epoch, self.program, self._addresses, self._busy)
        executor.ledger.count(self._entry(route, bound))
        return CudaPending(executor.watch, epoch)

    def _launch(self, epoch: int, stream: int) -> tuple[BoundPlan, list[Bound]]:
        executor, bound = self._executor, self._captured
        assert bound is not None, "frozen programs bind this plan when loaded"
        if self._graph is None:
            calls = bound.steps(executor.internal)
            self._graph = CachedGraph(executor.driver, calls, executor.internal, executor.host[HostWord.FINISHED])
        return bound, self._graph.steps(epoch, stream)

    def _by_way_of_internal(self, inner: list[Bound], handle: int) -> list[Bound]:
        calls = self._by_default_stream.get(handle)
        if calls is None:
            executor, driver = self._executor, self._executor.driver
            calls = [
                driver.bind_record(executor.into, handle),
                driver.bind_wait(executor.into, executor.internal),
                *inner,
                driver.bind_record(executor.out_of, executor.internal),
                driver.bind_wait(executor.out_of, handle),
            ]
            self._by_default_stream[handle] = calls
        return calls

    def _capture(self, epoch: int, handle: int) -> CudaPending:
        assert self._captured is not None, "only frozen programs get here, and they bind this plan when loaded"
        self._executor.driver.submit(self._captured.steps(handle))
        self._executor.ledger.count(self._entry(Route.CAPTURE, self._captured))
        return CudaPending(None, epoch)

    def _entry(self, route: Route, bound: BoundPlan) -> Entry:
        entry = self._entries.get(route)
        if entry is None:
            program, captured = self.program, route is Route.CAPTURE
            counts = counts_of(bound.plan, route)
            submitted = Submitted(str(program.collective), "dma", program.variant, captured, counts)
            entry = self._entries[route] = self._executor.ledger.entry(submitted)
        return entry

    def _arm(self, epoch: int) -> None:
        if self._armed == epoch:
            return
        if self._armed is not None:
            raise ValueError(f"arm: armed already, for epoch {self._armed} (value={epoch})")
        bound = self._eager
        assert bound is not None, "prelaunched programs that are not frozen bind this plan when loaded"
        bound.set_epoch(epoch)
        self._executor.driver.submit(bound.ahead)
        self._armed = epoch

    def _bind(self, *, captured: bool) -> BoundPlan:
        executor, driver = self._executor, self._executor.driver
        self._busy = executor.watch.next_busy_number() if captured else 0
        plan = plan_calls(
            self.program,
            executor.rank,
            peer_writes=bool(executor.features.peer_writes),
            copy_batches=executor.features.copy_batches,
            captured=captured,
        )
        if plan.cells > _CELLS:
            raise ValueError(f"load: signals to peers in one program (value={plan.cells}, allowed=..{_CELLS})")
        count = plan.streams - 1
        # What is submitted ahead blocks its streams until the call: nobody else may use them.
        sides = [executor.create_stream() for _ in range(count)] if plan.ahead else executor.shared_sides(count)
        events = [driver.create_event() for _ in range(plan.events)]
        self._events += events
        for call in plan.calls():
            if isinstance(call, RecordStamp) and call.slot not in self._stamps:
                self._stamps[call.slot] = driver.create_event(timing=True)
                self._events.append(self._stamps[call.slot])
        resolve = Resolver(self.program, executor.rank, self._addresses, executor.cells, executor.host)
        self._load_kernels(plan.calls(), resolve)
        bound = BoundPlan(
            driver,
            plan,
            resolve,
            sides=sides,
            events=events,
            stamps=self._stamps,
            captured=captured,
            busy=self._busy,
            reduce_blocks=executor.reduce_blocks,
        )
        if captured:
            executor.watch.captured(Subject(0, self.program, self._addresses, self._busy, captured=True))
        return bound

    def _load_kernels(self, calls: tuple[object, ...], resolve: Resolver) -> None:
        """Compile and load the kernels now: inside a capture, or behind a stuck stream, it would be too late."""
        executor = self._executor
        for call in calls:
            if isinstance(call, LaunchReduce):
                dst, srcs = resolve(call.dst), [resolve(src) for src in call.srcs]
                blocks = executor.reduce_blocks  # they and the bytes decide which kernel it is
                executor.driver.bind_reduce(dst, srcs, call.nbytes, call.reduction, executor.internal, blocks)


class CudaPending:
    """One submitted invocation (see :class:`sidelane.execute.base.Pending`); a captured one counts as done."""

    __slots__ = ("_epoch", "_watch")

    def __init__(self, watch: Watch | None, epoch: int) -> None:
        self._watch, self._epoch = watch, epoch

    def done(self) -> bool:
        return self._watch is None or self._watch.finished(self._epoch)

    def wait(self) -> None:
        if self._watch is not None:
            self._watch.wait(self._epoch)


def stream_handle(stream: torch.Stream) -> int:
    """The driver's handle of a torch stream; 0 is the legacy default stream."""
    handle = getattr(stream, "cuda_stream", None)
    if handle is None:  # a torch.Stream that is not a torch.cuda.Stream names the same thing by other numbers
        named = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        handle = named.cuda_stream
    return int(handle)


def destroy_events(driver: Driver, events: list[int]) -> None:
    """For finalizers: release ``events``; what has recorded them still completes."""
    for event in events:
        driver.destroy_event(event)

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from sidelane.errors import CommunicatorClosedError, SidelaneError, UnavailableError
from sidelane.execute.base import Addresses, Capabilities, LoadedProgram
from sidelane.execute.cuda.cached import ExecutableGraph
from sidelane.execute.cuda.calls import Gate, HostWord
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.held import Gates, SharedValueOps
from sidelane.execute.cuda.native import WORD_MASK, Bound
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.execute.cuda.release import FlagRescue
from sidelane.execute.cuda.tables import DeviceTable, Tables
from sidelane.execute.cuda.watch import BOARD, BUSY, FINISHED, HOST_WORDS, STARTED, Watch
from sidelane.execute.monitor import PeerMonitor
from sidelane.execute.submitted import Ledger
from sidelane.program.ir import Copy, Program
from sidelane.program.kernel_list import AnyKernelProgram

DEFAULT_REDUCE_BLOCKS = 32
"""Thread blocks of a reduction: a quarter of an H200, enough to read peers' slots at memory speed."""

MOST_LAUNCH_GRAPHS = 256  # 28 MB of device memory

CELLS = 4096  # signals to peers in one program, where they go as 4-byte copies
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
        self.closed = False
        self._streams: list[int] = []
        self._sides: list[int] = []
        self._held: int | None = None
        self._launch_graphs: weakref.WeakSet[ExecutableGraph] = weakref.WeakSet()
        with self.driver.current():
            words, self.gates = self.driver.host_words(HOST_WORDS), Gates(self.driver)
            self._words = words
            self.host: dict[HostWord | Gate, int] = {
                word: words.address + 4 * index
                for word, index in ((HostWord.STARTED, STARTED), (HostWord.FINISHED, FINISHED), (HostWord.BUSY, BUSY))
            }
            self.host.update(self.gates.addresses)
            self.board = words.address + 4 * BOARD
            self.kernel_stream: int | None = None  # of the last kernel that went to the device
            self.cells, self._cells_owner = self.driver.device_words(CELLS)
            self.internal = self.create_stream()
            self.into, self.out_of, self._turn = (self.driver.create_event() for _ in range(3))
            self.rescue = FlagRescue(self.driver)
            self._tables = Tables(self.driver, self.create_stream())
            for gate in (Gate.TRIGGER, Gate.HOST_TRIGGER):  # whoever has passed one writes DONE itself
                self.rescue.register_word(self.gates.addresses[gate])
        self.watch = Watch(self.driver, rank, words, monitor, self.rescue, timeout_s)
        self.watch.start()
        # For an executor that is dropped without close. The thread holds the watch, not this object.
        self._end_watch = weakref.finalize(self, self.watch.stop)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({Copy}), "cuda")

    def load(self, program: Program, addresses: Addresses) -> LoadedProgram:
        """Bind this rank's queues of ``program`` (see :class:`sidelane.execute.base.Executor`).

        Works while a stream is being captured. ``addresses`` are used as they are: the caller keeps the memory.
        """
        self._check_open("load")
        if len(addresses.flags) != program.world_size:
            counts = f"value={len(addresses.flags)}, allowed={program.world_size}"
            raise ValueError(f"CudaExecutor.load: number of flag memories ({counts})")
        from sidelane.execute.cuda.loaded import CudaProgram

        with self.lock, self.driver.current(), self.driver.relaxed_capture():
            return CudaProgram(self, program, addresses)

    def load_kernel(self, program: AnyKernelProgram, addresses: Addresses, *, frozen: bool) -> LoadedProgram:
        """Compile, load and bind the kernel of a collective. ``frozen``: for a graph under capture, in which it works.

        Raises:
            UnavailableError: Triton is not installed.
            DriverError: the driver refused something, memory for one. The executor is of no use any more, and the peers
                are told.
        """
        self._check_open("load_kernel")
        try:
            from sidelane.execute.cuda.kernel_program import CudaKernel
        except ImportError as error:
            raise UnavailableError(f"collectives in kernels need Triton ({error}): pip install triton") from error
        with self.lock, self.driver.current(), self.driver.relaxed_capture():
            try:
                return CudaKernel(self, program, addresses, frozen=frozen)
            except DriverError as error:  # the peers launch theirs: generations would differ from here on
                self.watch.fail_submission(f"{program.collective} {program.variant}", error)
                raise

    def order(self, first: int, second: int) -> None:
        """Let the next work of stream ``second`` follow what ``first`` has so far; both are captured, or neither is."""
        self._check_open("order")
        driver = self.driver
        with self.lock, driver.current():
            driver.submit([driver.bind_record(self._turn, first), driver.bind_wait(self._turn, second)])

    def renew(self, epoch: int) -> None:
        """Let all words that follow epochs count as written by ``epoch``; with no invocation under way."""
        with self.lock, self.driver.current():
            self._words.array[STARTED] = self._words.array[FINISHED] = epoch & WORD_MASK
            self.gates.store(epoch)
            gates = [self.gates.addresses[gate] for gate in (Gate.TRIGGER, Gate.DONE)]
            writes = SharedValueOps(self.driver, gates, [])
            writes.set(epoch)
            self.driver.submit([writes.bind(self.internal)])
            while not self.driver.is_idle(self.internal):
                time.sleep(1e-5)

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
        if self.closed:
            return
        self.closed = True
        try:
            self.synchronize()
        except SidelaneError:
            self.drain()
        with self.driver.current():
            if self not in _stuck:
                with self.lock:
                    self._tables.close()  # while the thread still lets go what waits in vain
            self._end_watch()
            self.rescue.close()
            for event in (self.into, self.out_of, self._turn):
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

    def launch_graph(self, launch: Iterable[Bound]) -> ExecutableGraph | None:
        """A launch, bound to the internal stream, as a graph; None where there are enough of them, or no memory.

        To launch it took the host 1.4 us where the launch of the kernel took 3.3, the device 0.1 us more (H200, CUDA
        13.0: docs/performance.md). It takes 110 KB of device memory.
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

    def place_table(self, values: npt.NDArray[np.int64], *, frozen: bool) -> DeviceTable:
        """Values in device memory, for kernels; with the lock held and inside ``Driver.relaxed_capture``.

        Args:
            values: of the table.
            frozen: a stream is being captured, so that others may not be asked.

        Raises:
            DriverError: there is no memory.
        """
        last = None if frozen else self.kernel_stream
        return self._tables.place(values, None if last is None or self.driver.is_capturing(last) else last)

    def check_usable(self, method: str) -> None:
        self._check_open(method)
        if self.watch.failure is not None:
            self.watch.raise_failure()  # a call only where there is something to raise: this is the way of every start

    def failing(self, calls: Sequence[Bound], program: Program | AnyKernelProgram) -> Callable[[int, Any], NoReturn]:
        """What to do about the failure of one of the calls of an invocation: called with its index and error."""

        def failed(index: int, error: Any) -> NoReturn:
            if not isinstance(error, BaseException):
                error = self.driver.refused(calls[index][0], error)
            self.watch.fail_submission(f"{program.collective} {program.variant}", error)
            raise error

        return failed

    def _check_open(self, method: str) -> None:
        if self.closed:
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

"""The CPU executor: one thread per engine moves bytes in shared memory, with real races and time-outs.

One process usually runs one rank; the code does not depend on it, and tests run several ranks in one process. Every
engine of a rank is a thread that lives as long as the executor and runs its queues in order, like a DMA queue.

State after a failure: when ``Invocation.wait`` raises, no thread of *this rank* works on that invocation any more, and
its tensors may be freed or reused. Peers notice at their next flag wait, or at once if they are waiting; until then
they may still write to memory of this rank that they share. The flags of the program are in an unknown state.
A time-out ends the communicator (the monitor keeps raising); a refusal by a peer does not.
"""

from __future__ import annotations

import os
import queue as queues
import threading
import weakref
from collections.abc import Sequence

from sidelane.errors import CommunicatorClosedError, PeerError
from sidelane.execute.base import Addresses, CallerStream, Capabilities
from sidelane.execute.cpu.commands import Action, compile_queue
from sidelane.execute.cpu.invocation import Delay, Invocation, ProgramSite
from sidelane.execute.submitted import Counts, SubmissionLedger, Submitted
from sidelane.memory.control import ControlBlock
from sidelane.program import ir

_JOIN_S = 30.0


class EngineThreads:
    """The engine threads of a rank: they run submitted queues until they are shut down. Any thread may do either.

    Args:
        rank: rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()  # reentrant: a signal handler may shut them down at any point of the code
        self._is_submitting = self._ends_then = False
        self._threads: dict[ir.Engine, EngineThread] = {}
        self._running: weakref.WeakSet[Invocation] = weakref.WeakSet()
        self._is_shut_down = False
        self._process = os.getpid()

    def submit(self, invocation: Invocation, queue: ir.Queue, steps: tuple[Action, ...]) -> None:
        """Run one queue of an invocation after the earlier queues of its engine; fail it after a shutdown."""
        error: Exception | None = None
        with self._lock:
            was_open = self._is_submitting = not self._is_shut_down
            if was_open:
                self._running.add(invocation)
                try:
                    self._thread_of(queue.engine).work.put((invocation, queue, steps))
                except RuntimeError as problem:
                    was_open = False
                    error = RuntimeError(f"rank {self._rank} has no thread for {queue.engine}: {problem}")
                self._is_submitting = False
        if self._ends_then:
            self._ends_then = False
            self.shut_down()
        if was_open:
            return
        invocation.cancel(error or self._closed_in(invocation))
        invocation.leave()

    def _thread_of(self, engine: ir.Engine) -> EngineThread:
        thread = self._threads.get(engine)
        if thread is None:
            thread = EngineThread(f"sidelane-{self._rank}-{engine}")
            thread.start()
            self._threads[engine] = thread
        return thread

    def shut_down(self) -> None:
        """Fail running invocations, here and on the peers, then end the threads. A forked copy has none."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_submitting:  # this thread is inside of submit and continues there after the signal handler
                self._ends_then = True
                return
            self._is_shut_down = True
            running, threads = list(self._running), list(self._threads.values())
            self._threads.clear()
        for invocation in running:
            invocation.cancel(self._closed_in(invocation))
        for thread in threads:
            thread.work.put(None)  # the last item: nothing is submitted from now on
        for thread in threads:
            if thread is not threading.current_thread():  # one of them may drop the last reference
                thread.join(_JOIN_S)

    def _closed_in(self, invocation: Invocation) -> CommunicatorClosedError:
        return CommunicatorClosedError(f"rank {self._rank} closed its executor during {invocation}")


class EngineThread(threading.Thread):
    """One engine of one rank. Work put in runs in order; None ends the thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work: queues.SimpleQueue[tuple[Invocation, ir.Queue, tuple[Action, ...]] | None] = queues.SimpleQueue()

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            invocation, queue, steps = item
            invocation.run(queue, steps)
            del item, invocation, queue, steps  # keep no references while idle


class CpuExecutor:
    """Runs one rank's queues of programs on host memory.

    Args:
        rank: rank whose queues it runs.
        monitor: state of the peers; a ``ControlBlock``.
        timeout_s: seconds that a wait for a flag may take before it becomes PeerTimeoutError.
        delay: called before every command on the thread of its engine. For tests: it may sleep, or raise to fail.

    Attributes:
        submit: gives one queue of an invocation to its engine (:meth:`EngineThreads.submit`).
    """

    def __init__(self, rank: int, monitor: ControlBlock, timeout_s: float, *, delay: Delay | None = None) -> None:
        if not timeout_s > 0:
            raise ValueError(f"CpuExecutor: timeout_s must be positive (value={timeout_s!r})")
        self.rank, self.monitor, self.timeout_s, self.delay = rank, monitor, timeout_s, delay
        self.ledger = SubmissionLedger()
        engines = EngineThreads(rank)
        self.submit = engines.submit
        # Runs once: on close, when the executor is forgotten, or at exit of the interpreter, since no thread may touch
        # memory that is being torn down.
        self._shut_down = weakref.finalize(self, engines.shut_down)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({ir.Copy, ir.Broadcast, ir.Swap}), "cpu")

    def load(self, program: ir.Program, addresses: Addresses, *, captured: bool = False) -> CpuProgram:
        """Bind this rank's queues of ``program`` (see :class:`sidelane.execute.base.Executor`).

        Nothing is ever captured here. ``addresses`` are used as they are: the caller keeps the memory alive and mapped
        while invocations run.
        """
        self.check_open("load")
        if len(addresses.flags) != program.world_size:
            counts = f"value={len(addresses.flags)}, allowed={program.world_size}"
            raise ValueError(f"CpuExecutor.load: number of flag memories ({counts})")
        mine = program.queues_of(self.rank)
        if len({queue.engine for queue in mine}) != len(mine):
            raise ValueError(f"CpuExecutor.load: rank {self.rank} has two queues on one engine")
        return CpuProgram(self, program, [(queue, compile_queue(queue, program, addresses)) for queue in mine])

    def close(self) -> None:
        """Fail running invocations, here and on the peers, then stop and join the engine threads. Idempotent."""
        self._shut_down()

    def check_open(self, method: str) -> None:
        if not self._shut_down.alive:
            raise CommunicatorClosedError(f"CpuExecutor.{method}: the executor was closed")


class CpuProgram:
    """A program bound to addresses on one rank. One thread at a time may start it.

    Attributes:
        program: the program.
    """

    def __init__(
        self, executor: CpuExecutor, program: ir.Program, compiled: Sequence[tuple[ir.Queue, tuple[Action, ...]]]
    ) -> None:
        self.program = program
        self._executor = executor
        self._parts = compiled
        counts = counts_of_queues([queue for queue, _ in compiled])
        self._entry = executor.ledger.entry(Submitted(str(program.collective), "dma", program.variant, False, counts))
        writers: dict[ir.Flag, set[int]] = {}
        for queue in program.queues:
            for command in queue.commands:
                if isinstance(command, ir.Signal):
                    writers.setdefault(command.flag, set()).add(queue.rank)
        self._site = ProgramSite(
            executor.rank, program, writers, executor.monitor, lambda: executor.timeout_s, executor.delay
        )

    def start(self, epoch: int) -> Invocation:
        """Run this rank's queues once.

        Raises:
            ValueError: ``epoch`` is not positive.
            PeerError: a peer has given up, died or refused this call; nothing was moved.
            CommunicatorClosedError: the executor was closed.
        """
        if epoch < 1:
            raise ValueError(f"CpuProgram.start: epochs begin at 1 (value={epoch})")
        self._executor.check_open("start")
        monitor = self._executor.monitor
        monitor.begin(epoch, f"{self.program.collective} {self.program.variant}")
        try:
            monitor.check(epoch)
        except PeerError:
            monitor.end(epoch)
            raise
        # One part more than there are queues, so that it does not end before all were submitted.
        invocation = Invocation(self._site, epoch, len(self._parts) + 1)
        for part in self._parts:
            self._executor.submit(invocation, *part)
        invocation.leave()
        self._executor.ledger.count(self._entry)
        return invocation

    def repetition(self, caller: CallerStream, moving: Sequence[tuple[int, str]] | None = None) -> None:
        """Return None: compiled code cannot run Python threads."""

    def run(self, epoch: int, caller: CallerStream) -> None:
        """Run this rank's queues once and wait for their end (see :class:`sidelane.execute.base.Runnable`)."""
        self.start(epoch).wait()


def counts_of_queues(queues: Sequence[ir.Queue]) -> Counts:
    """Count the commands of one rank's queues by the class of engine that would execute them on a device."""
    commands = [(queue, command) for queue in queues for command in queue.commands]
    moves = [(queue, command) for queue, command in commands if isinstance(command, ir.MOVES)]
    crossing = sum(any(span.rank != queue.rank for span in ir.spans(command)) for queue, command in moves)
    return Counts(
        peer_copies=crossing,
        local_copies=len(moves) - crossing,
        writes=sum(isinstance(command, ir.Signal) for _, command in commands),
        waits=sum(isinstance(command, ir.Wait) for _, command in commands),
        kernels=sum(isinstance(command, ir.Reduce) for _, command in commands),
        calls=len(queues),
    )

"""The engine threads of one rank: made when first needed, ended together."""

from __future__ import annotations

import os
import queue as queues
import threading
import weakref

from sidelane.errors import CommunicatorClosedError
from sidelane.execute.cpu.commands import Action
from sidelane.execute.cpu.invocation import Invocation
from sidelane.program.ir import Engine, Queue

_JOIN_S = 30.0


class Engines:
    """Gives queues to the threads of their engines until it is shut down; any thread may do either at any time.

    Args:
        rank: whose engines.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()  # a signal handler may shut them down in the middle of anything
        self._is_submitting = self._ends_then = False
        self._threads: dict[Engine, EngineThread] = {}
        self._running: weakref.WeakSet[Invocation] = weakref.WeakSet()
        self._is_shut_down = False
        self._process = os.getpid()

    def submit(self, invocation: Invocation, queue: Queue, steps: tuple[Action, ...]) -> None:
        """Run one queue of an invocation behind what its engine already has; fail it where there are none any more."""
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

    def _thread_of(self, engine: Engine) -> EngineThread:
        thread = self._threads.get(engine)
        if thread is None:
            thread = EngineThread(f"sidelane-{self._rank}-{engine}")
            thread.start()
            self._threads[engine] = thread
        return thread

    def shut_down(self) -> None:
        """Fail what still runs, here and on the peers, then end the threads. In a forked copy there are none."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_submitting:  # which this thread does, and goes on with behind the signal handler
                self._ends_then = True
                return
            self._is_shut_down = True
            running, threads = list(self._running), list(self._threads.values())
            self._threads.clear()
        for invocation in running:
            invocation.cancel(self._closed_in(invocation))
        for thread in threads:
            thread.work.put(None)  # behind everything that was put: nothing is, from now on
        for thread in threads:
            if thread is not threading.current_thread():  # the last reference may go on one of them
                thread.join(_JOIN_S)

    def _closed_in(self, invocation: Invocation) -> CommunicatorClosedError:
        return CommunicatorClosedError(f"rank {self._rank} closed its executor during {invocation}")


class EngineThread(threading.Thread):
    """One engine of one rank. Work put in runs in order; None ends the thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work: queues.SimpleQueue[tuple[Invocation, Queue, tuple[Action, ...]] | None] = queues.SimpleQueue()

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            invocation, queue, steps = item
            invocation.run(queue, steps)
            del item, invocation, queue, steps  # while idle, hold on to nothing

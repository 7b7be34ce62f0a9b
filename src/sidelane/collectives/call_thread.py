"""A thread that makes asynchronous calls in order, and ends with the interpreter; others, which run their callbacks.

The standard library's executors wait for their threads at exit, before anything can tell these to stop: for as long as
a call may take.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable

from sidelane import forks
from sidelane.errors import made_inside

PATIENCE_S = 0.05
"""Seconds that callbacks of a call may take before those of the next call begin: they may wait for these."""

_Job = tuple["CallFuture", Callable[..., None], tuple[object, ...]]


class CallThread:
    """Runs what it is given, one after the other; its thread begins with the first.

    Args:
        name: of the thread.
        is_held_up: whether the thread that asks keeps this one from going on.

    Attributes:
        callbacks: of the futures of these calls.
        pending: calls that have not ended.
    """

    def __init__(self, name: str = "sidelane-async", is_held_up: Callable[[], bool] = lambda: False) -> None:
        self.callbacks = Callbacks()
        self.pending: set[CallFuture] = set()
        self._name, self._is_held_up = name, is_held_up
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._starting = forks.rlock()  # a signal handler may submit something, too
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, function: Callable[..., None], *arguments: object) -> CallFuture:
        """Run ``function`` behind everything that was submitted before."""
        with self._starting:
            if self._thread is None:
                thread = self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except BaseException:
                    self._thread = None
                    raise
        future = CallFuture(self)
        self.pending.add(future)
        self._jobs.put((future, function, arguments))
        return future

    def settle(self) -> None:
        """Wait for what was submitted; what went wrong in it is for those who wait for it."""
        while pending := list(self.pending):
            self.require_other("a call behind asynchronous ones")
            concurrent.futures.wait(pending)

    def require_other(self, name: str) -> None:
        """Refuse to wait on a thread that these calls wait for.

        Args:
            name: of what would wait.

        Raises:
            RuntimeError: a signal handler, or a finaliser, interrupts such a thread.
        """
        if threading.current_thread() is self._thread or self._is_held_up():
            raise made_inside(name, "a call that it would wait for")

    def finish(self, *, wait: bool = True) -> None:
        """Make the calls that it was given, let their callbacks end, and end the thread; a later call begins anew.

        Args:
            wait: for all that; else the thread ends by itself, and nothing is submitted any more.
        """
        thread = self._thread
        if thread is not None and not wait:
            self._jobs.put(None)
            return
        if thread is None or thread is threading.current_thread() or self._is_held_up():
            return
        self.settle()
        self.callbacks.join()
        self.settle()  # what callbacks have submitted
        self._jobs.put(None)
        thread.join()
        self._thread = None

    def close(self) -> None:
        """Wait for the call under way, and cancel those behind it; let callbacks end."""
        self._is_closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._jobs.put(None)
            thread.join()
            self.callbacks.join()

    def end(self, until: float) -> bool:
        """Make what it was given, but wait no longer than to a moment of ``time.monotonic``; whether it has ended."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(max(until - time.monotonic(), 0))
        self.callbacks.join(until)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Begin nothing more."""
        self._is_closed = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            if self._is_closed:
                future.cancel()
            failure: BaseException | None = None
            runs = future.set_running_or_notify_cancel()
            if runs:
                try:
                    function(*arguments)
                except BaseException as error:
                    failure = error
            # Before anybody can know: what a caller drops once it has waited has gone then, on every rank alike.
            del job, function, arguments
            self.pending.discard(future)
            if failure is not None:
                future.set_exception(failure)
            elif runs:
                future.set_result(None)
            del future, failure  # while idle, hold on to nothing


class CallFuture(concurrent.futures.Future[None]):
    """The end of a call that a thread makes.

    Attributes:
        thread: makes it.
    """

    def __init__(self, thread: CallThread) -> None:
        super().__init__()
        self.thread = thread

    def has_ended(self, timeout_s: float | None) -> bool:
        """Wait for it; whether it has ended within a time. None waits as long as it takes.

        Raises:
            RuntimeError: it cannot end while this thread waits.
        """
        if not self.done():
            self.thread.require_other("wait")
        return bool(concurrent.futures.wait([self], timeout_s).done)


class Callbacks:
    """Completes futures, in the order of their calls, on threads that are there only while callbacks run.

    The thread that makes calls runs no callbacks, so that these may wait for later calls, make new ones and end their
    group. Those of a call begin when those of the call before have ended, or have taken :data:`PATIENCE_S`.
    """

    def __init__(self) -> None:
        self._lock = forks.rlock()
        self._threads: set[_CallbackThread] = set()
        self._last: _CallbackThread | None = None

    def run(self, function: Callable[[], None]) -> None:
        """Run a function, which runs callbacks, behind those before it."""
        with self._lock:
            made = _CallbackThread(function, self._last, self._forget)
            try:
                made.start()
                self._threads.add(made)
                self._last = made
                return
            except RuntimeError:
                pass  # the interpreter ends, or the system has no more threads
        function()

    def join(self, until: float | None = None) -> None:
        """Wait for all of them, or to a moment of ``time.monotonic``. A callback that asks waits for none."""
        with self._lock:
            threads = list(self._threads)
        if threading.current_thread() not in threads:
            for each in threads:
                each.join(None if until is None else max(until - time.monotonic(), 0))

    def _forget(self, thread: _CallbackThread) -> None:
        with self._lock:
            self._threads.discard(thread)


class _CallbackThread(threading.Thread):
    def __init__(
        self, function: Callable[[], None], before: _CallbackThread | None, ended: Callable[[_CallbackThread], None]
    ) -> None:
        super().__init__(name="sidelane-callbacks", daemon=True)
        self._given: tuple[Callable[[], None], _CallbackThread | None] | None = (function, before)
        self._ended, self.has_begun = ended, threading.Event()

    def run(self) -> None:
        assert self._given is not None
        (function, before), self._given = self._given, None
        if before is not None:
            before.has_begun.wait()
            before.join(PATIENCE_S)
        del before
        self.has_begun.set()
        try:
            function()
        finally:
            self._ended(self)

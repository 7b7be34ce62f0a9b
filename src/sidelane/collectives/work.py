"""Handles of asynchronous collectives (``torch.distributed.Work``), and the threads that make these on CPU ranks.

The threads end with the interpreter. The standard library's executors are of no use here: at exit they wait for their
threads before any code can stop these, and a call may take as long as its time-out.
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks, ranges
from sidelane.errors import made_inside
from sidelane.modes import untraced

NO_TIMEOUT = timedelta(0)
"""Time-out of torch that means to wait without one."""


@untraced
class Work(dist.Work):
    """A collective under way: a ``torch.distributed.Work``.

    Attributes:
        outputs: tensors that the collective writes.
    """

    outputs: tuple[torch.Tensor, ...] = ()

    def __init_subclass__(cls) -> None:
        untraced(cls)

    @abc.abstractmethod
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Order the caller after the collective: a CPU caller blocks, a GPU caller's current stream waits.

        Args:
            timeout: if given, a GPU caller blocks as well, and the wait fails after this time; the collective goes on.

        Returns:
            True.

        Raises:
            PeerError, PeerTimeoutError: a peer failed; on GPUs only once the failure has been noticed.
            PeerTimeoutError: also after ``timeout``, naming nobody.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Return True once the output may be read, or the collective has failed. Never blocks."""

    @abc.abstractmethod
    def exception(self) -> Any:
        """Return the error of a failed collective, as far as it is known; None if it has not failed."""

    @abc.abstractmethod
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the outputs as a future. On a GPU it is done at once, and the streams of its callbacks wait."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream on which the collective runs; None for the caller's, and without a GPU."""
        return None

    def when_ended(self, function: Callable[[BaseException | None], None]) -> bool:
        """Call a function with the error, or None, once the collective has ended, on any thread.

        Returns:
            False if the host does not learn of the end: the function is never called then.
        """
        return False

    def is_success(self) -> bool:
        """Return True if the collective has ended without an error."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Call :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the outputs. Raises as :meth:`wait`."""
        self.wait()
        return list(self.outputs)


class FutureWork(Work):
    """A collective that a thread makes, which tells its end by a future. A subclass sets ``_future``."""

    _future: CallFuture

    @abc.abstractmethod
    def _raise(self) -> None:
        """Wait for the future, and raise the error of a call that has failed."""

    def is_completed(self) -> bool:
        return self._future.done()

    def exception(self) -> BaseException | None:
        if not self._future.done() or self._future.cancelled():
            return None
        return self._future.exception()

    def when_ended(self, function: Callable[[BaseException | None], None]) -> bool:
        self._future.add_done_callback(lambda done: None if done.cancelled() else function(done.exception()))
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """See :meth:`Work.get_future`. Callbacks run after those of earlier calls (``Callbacks``).

        A failure is raised inside of a callback of the future, not set by ``set_exception``: C++ code (DDP's) takes an
        exception that was set from Python for a result, and reads it as tensors. Waits raise a RuntimeError with its
        text.
        """
        begun: torch.futures.Future[None] = torch.futures.Future()

        def outputs(_: object) -> list[torch.Tensor]:
            self._raise()
            return list(self.outputs)

        future = begun.then(outputs)
        if self._future.done():
            begun.set_result(None)
        else:
            complete, callbacks = functools.partial(begun.set_result, None), self._future.thread.callbacks
            self._future.add_done_callback(lambda _: callbacks.run(complete))
        return future


def timed_out(timeout: timedelta, outputs: Sequence[torch.Tensor]) -> str:
    """Return the message of :meth:`Work.wait` for a time-out."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in outputs)
    return f"wait: the collective (outputs of shape {shapes}) has not ended within {timeout.total_seconds():g} s"


PATIENCE_S = 0.05
"""Seconds after which the next call's callbacks begin even if those of a call still run: they may wait for these."""

_Job = tuple["CallFuture", Callable[..., None], tuple[object, ...]]


class CallThread:
    """Runs functions in the order of their submission on a thread that starts with the first of them.

    Args:
        name: name of the thread.
        is_held_up: returns True if the current thread blocks the progress of this one.

    Attributes:
        callbacks: runs the callbacks of the calls' futures.
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
        """Run ``function`` after all functions that were submitted before."""
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

    def drain(self) -> None:
        """Wait for all submitted calls. Their errors are raised where their futures are waited for, not here."""
        while pending := list(self.pending):
            self.require_other("a call behind asynchronous ones")
            concurrent.futures.wait(pending)

    def require_other(self, name: str) -> None:
        """Refuse a wait on a thread that these calls depend on, which would be a deadlock.

        Args:
            name: name of the function that would wait.

        Raises:
            RuntimeError: the current thread is such a thread, interrupted by a signal handler or a finaliser.
        """
        if threading.current_thread() is self._thread or self._is_held_up():
            raise made_inside(name, "a call that it would wait for")

    def finish(self, *, wait: bool = True) -> None:
        """Make the submitted calls, let their callbacks end, and end the thread; a later call starts a new thread.

        Args:
            wait: block until all that is done; else the thread ends by itself, and no call may be submitted any more.
        """
        thread = self._thread
        if thread is not None and not wait:
            self._jobs.put(None)
            return
        if thread is None or thread is threading.current_thread() or self._is_held_up():
            return
        self.drain()
        self.callbacks.join()
        self.drain()  # callbacks may have submitted calls
        self._jobs.put(None)
        thread.join()
        self._thread = None

    def end(self, until: float | None = None) -> bool:
        """Make the submitted calls, waiting for them and their callbacks. Return whether the calls have ended.

        Args:
            until: moment of ``time.monotonic`` until which to wait; None: without end.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(None if until is None else max(until - time.monotonic(), 0))
        self.callbacks.join(until)
        return not thread.is_alive()

    def cancel(self) -> None:
        """Cancel all calls that have not begun."""
        self._is_closed = True

    def _run(self) -> None:
        ranges.leave_thread_out()  # what it runs are parts of calls that other threads make
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
            # Drop the tensors before the future is done: memory that a caller drops after its wait is then freed at
            # once, on every rank alike.
            del job, function, arguments
            self.pending.discard(future)
            if failure is not None:
                future.set_exception(failure)
            elif runs:
                future.set_result(None)
            del future, failure  # keep no references while idle


class CallFuture(concurrent.futures.Future[None]):
    """The end of a call that a thread makes.

    Attributes:
        thread: the thread that makes the call.
    """

    def __init__(self, thread: CallThread) -> None:
        super().__init__()
        self.thread = thread

    def has_ended(self, timeout_s: float | None) -> bool:
        """Wait for the end of the call. Return whether it came within the time-out; None waits without one.

        Raises:
            RuntimeError: the call cannot end while this thread waits.
        """
        if not self.done():
            self.thread.require_other("wait")
        return bool(concurrent.futures.wait([self], timeout_s).done)


class Callbacks:
    """Completes futures in the order of their calls, on threads that live only while callbacks run.

    The thread that makes calls runs no callbacks. So a callback may wait for later calls, make new ones, and end its
    group. The callbacks of a call begin when those of the previous call have ended or have taken :data:`PATIENCE_S`.
    """

    def __init__(self) -> None:
        self._lock = forks.rlock()
        self._threads: set[_CallbackThread] = set()
        self._last: _CallbackThread | None = None

    def run(self, function: Callable[[], None]) -> None:
        """Run a function that completes a future, after the functions before it."""
        with self._lock:
            made = _CallbackThread(function, self._last, self._forget)
            try:
                made.start()
                self._threads.add(made)
                self._last = made
                return
            except RuntimeError:
                pass  # the interpreter is ending, or the system has no more threads
        function()

    def join(self, until: float | None = None) -> None:
        """Wait for all callbacks, or until a moment of ``time.monotonic``. Inside of a callback, return at once."""
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

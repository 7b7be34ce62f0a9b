"""A thread that makes asynchronous calls in order, and ends with the interpreter.

The standard library's executors wait for their threads at exit, before anything can tell these to stop: for as long as
a call may take.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable

_Job = tuple["concurrent.futures.Future[None]", Callable[..., None], tuple[object, ...]]


class CallThread:
    """Runs what it is given, one after the other; its thread begins with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, function: Callable[..., None], *arguments: object) -> concurrent.futures.Future[None]:
        """Run ``function`` behind everything that was submitted before."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sidelane-async", daemon=True)
            thread.start()
            self._thread = thread
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._jobs.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Wait for the call under way, and cancel those behind it."""
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def end(self, until: float) -> bool:
        """As :meth:`close`, but wait no longer than to a moment of ``time.monotonic``; whether it has ended."""
        self._is_closed = True
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(max(until - time.monotonic(), 0))
        return not self._thread.is_alive()

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
            if failure is not None:
                future.set_exception(failure)
            elif runs:
                future.set_result(None)
            del future, failure  # while idle, hold on to nothing

"""Handle of a collective that was started with ``async_op=True``: a ``torch.distributed.Work``."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.call_thread import CallFuture
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
        """Order the caller behind the collective: a CPU caller blocks, a GPU caller's current stream waits.

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

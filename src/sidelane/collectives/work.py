"""A collective that was started with ``async_op=True``, as torch.distributed knows such things."""

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
"""torch's own: as long as it takes."""


@untraced
class Work(dist.Work):
    """A collective under way: a ``torch.distributed.Work``.

    Attributes:
        outputs: what the collective writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: tuple[torch.Tensor, ...] = ()

    def __init_subclass__(cls) -> None:
        untraced(cls)

    @abc.abstractmethod
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Order the caller behind the collective: a CPU caller blocks, a GPU caller's current stream waits.

        Args:
            timeout: a GPU caller blocks as well, and either gives up after so long. The collective goes on.

        Returns:
            True.

        Raises:
            PeerError, PeerTimeoutError: a peer failed; on GPUs only once the failure has been noticed.
            PeerTimeoutError: also after ``timeout``, naming nobody.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """True once the output may be read, or the collective has failed. Never blocks."""

    @abc.abstractmethod
    def exception(self) -> Any:
        """What the collective failed with, as far as that is known; None if it has not."""

    @abc.abstractmethod
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The outputs as a future, for ``then``. On a GPU it is done at once, and its callbacks' streams wait."""

    def is_success(self) -> bool:
        """True if the collective has ended well."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The outputs. Raises as :meth:`wait`."""
        self.wait()
        return list(self.outputs)


def future_of(ended: CallFuture, result: Callable[[], list[torch.Tensor]]) -> torch.futures.Future[list[torch.Tensor]]:
    """A future of torch for the end of a call. Callbacks run behind those of calls before (``call_thread.Callbacks``).

    An error is raised by a callback, since C++ (DDP's) takes one that was set from Python for a result, and reads it as
    tensors. Whoever waits gets a RuntimeError with its text.

    Args:
        ended: when the collective has.
        result: called then: the outputs, or its error.
    """
    begun: torch.futures.Future[None] = torch.futures.Future()
    future = begun.then(lambda _: result())
    if ended.done():
        begun.set_result(None)
    else:
        complete = functools.partial(begun.set_result, None)
        ended.add_done_callback(lambda _: ended.thread.callbacks.run(complete))
    return future


def timed_out(timeout: timedelta, outputs: Sequence[torch.Tensor]) -> str:
    """What :meth:`Work.wait` says when it gives up."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in outputs)
    return f"wait: the collective (outputs of shape {shapes}) has not ended within {timeout.total_seconds():g} s"

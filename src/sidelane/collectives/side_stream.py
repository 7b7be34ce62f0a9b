"""A stream beside the caller's, on which calls are queued behind the caller's work so far.

Compiled code does the same for repeated calls (``native/replay.c``), in less time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class SideStream:
    """A stream of high priority for calls that the caller's next work does not wait for.

    Args:
        device: GPU of the stream.

    Attributes:
        stream: the stream.
        handle: its handle in CUDA.
        caller: stream behind whose work a function has come last.
        is_open: functions have queued work since an owner noted that other streams have waited for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle = int(self.stream.cuda_stream)
        self.caller = self.stream
        self.is_open, self._event = False, torch.cuda.Event()

    def run(self, job: Callable[[], T]) -> T:
        """Run a function, which queues work, with this stream as the current one, behind the caller's work so far."""
        caller = torch.cuda.current_stream(self.stream.device)
        self.caller, self.is_open = caller, True
        self._event.record(caller)
        self.stream.wait_event(self._event)
        return self.within(job, caller)

    def within(self, job: Callable[[], T], caller: torch.cuda.Stream | None = None) -> T:
        """Run a function with this stream as the current one; ``caller``: the one that is, if it is known."""
        stream = self.stream
        if torch.cuda.current_device() != stream.device_index:
            with torch.cuda.stream(stream):
                return job()
        caller = caller or torch.cuda.current_stream(stream.device)
        torch.cuda.set_stream(stream)  # in half the time that the context takes
        try:
            return job()
        finally:
            torch.cuda.set_stream(caller)

    def current(self) -> tuple[int, int, int]:
        """Return the current stream, as :meth:`follow` takes it."""
        return torch._C._cuda_getCurrentStream(self.stream.device_index)

    def follow(self, other: tuple[int, int, int]) -> None:
        """Let the current stream wait for all that another one has."""
        if other != self.current():
            stream = torch.cuda.Stream(stream_id=other[0], device_index=other[1], device_type=other[2])
            torch.cuda.current_stream(self.stream.device).wait_stream(stream)

    def join(self) -> None:
        """Let the current stream wait for all that is queued here."""
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class StreamMark:
    """The end of all that a stream has so far, as compiled code's ``Mark`` (``native/replay.c``).

    Args:
        side: the stream.
        watch: watch of the executor, whose ``failure`` is the error of a call that has failed.
    """

    def __init__(self, side: SideStream, watch: Any) -> None:
        self._caller, self._watch, self._event = side.caller, watch, side.stream.record_event()

    def follow(self) -> bool | None:
        """Let the current stream wait. Return True if it is the caller's; None, with nothing done, after a failure."""
        if self._watch.failure is not None:
            return None
        waiting = torch.cuda.current_stream(self._caller.device)
        waiting.wait_event(self._event)
        return waiting == self._caller

    def query(self) -> bool:
        """Return True once it has been reached."""
        return bool(self._event.query())

"""A stream beside the caller's, on which calls are queued behind the caller's work so far.

``torch.cuda.stream`` and ``wait_stream`` do the same and take the host twice as long, in front of every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

MOST_CALLERS = 64
"""Largest number of callers' streams that are remembered."""


class SideStream:
    """A stream of high priority for calls that the caller's next work does not wait for.

    Args:
        device: GPU of the stream.

    Attributes:
        stream: the stream.
        handle: its handle in CUDA.
        caller: stream behind whose work it has come last.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle = int(self.stream.cuda_stream)
        self.caller = self.stream
        self._event = torch.cuda.Event()
        self._joined: torch.cuda.Stream | None = None  # it has waited for all that is queued here

    def run(self, job: Callable[[], T], behind: torch.cuda.Event | None = None) -> T:
        """Run a function with this stream as the current one.

        Args:
            job: function that queues work.
            behind: event behind which the work comes; None for all that the caller's stream has so far.
        """
        stream, caller = self.stream, self.follow(behind)
        if torch.cuda.current_device() != stream.device_index:
            with torch.cuda.stream(stream):
                return job()
        _make_current(stream)
        try:
            return job()
        finally:
            _make_current(caller)

    def follow(self, behind: torch.cuda.Event | None = None) -> torch.cuda.Stream:
        """Put what is queued here next behind the caller's work so far, or an event; return the caller's stream."""
        caller = self.caller = current_stream(self.stream.device_index)
        self._joined = None
        if behind is None:
            behind = self._event
            behind.record(caller)
        self.stream.wait_event(behind)
        return caller

    def join(self) -> None:
        """Let the current stream wait for all that is queued here."""
        caller = current_stream(self.stream.device_index)
        self._event.record(self.stream)
        caller.wait_event(self._event)
        self._joined = caller

    def is_joined(self) -> bool:
        """Return True if the current stream has waited for all that :meth:`run` and :meth:`follow` have let in."""
        return self._joined is not None and self._joined is current_stream(self.stream.device_index)


def current_stream(index: int) -> torch.cuda.Stream:
    """Return the current stream of a GPU, as ``torch.cuda.current_stream`` does in more time."""
    found = torch._C._cuda_getCurrentStream(index)
    stream = _streams.get(found)
    if stream is None:
        if len(_streams) >= MOST_CALLERS:
            _streams.clear()
        number, device, kind = found
        stream = _streams[found] = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
    return stream


def _make_current(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}

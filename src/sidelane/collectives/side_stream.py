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
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._event = torch.cuda.Event()
        self._callers: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def run(self, job: Callable[[], T], behind: torch.cuda.Event | None = None) -> T:
        """Run a function with this stream as the current one.

        Args:
            job: function that queues work.
            behind: event behind which the work comes; None for all that the caller's stream has so far.
        """
        stream, caller = self.stream, self._caller()
        if behind is None:
            behind = self._event
            behind.record(caller)
        stream.wait_event(behind)
        if torch.cuda.current_device() != stream.device_index:
            with torch.cuda.stream(stream):
                return job()
        _make_current(stream)
        try:
            return job()
        finally:
            _make_current(caller)

    def join(self) -> None:
        """Let the current stream wait for all that is queued here."""
        self._event.record(self.stream)
        self._caller().wait_event(self._event)

    def _caller(self) -> torch.cuda.Stream:
        """Return the current stream of the device."""
        found = torch._C._cuda_getCurrentStream(self.stream.device_index)
        caller = self._callers.get(found)
        if caller is None:
            if len(self._callers) >= MOST_CALLERS:
                self._callers.clear()
            number, index, kind = found
            caller = self._callers[found] = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        return caller


def _make_current(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )

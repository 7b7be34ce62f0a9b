"""Turns of an operator's buffers: its calls use them one after the other, whatever streams they come on.

Calls of a communicator are ordered behind each other, but an operator's computation before and after a call is work of
the caller's stream: a second use on another stream would overwrite bytes that the first one still sends::

    stream A   compute into the buffer | its copies, on a stream of the lane | read the results | end
    stream B                                                                                  | compute into the buffer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidelane.execute.base import Place
from sidelane.session import Communicator


class BufferTurn:
    """Context manager around each use of the buffers. A use on another stream waits for the end of the one before, on
    the device.

    Uses on one stream follow each other anyway, and cost no call of the driver. Once there have been two streams, the
    end of each use is an event. The first time the event stands behind all work that the other stream had by then, as
    between calls of a communicator.

    A graph under capture can wait for nothing outside of it, so uses of each capture take turns among themselves.
    The caller orders its replays.

    Args:
        place: function that returns the caller's stream and whether it is captured.
        capture_of: function that returns the number of a place's capture, never used twice.
        stream: function that returns the caller's stream; called only if the place has changed.
    """

    def __init__(
        self, place: Callable[[], Place], capture_of: Callable[[Place], int], stream: Callable[[], Any]
    ) -> None:
        self._place_of, self._capture_of, self._stream_of = place, capture_of, stream
        self._last: dict[int, _Use] = {}  # of eager calls, under 0, and of the latest capture
        self._place: Place = (0, False)
        self._capture = 0
        self._has_several = False

    def __enter__(self) -> None:
        place = self._place = self._place_of()
        capture = self._capture = self._capture_of(place) if place[1] else 0
        last = self._last.get(capture)
        if last is None or last.place == place:
            return
        self._has_several = True
        ended = last.ended
        if ended is None and self._capture_of(last.place) == capture:
            ended = last.stream.record_event()
        if ended is not None:  # otherwise a graph was begun there since, which nothing outside can follow
            self._stream_of().wait_event(ended)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        place, capture = self._place, self._capture
        if capture and kind is not None:
            return  # that graph will not exist
        last = self._last.get(capture)
        if last is not None and last.place == place and not self._has_several:
            return
        if last is None or last.place != place:
            if capture:  # earlier captures have ended
                self._last = {number: use for number, use in self._last.items() if number in (0, capture)}
            last = self._last[capture] = _Use(place, self._stream_of())
        if self._has_several:
            last.ended = last.stream.record_event()


class _Use:
    """The last use of a capture, or of all eager calls. ``ended``: event of its end, None until it is needed."""

    __slots__ = ("ended", "place", "stream")

    def __init__(self, place: Place, stream: Any) -> None:
        self.place, self.stream = place, stream
        self.ended: Any = None


def in_turn(comm: Communicator) -> BufferTurn:
    """Return the turns of an operator's buffers. On CPU ranks calls end before they return, and share one place."""
    backend, device = comm.lane.backend, comm.device
    if device.type == "cpu":
        return BufferTurn(backend.place, backend.capture_of, lambda: None)
    return BufferTurn(backend.place, backend.capture_of, lambda: torch.cuda.current_stream(device))

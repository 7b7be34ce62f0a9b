"""Threads that take turns in an order that all ranks share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """One turn after the other, round and round, for as many threads as there are left.

    On GPUs the communicators of a process share the device's channels, so that the calls of all of them need one order
    (docs/internals/failure.md): whichever thread makes them.

    Args:
        count: threads, numbered from 0.
    """

    def __init__(self, count: int) -> None:
        self._left = list(range(count))
        self._next = 0  # place in ``_left`` of whose turn it is
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Wait for the turn of thread ``number``; when the block ends it is the next one's."""
        with self._changed:
            self._changed.wait_for(lambda: self._left[self._next] == number)
        try:
            yield
        finally:
            with self._changed:
                self._next = (self._next + 1) % len(self._left)
                self._changed.notify_all()

    def leave(self, number: int) -> None:
        """Thread ``number`` takes no more of them. Idempotent."""
        with self._changed:
            if number not in self._left:
                return
            place = self._left.index(number)
            self._left.remove(number)
            if self._left:
                self._next = (self._next - (place < self._next)) % len(self._left)
            self._changed.notify_all()

"""Memory that graphs were captured with, looked at while they may be replayed (``Config.debug``).

A graph keeps the addresses of its capture. If that memory was freed, a replay reads and writes what belongs to nobody,
or to somebody else. The host sees neither the replay nor the end of the graph. It sees that memory is gone, which is no
mistake as long as nothing is replayed: that is said once. And of a program on copy engines it sees that it runs, by a
word of the device (``watch``): then it is one.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class _Captured:
    """What one capture of a call uses. ``is_gone``: None once it is."""

    busy: int
    what: str
    is_gone: Callable[[], bool] | None


class CapturedMemory:
    """Of one executor. Callers add to it; one thread looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captured: list[_Captured] = []

    @property
    def is_empty(self) -> bool:
        """There is nothing to look at."""
        return not self._captured

    def add(self, busy: int, what: str, is_gone: Callable[[], bool]) -> None:
        """Watch over the memory of a call that was captured just now.

        Args:
            busy: what its program writes while it runs (``watch.Subject``); 0 for what writes nothing, as kernels.
            what: the call and its tensors, for people.
            is_gone: whether some of the memory was freed. Called by another thread.
        """
        with self._lock:
            for other in self._captured:
                if other.busy == busy:
                    # One program in two graphs: which of them runs cannot be told any more.
                    other.busy = 0
            self._captured.append(_Captured(busy, what, is_gone))

    def look(self, busy: Callable[[], int]) -> str | None:
        """Warn of memory that is gone; what is replayed on such memory, if anything is.

        Args:
            busy: asks what runs. Memory that was gone before that is not what it was captured with: to free it waits
                for what is under way.
        """
        with self._lock:
            captured = list(self._captured)
        for one in captured:
            if one.is_gone is not None and one.is_gone():
                one.is_gone = None
                logger.warning("%s: memory was freed with which it was captured: do not replay its graph", one.what)
        running = busy()
        found = [one.what for one in captured if one.is_gone is None and one.busy and one.busy == running]
        with self._lock:  # of the rest there is no more to say
            self._captured = [one for one in self._captured if one.is_gone is not None or one.busy]
        return found[0] if found else None

"""Allocations of other ranks, mapped by a thread, so that no call takes longer for it."""

from __future__ import annotations

import collections
import queue
import threading

from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Mapping, OrdinaryMemory

Name = tuple[int, str]
"""Owner and name of an allocation."""


class Mappings:
    """What one lane has mapped. One thread uses it; another one maps.

    Args:
        memory: that maps.
    """

    def __init__(self, memory: OrdinaryMemory) -> None:
        self._memory = memory
        self._wanted: queue.SimpleQueue[tuple[Name, str] | Mapping | None] = queue.SimpleQueue()
        self._done: collections.deque[tuple[Name, Mapping | str]] = collections.deque()
        self._pending: set[Name] = set()
        self._mapped: dict[Name, Mapping] = {}
        self._retired: collections.deque[tuple[int, Mapping]] = collections.deque()
        self._thread: threading.Thread | None = None

    def want(self, name: Name, handle: str) -> None:
        """Have an allocation mapped."""
        self._pending.add(name)
        self._give((name, handle))

    def look(self) -> dict[Name, str]:
        """Take what was done since; what could not be mapped, and why."""
        failed: dict[Name, str] = {}
        while self._done:
            name, found = self._done.popleft()
            if name not in self._pending:  # dropped meanwhile
                continue
            self._pending.discard(name)
            if isinstance(found, str):
                failed[name] = found
            else:
                self._mapped[name] = found
        return failed

    @property
    def is_pending(self) -> bool:
        """Something is not mapped yet."""
        return bool(self._pending)

    def start(self, name: Name) -> int:
        """Where an allocation that is mapped begins here."""
        return self._mapped[name].start

    def drop(self, name: Name, last: int) -> None:
        """An allocation is of no use any more, but to calls up to ``last``, which may read there."""
        self._pending.discard(name)
        mapping = self._mapped.pop(name, None)
        if mapping is not None:
            self._retired.append((last, mapping))

    def let_go(self, ended: int) -> None:
        """Of what was dropped: calls up to this one have ended."""
        while self._retired and self._retired[0][0] <= ended:
            self._give(self._retired.popleft()[1])  # unmapping may take its time as well

    def close(self) -> None:
        """Let go of everything. Nothing may be under way."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join(10)
            self._thread = None
        self._done.clear()
        self._pending.clear()
        self._mapped.clear()
        self._retired.clear()

    def _give(self, job: tuple[Name, str] | Mapping) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sidelane-maps", daemon=True)
            self._thread.start()
        self._wanted.put(job)

    def _work(self) -> None:
        self._memory.attach_thread()
        while (job := self._wanted.get()) is not None:
            if not isinstance(job, tuple):
                job = None  # the last reference, with which it is unmapped
                continue
            name, handle = job
            try:
                self._done.append((name, self._memory.map(handle, name[1])))
            except UnavailableError as error:
                self._done.append((name, str(error)))
            except Exception as error:  # whatever it is, peers must hear that this rank cannot
                self._done.append((name, f"{type(error).__name__}: {error}"))

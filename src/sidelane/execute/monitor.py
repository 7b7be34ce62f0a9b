"""What an executor needs to know about its peers, and has to tell them (``memory.control.ControlBlock`` does it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NO_CALL = 0
"""Calls begin at 1: a ``check`` of this one finds only that a peer gave up."""


class PeerMonitor(Protocol):
    """The state of all ranks, seen and told from one of them. Any thread may use it."""

    def begin(self, call: int, step: str) -> None:
        """Say that this rank has begun invocation ``call``."""
        ...

    def note(self, call: int, step: str) -> None:
        """Say that this rank waits for a peer in ``call``, and at which step."""
        ...

    def end(self, call: int) -> None:
        """Say that nothing of ``call`` runs on this rank any more, whichever way it ended."""
        ...

    def check(self, call: int) -> None:
        """Raise PeerError (PeerTimeoutError after a time-out) if a peer gave up, refused it, closed or died."""
        ...

    def check_present(self, call: int) -> None:
        """As :meth:`check`, but that peers may refuse ``call``: for what may run then without being part of it."""
        ...

    def absent(self, call: int) -> Sequence[int]:
        """Ranks that have not begun ``call``."""
        ...

    def at_fault(self, ranks: Sequence[int]) -> Sequence[int]:
        """Of ranks that somebody waits for, those that do not wait for a peer themselves; all, if all of them do."""
        ...

    def describe(self, rank: int, call: int = 0) -> str:
        """One phrase about ``rank`` for an error message; with ``call``, also whether it made another call of it."""
        ...

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        """Make ``check`` raise on every rank; ``ranks`` are at fault."""
        ...

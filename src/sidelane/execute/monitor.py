"""Interface through which an executor watches its peers and informs them (see ``memory.control.ControlBlock``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NO_CALL = 0
"""Number of no call, since calls begin at 1: ``check`` with it finds aborts of peers only."""


class PeerMonitor(Protocol):
    """The state of all ranks, read and written by one of them. Any thread may use it."""

    def begin(self, call: int, step: str) -> None:
        """Record that this rank has begun invocation ``call``."""
        ...

    def note(self, call: int, step: str) -> None:
        """Record that this rank waits for a peer in ``call``, and at which step."""
        ...

    def end(self, call: int) -> None:
        """Record that ``call`` has ended on this rank, with or without an error."""
        ...

    def check(self, call: int) -> None:
        """Raise PeerError (PeerTimeoutError after a time-out) if a peer gave up, refused it, closed or died."""
        ...

    def check_present(self, call: int) -> None:
        """Check as :meth:`check` does, but accept refusals of ``call``: for work that is not part of this call."""
        ...

    def absent(self, call: int) -> Sequence[int]:
        """Return the ranks that have not begun ``call``."""
        ...

    def at_fault(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of the awaited ranks that do not wait for a peer themselves; all of them if every one does."""
        ...

    def describe(self, rank: int, call: int = 0) -> str:
        """Describe ``rank`` for an error; with ``call``, also tell whether it has another signature there."""
        ...

    def lasts(self, call: int, title: str, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        """Write a line of the log, once for ``call``, if this rank has waited long.

        Args:
            call: number of the call.
            title: the call in words.
            ranks: ranks that have not come, or have not signalled; none if that is not known.
            waited_s: seconds that the wait has lasted.
            timeout_s: seconds after which it becomes an error.
        """
        ...

    def waited(self, ranks: Sequence[int], seconds: float) -> None:
        """Tell observers that an engine of this rank has waited for some ranks."""
        ...

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        """Make ``check`` raise on every rank; ``ranks`` are at fault."""
        ...

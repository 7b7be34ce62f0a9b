"""Watchdog for calls among several nodes that no host waits for: those on streams of GPUs.

NCCL notices a dead node by its own time-out only, names no rank, and ends the process. Here a thread of each rank
watches the duration of the call under way and the other ranks' entries; it ends the call with an error that names the
ranks.

A rank that cannot go on calls the roll with the number of its call. Ranks that have come to that call answer, even if
their own part has ended; ranks that have not are at fault.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.integrations.nodes.failures import RollCall
from sidelane.memory import ending

_LOOK_S = 0.5
_PATIENCE_S = 2.0  # a rank may have completed its part before it ended


@dataclasses.dataclass(slots=True)
class CallUnderWay:
    """A call under way.

    Attributes:
        number: number of the call, from 1.
        begun: function that returns True once the work queued in front of it has ended.
        ended: function that returns True once it has ended.
        since: time at which it was seen to have begun, by the clock of the thread.
    """

    number: int
    begun: Callable[[], bool]
    ended: Callable[[], bool]
    since: float | None = None


class Lookout:
    """Watchdog thread; see the module. The thread begins with the first call.

    Args:
        roll: roll call of the ranks.
        timeout: time-out of a call, from the time when it begins to run.
        attach: function called first in the thread.
        end: function called in the thread with the error that ends the communicator: everything that waits must go on.

    Attributes:
        calls: number of calls that have begun here; 0 if hosts wait for their calls, as the roll is not called then.
    """

    def __init__(
        self, roll: RollCall, timeout: timedelta, attach: Callable[[], None], end: Callable[[PeerError], None]
    ) -> None:
        self._roll, self.timeout_s, self._attach, self._end = roll, timeout.total_seconds(), attach, end
        self._marks: list[CallUnderWay] = []
        self.calls = 0
        self._noticed: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, begun: Callable[[], bool], ended: Callable[[], bool]) -> None:
        """Register a call that is about to be made, the same on all ranks. The thread calls the two functions."""
        self.calls += 1
        self._marks.append(CallUnderWay(self.calls, begun, ended))
        if self._thread is None:
            ending.at_exit(self)
            self._thread = threading.Thread(target=self._run, name="sidelane-lookout", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent; the thread itself may call it."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LOOK_S + 5)
        self._attach, self._end = lambda: None, lambda error: None  # these refer to an object that refers to this one

    def end(self, until: float) -> None:
        """End the thread at exit, as :meth:`close` does."""
        self.close()

    def _run(self) -> None:
        self._attach()
        while not self._stop.wait(min(_LOOK_S, self.timeout_s / 4)):
            failure = self.look(time.monotonic())
            if failure is not None:
                self._end(self._roll.settle(failure, calls=self.calls))
                return

    def look(self, now: float) -> PeerError | None:
        """Return the error for which to end the communicator, if any; the clock says ``now``."""
        while self._marks and self._marks[0].ended():
            self._marks.pop(0)
            self._noticed = None
        self._roll.answer(self.calls)
        if not self._marks or not self._marks[0].begun():
            return None
        first = self._marks[0]
        first.since = now if first.since is None else first.since
        if self._roll.known():
            self._noticed = now if self._noticed is None else self._noticed
            if now - self._noticed > _PATIENCE_S:
                return PeerError(f"call {first.number} among several nodes was under way")
        if now - first.since > self.timeout_s:
            waited = f"{now - first.since:.1f} s until its time-out"
            return PeerTimeoutError(f"call {first.number} among several nodes was under way for {waited}", ())
        return None

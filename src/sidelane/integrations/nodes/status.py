"""Status of a communicator of several nodes: its end, the ranks at fault, and the watchdog of calls on streams.

A rank can check only the processes on its own machine. So a rank that fails writes into the store of the group that
it is present, and the ranks at fault as far as it knows; ranks that wait read the store. If no rank knows, those that
have not written within a few seconds that they are present are named. The first entry counts for all.

No host waits for calls on streams of GPUs, and NCCL notices a dead node by its own time-out only, names no rank, and
ends the process. There a thread of each rank watches the duration of the call under way and the other ranks' entries.
A rank whose call does not end writes the call's number. Ranks that have come to that call answer, even if their own
part has ended; ranks that have not are at fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from sidelane import forks
from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError, anew
from sidelane.integrations.nodes.groups import NodeRanks
from sidelane.memory import ending
from sidelane.memory.store_values import alike, parsed

_GRACE_S = 2.0  # in which ranks answer; a rank may also have completed its part before it ended
_SLEEP_S = 0.05
_LOOK_S = 0.5


class NodesStatus:
    """Status of one communicator; see the module. Calls along rails that wait query it (``works.OtherWork``).

    Args:
        ranks: ranks of the communicator; their time-out counts on streams from the time when a call begins to run.
        release: function that makes the other ranks of this node stop waiting for this one.

    Attributes:
        timeout_s: time-out of calls.
        failure: error that has ended the communicator.
        calls: number of calls on streams that have begun here; 0 if hosts wait for their calls.
    """

    def __init__(self, ranks: NodeRanks, release: Callable[[], None]) -> None:
        self._store, self._rank, self._nodes, self._liveness = ranks.store, ranks.rank, ranks.nodes, ranks.liveness
        self.timeout_s, self._release = ranks.config.timeout_s, release
        self._grace_s = min(_GRACE_S, self.timeout_s)
        self._neighbours = ranks.nodes.members[ranks.nodes.of[ranks.rank]]
        self._has_answered = False
        self.failure: PeerError | None = None
        self._is_raised = True
        self._lock = forks.rlock()  # the watchdog may end the communicator while a call of it fails
        self.calls = 0

    def require(self, what: str) -> None:
        """Raise if the communicator has ended: first the watchdog's error, if no call has raised it.

        Raises:
            PeerError: the watchdog has ended it.
            CommunicatorClosedError: it has ended before.
        """
        with self._lock:
            failure, is_raised, self._is_raised = self.failure, self._is_raised, True
        if failure is None:
            return
        if not is_raised:
            raise anew(failure)
        raise CommunicatorClosedError(f"{what}: the communicator was closed, or has failed: {failure}")

    def end(self, error: PeerError, *, is_raised: bool = True) -> PeerError:
        """End the communicator, and return the error that has ended it: the first one.

        Args:
            error: the error.
            is_raised: a call raises it; otherwise the next one does.
        """
        with self._lock:
            if self.failure is None:
                self.failure, self._is_raised = error, is_raised
            elif is_raised:
                self._is_raised = True
            return self.failure

    def leave(self, why: str) -> None:
        """End the communicator because of this rank; ``why`` says what it did."""
        self.publish((self._rank,), why)
        self.end(PeerError(f"rank {self._rank} {why}", (self._rank,)))

    def gone(self, peers: Sequence[int]) -> list[int]:
        """Return the ranks at fault, as far as known; whichever a call needs."""
        published = self._published()
        return list(published[0]) if published is not None else self._liveness.dead(self._neighbours)

    def explain(self, error: Exception, peers: Sequence[int], row: None = None) -> NoReturn:
        """Raise for an error of a part of a call, after an agreement.

        Args:
            error: the error.
            peers: ranks at fault, if no rank knows better.
            row: parameter of ``fallback.FailedPeers.explain``; such a part has no row of its own.
        """
        self._release()
        raise self.agree(error, peers) from error

    def agree(self, error: Exception, ranks: Sequence[int] = ()) -> PeerError:
        """Agree with all ranks left on the ranks at fault; this takes a few seconds if no rank knows.

        Args:
            error: error of this rank.
            ranks: ranks at fault according to the error, if no rank knows better.
        """
        with contextlib.suppress(RuntimeError):  # the store may have vanished with the rank that died
            self._report_presence()
            if self.calls:
                self._store.compare_set("agreement", "", str(self.calls))
        until = time.monotonic() + self._grace_s
        while (published := self._published()) is None and time.monotonic() < until:
            dead = self._liveness.dead(self._neighbours)
            if dead:
                published = self.publish(dead, "died")
                break
            time.sleep(_SLEEP_S)
        if published is None:
            absent = self._absent()
            published = self.publish(absent, "did not answer") if absent else (tuple(ranks), str(error))
        found, why = published
        kind = PeerTimeoutError if isinstance(error, PeerTimeoutError) else PeerError
        names = "".join(
            f"rank {rank} (rank {self._liveness.ranks[rank]} of the world, node {self._nodes.of[rank]}) "
            for rank in found
        )
        return kind(f"{names}{why}: {error}" if str(error) != why else f"{names}{why}", found)

    def answer(self) -> None:
        """Answer that this rank is present, if a rank asks in a call that has begun here, too."""
        with contextlib.suppress(RuntimeError, ValueError):
            if (
                not self._has_answered
                and self._store.check(["agreement"])
                and int(self._store.get("agreement")) <= self.calls
            ):
                self._report_presence()

    def publish(self, ranks: Sequence[int], why: str) -> tuple[tuple[int, ...], str]:
        """Publish the ranks at fault, unless another rank has done so already; return the published entry."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("fault", "", json.dumps((tuple(ranks), why)))
            published = self._published()
            if published is not None:
                return published
        return tuple(ranks), why

    def _report_presence(self) -> None:
        self._store.set(f"here/{self._rank}", "1")
        self._has_answered = True

    def _published(self) -> tuple[tuple[int, ...], str] | None:
        with contextlib.suppress(RuntimeError, ValueError):  # an entry in another format counts as none
            if self._store.check(["fault"]):
                match parsed(self._store.get("fault")):
                    case (tuple(ranks), str(why)) if alike((0,) * len(ranks), ranks):
                        return ranks, why
        return None

    def _absent(self) -> list[int]:
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(len(self._nodes.of)) if not self._store.check([f"here/{rank}"])]
        return []


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


class NodesWatchdog:
    """Watchdog thread for calls on streams; see the module. It begins with the first call.

    Args:
        status: status of the communicator.
        attach: function called first in the thread.
        end: function called in the thread with the error that ends the communicator: everything that waits must go on.
    """

    def __init__(self, status: NodesStatus, attach: Callable[[], None], end: Callable[[PeerError], None]) -> None:
        self._status, self._attach, self._end = status, attach, end
        self._marks: list[CallUnderWay] = []
        self._noticed: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, begun: Callable[[], bool], ended: Callable[[], bool]) -> None:
        """Register a call that is about to be made, the same on all ranks. The thread calls the two functions."""
        self._status.calls += 1
        self._marks.append(CallUnderWay(self._status.calls, begun, ended))
        if self._thread is None:
            ending.at_exit(self)
            self._thread = threading.Thread(target=self._run, name="sidelane-watchdog", daemon=True)
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
        while not self._stop.wait(min(_LOOK_S, self._status.timeout_s / 4)):
            failure = self.look(time.monotonic())
            if failure is not None:
                self._end(self._status.agree(failure))
                return

    def look(self, now: float) -> PeerError | None:
        """Return the error for which to end the communicator, if any; the clock says ``now``."""
        while self._marks and self._marks[0].ended():
            self._marks.pop(0)
            self._noticed = None
        self._status.answer()
        if not self._marks or not self._marks[0].begun():
            return None
        first = self._marks[0]
        first.since = now if first.since is None else first.since
        if self._status.gone(()):
            self._noticed = now if self._noticed is None else self._noticed
            if now - self._noticed > _GRACE_S:
                return PeerError(f"call {first.number} among several nodes was under way")
        if now - first.since > self._status.timeout_s:
            waited = f"{now - first.since:.1f} s until its time-out"
            return PeerTimeoutError(f"call {first.number} among several nodes was under way for {waited}", ())
        return None

"""The watch: a host thread that detects invocations that cannot end, explains them, and releases their waits.

Streams report in words of pinned host memory: the last batch of an invocation also writes its epoch there, without an
event or a call. The thread reads the words some twenty times a second. If an invocation cannot end, it finds the rank
and command that are missing, tells the peers, and releases every wait of this rank repeatedly, so that the streams
drain (replays of captured graphs, too). Bytes that move after that are garbage. The next call raises the error, and so
does every wait of the host.

Kernels write to the host only if they poll for long: then a kernel writes its generation to the status words
(``device/layout``), in the words of the ranks for which it waits. The thread reads these, and aborts kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from sidelane import ranges
from sidelane.device.layout import ABORT, MAX_RANKS, STATUS_WORDS, WAITING
from sidelane.errors import PeerError, PeerTimeoutError, SidelaneError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda.driver import Driver, HostWords
from sidelane.execute.cuda.release import FlagRescue
from sidelane.execute.cuda.stall import FlagWords, Stall, assume_missing, find_stall
from sidelane.log import UnfailingLogger
from sidelane.memory.control import NO_CALL, ControlBlock
from sidelane.native import Effect, Note
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelCall, KernelProgram
from sidelane.program.wraparound import reached

logger = UnfailingLogger(logging.getLogger(__name__))


STARTED, FINISHED, BUSY, STATUS = range(4)  # host words; the status words are the last of them
HOST_WORDS = STATUS + STATUS_WORDS
_GRACE_S = 0.2  # a peer that died may have done its part, and the invocation may still complete
_READ_S = 1.0
_LONGEST_SLEEP_S = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedProgram:
    """An invocation that is watched. ``captured``: it may be replayed at any time, and has no epoch."""

    epoch: int
    program: Program
    addresses: Addresses
    captured: bool = False

    def __str__(self) -> str:
        which = "replayed from a graph" if self.captured else f"invocation {self.epoch}"
        return f"{self.program.collective} {self.program.variant}, {which}"


class DeviceWatch:
    """Watches the invocations of one executor. ``start`` begins the thread.

    Args:
        driver: driver of the device.
        rank: rank of the executor.
        words: ``HOST_WORDS`` words of host memory.
        monitor: state of the peers.
        rescue: releases waits.
        timeout_s: seconds that a begun invocation may take.
    """

    def __init__(
        self,
        driver: Driver,
        rank: int,
        words: HostWords,
        monitor: ControlBlock,
        rescue: FlagRescue,
        timeout_s: float,
    ) -> None:
        self.failure: SidelaneError | None = None
        self.last_epoch = 0
        self._driver, self._rank, self._words, self._monitor, self._rescue = driver, rank, words, monitor, rescue
        self.timeout_s = timeout_s
        self._completed = 0  # last epoch that had finished when the failure came
        self._running: collections.deque[tuple[int, tuple[Program, Addresses]]] = collections.deque()
        self._first: WatchedProgram | None = None
        self._captured: list[WatchedProgram] = []
        self._subject: WatchedProgram | None = None
        self._since: float | None = None
        self._doomed_since: float | None = None
        self._flags_before: dict[int, object] | None = None
        self._status_words = words.array[STATUS:]
        self._last_kernel: tuple[int, tuple[KernelProgram | KernelCall, bool]] | None = None  # and if it was captured
        self._spin: tuple[tuple[int, int], ...] = ()
        self._spin_since = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sidelane-watch-{rank}", daemon=True)

    # --- for the executor ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _READ_S + 5)

    def issued(self, epoch: int, subject: tuple[Program, Addresses]) -> None:
        """Note that an invocation of a program at some addresses was submitted."""
        self.last_epoch = epoch
        self._running.append((epoch, subject))

    def launched(self, epoch: int, program: KernelProgram | KernelCall, *, captured: bool) -> None:
        """Note that a kernel was launched or captured."""
        self._last_kernel = (epoch, (program, captured))

    def issue_notes(self, subject: tuple[Program, Addresses]) -> tuple[Note, ...]:
        """Return the side effects of :meth:`issued`, for compiled code."""
        return (Effect.SET_NUMBER, self, "last_epoch", None), (Effect.APPEND_PAIR, self._running.append, "", subject)

    def launch_notes(self, program: KernelProgram | KernelCall) -> tuple[Note, ...]:
        """Return the side effects of :meth:`launched` for a kernel that is not captured, for compiled code."""
        return ((Effect.SET_PAIR, self, "_last_kernel", (program, False)),)

    def next_busy_number(self) -> int:
        """Return the number that the next captured program writes into ``BUSY`` while it runs."""
        return len(self._captured) + 1

    def captured(self, subject: WatchedProgram) -> None:
        """Note that a program was loaded for a graph; it writes the last ``next_busy_number``."""
        self._captured.append(subject)

    def finished(self, epoch: int) -> bool:
        """Return True once invocation ``epoch`` has ended on this rank, or its waits were released."""
        return reached(int(self._words.array[FINISHED]), epoch)

    @property
    def is_at_rest(self) -> bool:
        """True if all that was submitted has ended, and no graph is running a program."""
        return self.finished(self.last_epoch) and not self._words.array[BUSY]

    def wait(self, epoch: int) -> None:
        """Block until ``epoch`` has finished.

        Raises:
            PeerError, PeerTimeoutError: it failed.
        """
        began = time.monotonic()
        while not self.finished(epoch) and self.failure is None:
            time.sleep(min(max((time.monotonic() - began) / 8, 10e-6), _LONGEST_SLEEP_S))
        if self.failure is not None and epoch > self._completed:
            self.raise_failure()

    def look_for_aborts(self) -> None:
        """Read the aborts of peers, after an invocation has ended, to know whether it ended properly.

        A peer that gives up posts its abort before it releases its streams, whose signals then look like proper ones.
        """
        trouble = None if self.failure is not None else _trouble(self._monitor.check, NO_CALL)
        if trouble is not None:
            self.fail(type(trouble)(str(trouble), trouble.ranks))

    def raise_failure(self) -> None:
        """Raise the failure, if there is one: a new exception each time, since tracebacks accumulate on exceptions."""
        if self.failure is None:
            return
        if isinstance(self.failure, PeerError):
            raise type(self.failure)(str(self.failure), self.failure.ranks)
        raise SidelaneError(str(self.failure)) from self.failure

    def fail(self, error: SidelaneError) -> None:
        """Fail permanently: keep ``error``, and let the thread release all waits from now on."""
        self._completed = int(self._words.array[FINISHED])
        self.failure = error
        self._status_words[ABORT] = 1
        if ranges.observers:
            ranges.notify("failed", error)

    def fail_submission(self, title: str, error: BaseException) -> None:
        """Fail after an incomplete submission: the peers would wait for the rest."""
        text = f"{title}: rank {self._rank} could not submit it: {type(error).__name__}: {error}"
        self._monitor.abort(text, (self._rank,))
        self.fail(SidelaneError(text))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._driver.attach_thread()
        interval = min(0.05, self.timeout_s / 8)
        while not self._stop.wait(interval):
            try:
                self.poll(time.monotonic())
            except Exception as error:
                # No other thread would notice that the watch has ended.
                if self.failure is None:
                    self.fail(SidelaneError(f"rank {self._rank}: watching failed: {type(error).__name__}: {error}"))

    def poll(self, now: float) -> None:
        """Check all words once."""
        if self.failure is not None:
            self._rescue.release(self.last_epoch)
            return
        self._look_at_kernels(now)
        if self.failure is not None:
            return
        front = self._front()
        started = front is not None and reached(int(self._words.array[STARTED]), front.epoch)
        subject = front if started else self._replayed() or front
        if subject is not self._subject:  # one object for as long as it is first
            self._subject, self._since, self._doomed_since, self._flags_before = subject, None, None, None
        if subject is None:
            self.look_for_aborts()
            return
        if self._since is None and (started or subject.captured):
            self._since = now
        trouble = self._trouble_of(subject)
        if trouble is None:
            self._doomed_since = None
        elif self._doomed_since is None:
            self._doomed_since = now
        elif now - self._doomed_since > _GRACE_S:
            self._give_up(subject, trouble)
            return
        if self._since is None:
            return
        if now - self._since > self.timeout_s and self._stands_still(subject):
            self._time_out(subject, now - self._since)
        elif not subject.captured:  # of which every look may find another replay
            absent = self._monitor.absent(subject.epoch)
            self._monitor.lasts(subject.epoch, str(subject), absent, now - self._since, self.timeout_s)

    def _look_at_kernels(self, now: float) -> None:
        """Read the status words: find a kernel that polls, and the time for which it has waited for the same ranks."""
        words = self._status_words[WAITING : WAITING + MAX_RANKS].tolist()
        spin = tuple((rank, generation) for rank, generation in enumerate(words) if generation)
        if spin:
            self._status_words[WAITING : WAITING + MAX_RANKS] = 0  # a kernel that goes on spinning writes again
        if spin != self._spin:
            self._spin, self._spin_since = spin, now
            return
        if not spin or self._last_kernel is None:
            return
        waited_s = now - self._spin_since
        epoch, (program, captured) = self._last_kernel
        generation = max(generation for _, generation in spin)
        title = (
            f"a kernel (generation {generation}; last started: {program.collective} {program.variant}, call {epoch})"
        )
        ranks = tuple(rank for rank, _ in spin)
        trouble = None
        if waited_s > _GRACE_S:
            trouble = None if captured else _trouble(self._monitor.check, epoch)
            # A graph may be replayed behind the last call: who has closed or died by now will not send any more.
            trouble = trouble or _trouble(self._monitor.check_present, max(epoch, self.last_epoch) + 1)
        if trouble is not None:
            text = f"{trouble} (seen by rank {self._rank} in {title}, which waits for data of ranks {list(ranks)})"
            self._monitor.abort(text, trouble.ranks, timed_out=isinstance(trouble, PeerTimeoutError))
            self.fail(type(trouble)(text, trouble.ranks))
        elif waited_s > self.timeout_s:
            missing = "; ".join(f"{self._monitor.describe(rank)} has not sent its data" for rank in ranks)
            text = f"{title}: rank {self._rank} waited {waited_s:.1f} s; {missing}"
            self._monitor.abort(text, ranks, timed_out=True)
            self.fail(PeerTimeoutError(text, ranks))
        else:
            self._monitor.lasts(epoch, title, ranks, waited_s, self.timeout_s)

    def _front(self) -> WatchedProgram | None:
        """Return the first unfinished invocation; post progress, so that peers can tell a death from a proper end."""
        word, last_ended = int(self._words.array[FINISHED]), NO_CALL
        while self._running and reached(word, self._running[0][0]):
            last_ended, _ = self._running.popleft()
        ended = self._first
        if not self._running:
            self._first = None
        elif ended is None or ended.epoch != self._running[0][0]:
            epoch, subject = self._running[0]
            self._first = WatchedProgram(epoch, *subject)
            self._monitor.begin(self._first.epoch, str(self._first))
        if ended is not None and ended is not self._first:
            self._monitor.end(ended.epoch)
        if last_ended != NO_CALL:  # also of those that were never seen to run
            self._monitor.end(last_ended)
        return self._first

    def _replayed(self) -> WatchedProgram | None:
        busy = int(self._words.array[BUSY])
        return self._captured[busy - 1] if 0 < busy <= len(self._captured) else None

    def _trouble_of(self, subject: WatchedProgram) -> PeerError | None:
        """Return the error for which it cannot end; a graph may be replayed at any time, at any call of the ranks."""
        if subject.captured:
            return _trouble(self._monitor.check_present, self.last_epoch + 1)
        return _trouble(self._monitor.check, subject.epoch)

    def _stands_still(self, subject: WatchedProgram) -> bool:
        """Return False while a graph may just be replayed so often that every check finds it running."""
        if not subject.captured:
            return True
        flags: dict[int, object] = dict(self._rescue.read(subject.program, subject.addresses, _READ_S))
        before, self._flags_before = self._flags_before, flags
        return before == flags

    def _stall(self, subject: WatchedProgram, suspects: Sequence[int]) -> Stall:
        """Find the missing commands from the flags of all ranks; if unreadable, blame the suspects or all peers."""
        words: FlagWords = self._rescue.read(subject.program, subject.addresses, _READ_S)
        if not words:
            peers = [rank for rank in range(subject.program.world_size) if rank != self._rank]
            words = assume_missing(subject.program, subject.epoch, suspects or peers)
        return find_stall(subject.program, self._rank, subject.epoch, words)

    def _give_up(self, subject: WatchedProgram, trouble: PeerError) -> None:
        """Fail since a peer is gone or has given up."""
        waiting = self._stall(subject, trouble.ranks).waiting
        text = f"{trouble} (seen by rank {self._rank} in {subject}" + (f", {waiting})" if waiting else ")")
        self._monitor.abort(text, trouble.ranks, timed_out=isinstance(trouble, PeerTimeoutError))
        self.fail(type(trouble)(text, trouble.ranks))
        self._rescue.release(self.last_epoch)

    def _time_out(self, subject: WatchedProgram, waited_s: float) -> None:
        absent = () if subject.captured else tuple(self._monitor.absent(subject.epoch))
        stall = self._stall(subject, absent)
        # A peer that gave up first has let its own waits pass, and looks at fault itself: it says so before it does.
        trouble = self._trouble_of(subject)
        if trouble is not None:
            self._give_up(subject, trouble)
            return
        missing = dict(stall.missing)
        culprits = absent or stall.ranks
        reasons = [
            f"{self._monitor.describe(rank, 0 if subject.captured else subject.epoch)} "
            + ("has not come" if rank in absent else "has not signalled")
            + (f" ({missing[rank]})" if rank in missing else "")
            for rank in culprits
        ]
        text = f"{subject}: rank {self._rank} waited {waited_s:.1f} s at {stall.waiting or 'its streams'}; " + (
            "; ".join(reasons) or "no flag is missing: the device does not get on"
        )
        self._monitor.abort(text, culprits, timed_out=True)
        self.fail(PeerTimeoutError(text, culprits))
        self._rescue.release(self.last_epoch)


def _trouble(check: Callable[[int], None], call: int) -> PeerError | None:
    """Return the error that a check of ``call`` raises; None if it raises none."""
    try:
        check(call)
    except PeerError as error:
        return error
    return None

"""One invocation of a program on one rank's engine threads: running, waiting, failing, stopping."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Set

from sidelane import ranges
from sidelane.errors import PeerError, PeerTimeoutError, anew
from sidelane.execute.cpu.commands import Action
from sidelane.memory.control import ControlBlock
from sidelane.program.ir import Command, Flag, Program, Queue, Wait, describe

Delay = Callable[[Queue, int], None]

# A wait polls a few times while yielding the processor, then sleeps an eighth of the time waited so far. That delays a
# chain of waits by an eighth at most, and leaves the processor to working threads when 64 threads wait on two cores.
_SPINS = 8
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 5e-3
_CHECK_INTERVAL_S = 2e-3
_NOTE_AFTER_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramSite:
    """Values that all invocations of a loaded program share.

    Attributes:
        rank: rank of this process.
        program: the program.
        writers: ranks that signal each flag.
        monitor: state of the peers.
        timeout_s: returns the time-out in seconds; called by each wait, since it may change.
        delay: called before every command, for tests.
    """

    rank: int
    program: Program
    writers: Mapping[Flag, Set[int]]
    monitor: ControlBlock
    timeout_s: Callable[[], float]
    delay: Delay | None


class Invocation:
    """A running invocation.

    Args:
        site: values of the loaded program.
        epoch: number of the invocation.
        parts: number of calls of ``leave`` after which it has ended.
    """

    def __init__(self, site: ProgramSite, epoch: int, parts: int) -> None:
        self.epoch = epoch
        self.stamps: dict[int, int] = {}
        self._site = site
        self._remaining = parts
        self._lock = threading.RLock()  # reentrant: a signal handler may cancel it at any point of the code
        self._over = threading.Event()
        self._is_stopping = False
        self._error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self._site.program.collective} {self._site.program.variant}, invocation {self.epoch}"

    # --- for the caller -----------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return True once the invocation has ended on this rank, with or without an error."""
        return self._over.is_set()

    def wait(self) -> None:
        """Block until every command of this rank has finished, or the invocation has failed and every thread left it.

        An exception that hits the waiting thread itself (Ctrl-C) stops the invocation here and on the peers.

        Raises:
            PeerError: a peer gave up, died or refused the call.
            PeerTimeoutError: a wait for a flag took longer than the executor's time-out, here or on a peer.
        """
        try:
            # No time-out of its own: every step that can block on a peer has one.
            self._over.wait()
        except BaseException as interruption:
            self.cancel(PeerError(f"rank {self._site.rank} was interrupted in {self}", (self._site.rank,)))
            while not self._over.is_set():
                try:
                    self._over.wait()
                except KeyboardInterrupt:  # the threads need milliseconds; leaving before them would not be safe
                    continue
            raise interruption
        if self._error is not None:
            raise anew(self._error)

    def cancel(self, error: Exception) -> None:
        """Let all threads leave. An invocation that still runs fails here, and the peers are told."""
        with self._lock:
            fails = self._remaining > 0 and self._error is None
            if fails:
                self._error = error
            self._is_stopping = True
        if fails:
            self._site.monitor.abort(str(error), (self._site.rank,))

    def leave(self) -> None:
        """Note that one part has ended, with or without an error."""
        with self._lock:
            self._remaining -= 1
            is_over = self._remaining == 0
        if is_over:
            self._site.monitor.end(self.epoch)
            self._over.set()

    # --- for the engine threads ---------------------------------------------------------------------------------------

    def run(self, queue: Queue, steps: tuple[Action, ...]) -> None:
        """Run one queue to its end or to the failure of the invocation."""
        index, delay = 0, self._site.delay
        try:
            for index, step in enumerate(steps):
                self.stop_if_requested()
                if delay is not None:
                    delay(queue, index)
                step(self)
        except _Stopped:
            pass
        except PeerError as error:
            self._fail(error)
        except BaseException as error:
            text = f"{self}: rank {queue.rank} {self._where(queue, index)}: {type(error).__name__}: {error}"
            self._site.monitor.abort(text, (queue.rank,))
            self._fail(error)
        finally:
            self.leave()

    def stop_if_requested(self) -> None:
        if self._is_stopping:
            raise _Stopped

    def stamp(self, slot: int, time_ns: int) -> None:
        self.stamps[slot] = time_ns

    def hold(self, is_satisfied: Callable[[], bool], queue: Queue, index: int) -> None:
        """Return once ``is_satisfied()``: command ``index`` of ``queue`` is a wait for a flag.

        Raises:
            PeerTimeoutError: the executor's time-out ran out; the peers have been told.
            PeerError: the monitor knows that the flag will not come.
        """
        for _ in range(_SPINS):
            if is_satisfied():
                return
            self.stop_if_requested()
            time.sleep(0)
        arrived = check_at = time.monotonic()
        # A wait for an engine of this rank has a longer time-out, so that this engine reports the cause.
        from_peers = bool(self._writers(queue.commands[index]) - {queue.rank})
        timeout_s = self._site.timeout_s() * (1 if from_peers else 2)
        is_noted = not from_peers
        while not is_satisfied():
            self.stop_if_requested()
            now = time.monotonic()
            waited = now - arrived
            if now >= check_at:
                check_at = now + _CHECK_INTERVAL_S
                self._site.monitor.check(self.epoch)
                if waited > timeout_s:
                    self._time_out(queue, index, waited)
                if from_peers:
                    ranks, _ = self._late(queue, index)
                    self._site.monitor.lasts(self.epoch, str(self), ranks, waited, timeout_s)
                if waited > _NOTE_AFTER_S and not is_noted:
                    self._site.monitor.note(self.epoch, f"{self}: {self._where(queue, index)}")
                    is_noted = True
            time.sleep(min(max(waited / 8, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        if ranges.observers and from_peers:
            peers = sorted(self._writers(queue.commands[index]) - {queue.rank})
            self._site.monitor.waited(peers, time.monotonic() - arrived)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = anew(error).with_traceback(None)
        self._is_stopping = True

    def _time_out(self, queue: Queue, index: int, waited_s: float) -> None:
        """Raise a time-out that names the ranks that did not come; if all came, those that should have signalled.

        Ranks that wait for another one themselves are not named as culprits.
        """
        monitor = self._site.monitor
        missing, reason = self._late(queue, index)
        culprits = tuple(monitor.at_fault(missing))
        message = (
            f"{self}: rank {queue.rank} {self._where(queue, index)} waited {waited_s:.1f} s; "
            f"{', '.join(monitor.describe(rank, self.epoch) for rank in missing)} {reason}"
        )
        if ranges.observers:
            monitor.waited(missing, waited_s)
        monitor.abort(message, culprits, timed_out=True)
        raise PeerTimeoutError(message, culprits)

    def _late(self, queue: Queue, index: int) -> tuple[tuple[int, ...], str]:
        """Return the ranks that a wait is for, and what they have not done."""
        missing = tuple(self._site.monitor.absent(self.epoch))
        if missing:
            return missing, "has not come" if len(missing) == 1 else "have not come"
        writers = self._writers(queue.commands[index])
        if not writers:  # the flag is a trigger
            return (queue.rank,), "has not fired this trigger"
        return tuple(sorted(writers - {queue.rank} or writers)), "began it, but did not signal"

    def _writers(self, command: Command) -> Set[int]:
        """Return the ranks that signal the flag of a wait."""
        assert isinstance(command, Wait)
        return self._site.writers.get(command.flag, frozenset())

    def _where(self, queue: Queue, index: int) -> str:
        return f"queue {queue.engine} command {index} ({describe(queue.commands[index])})"


class _Stopped(Exception):
    """Exception that ends a queue whose invocation has failed elsewhere."""

"""The caller's own kernels on a CPU rank: Triton's interpreter runs them, and a thread watches the peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidelane.device.layout import ABORT, STATUS_WORDS, WAITING
from sidelane.errors import PeerError, PeerTimeoutError, UnavailableError
from sidelane.execute.base import CallerStream
from sidelane.execute.cpu.executor import CpuExecutor
from sidelane.execute.submitted import Counts, Submitted
from sidelane.program.kernel import KernelCall

_LOOK_S = 0.02
_STILL_WAITS_S = 2.0
"""Largest number of seconds between two reports of a kernel that waits."""

_GRACE_S = 0.2


class StatusWords:
    """The words that the kernels of one rank's executor and their host exchange."""

    def __init__(self) -> None:
        self.words: npt.NDArray[np.int32] = np.zeros(STATUS_WORDS, np.int32)

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)


class CpuKernelCall:
    """A launch of the caller's own kernel (see :class:`sidelane.execute.base.Runnable`).

    Raises:
        UnavailableError: Triton is not installed, or it does not interpret this kernel.
    """

    def __init__(self, executor: CpuExecutor, status: StatusWords, call: KernelCall) -> None:
        from sidelane.device import triton_interpreter

        if not triton_interpreter.is_interpreted(call.kernel):
            raise UnavailableError(
                f"kernel {call.name}: CPU ranks run kernels by Triton's interpreter: set TRITON_INTERPRET=1 in the "
                "environment before triton is imported"
            )
        self.program = call
        self._run = triton_interpreter.run_interpreted
        self._executor, self._status_words = executor, status

    @property
    def is_prepared(self) -> bool:
        """False: the interpreter reads the arguments at each launch."""
        return False

    def repetition(self, caller: CallerStream, moving: Sequence[tuple[int, str]] | None = None) -> None:
        """Return None: compiled code cannot run the interpreter."""

    def following(self, caller: CallerStream, arguments: Sequence[int]) -> None:
        """Return None: compiled code cannot run the interpreter."""

    def run(self, epoch: int, caller: CallerStream) -> None:
        """Run the kernel to its end.

        Raises:
            PeerError, PeerTimeoutError: a rank for which it waited did not come, or is gone.
        """
        call, monitor = self.program, self._executor.monitor
        self._executor.check_open("launch")
        monitor.begin(epoch, f"kernel {call.name}")
        try:
            monitor.check(epoch)
            look = _Look(self._executor, self._status_words, epoch, call.name)
            look.start()
            try:
                self._run(call.kernel, call.grid, call.arguments, dict(call.options))
            except BaseException as error:  # tell the peers, whose kernels would wait
                text = f"kernel {call.name}: rank {self._executor.rank}: {type(error).__name__}: {error}"
                monitor.abort(text, (self._executor.rank,))
                raise
            finally:
                look.stop()
        finally:
            monitor.end(epoch)
        submitted = Submitted(call.collective, "sm", call.variant, False, Counts(kernels=1, calls=1))
        self._executor.ledger.count(self._executor.ledger.entry(submitted))


class _Look(threading.Thread):
    """Thread that watches status words and peers until a kernel ends, and aborts it if a peer does not come."""

    def __init__(self, executor: CpuExecutor, status: StatusWords, epoch: int, name: str) -> None:
        super().__init__(name=f"sidelane-kernel-{executor.rank}", daemon=True)
        self._executor, self._words, self._epoch, self._kernel = executor, status.words, epoch, name
        self._ended = threading.Event()
        self._error: PeerError | None = None
        self._reported: dict[int, float] = {}  # when the kernel last said that it waits for a rank
        self._waits_since: float | None = None
        self._troubled_since: float | None = None
        status.words[:] = 0

    def stop(self) -> None:
        """End the thread, and raise the error that it found, if any."""
        self._ended.set()
        self.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S) and self._error is None:
            self._error = self._look(time.monotonic())
            if self._error is not None:
                self._words[ABORT] = 1

    def _look(self, now: float) -> PeerError | None:
        words = self._words[WAITING:]
        for rank in np.flatnonzero(words).tolist():
            self._reported[rank] = now
        words[:] = 0
        ranks = tuple(rank for rank, at in self._reported.items() if now - at < _STILL_WAITS_S)
        if not ranks:
            self._waits_since = self._troubled_since = None
            return None
        self._waits_since = now if self._waits_since is None else self._waits_since
        return self._trouble(now, ranks) or self._time_out(now, ranks)

    def _trouble(self, now: float, ranks: tuple[int, ...]) -> PeerError | None:
        """Return the error of a peer that is gone or has given up, after a grace time for its last signals."""
        try:
            self._executor.monitor.check(self._epoch)
        except PeerError as error:
            self._troubled_since = now if self._troubled_since is None else self._troubled_since
            if now - self._troubled_since > _GRACE_S:
                text = f"{error} (seen by rank {self._executor.rank} in kernel {self._kernel}, which waits for {ranks})"
                return type(error)(text, error.ranks)
        else:
            self._troubled_since = None
        return None

    def _time_out(self, now: float, ranks: tuple[int, ...]) -> PeerError | None:
        assert self._waits_since is not None
        waited_s, monitor = now - self._waits_since, self._executor.monitor
        if waited_s < self._executor.timeout_s:
            monitor.lasts(self._epoch, f"kernel {self._kernel}", ranks, waited_s, self._executor.timeout_s)
            return None
        missing = "; ".join(monitor.describe(rank, self._epoch) for rank in ranks)
        text = f"kernel {self._kernel}: rank {self._executor.rank} waited {waited_s:.1f} s for signals of {missing}"
        return PeerTimeoutError(text, tuple(monitor.at_fault(ranks)))

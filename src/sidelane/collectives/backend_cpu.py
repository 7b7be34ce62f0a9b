"""Collectives between CPU processes: a call blocks its caller, and an asynchronous one runs on a thread, in order."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from sidelane.choice import Abilities
from sidelane.collectives.backend import Backend
from sidelane.collectives.work import NO_TIMEOUT, CallFuture, CallThread, FutureWork, Work, timed_out
from sidelane.errors import CommunicatorClosedError, PeerTimeoutError, SidelaneError, anew
from sidelane.execute.base import NO_STREAM, CallerStream, Runnable
from sidelane.execute.cpu import CpuExecutor
from sidelane.execute.cpu.kernel_call import CpuKernelCall, StatusWords
from sidelane.memory import ending
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import ShmMemory
from sidelane.memory.record import full_fence
from sidelane.program.ir import Value
from sidelane.program.kernel import KernelCall
from sidelane.program.wraparound import WORD_MASK, reached


class CpuBackend(Backend):
    """See :class:`sidelane.collectives.backend.Backend`."""

    executor: CpuExecutor
    abilities = Abilities()
    hosts_meet = True

    def __init__(self, exchange: Exchange, control: ControlBlock, timeout_s: float) -> None:
        self.memory = ShmMemory(exchange)
        self.executor = CpuExecutor(exchange.rank, control, timeout_s)
        self._control = control
        self._thread = CallThread()
        self._last: CallFuture | None = None
        self._disowned: SidelaneError | None = None
        ending.at_exit(self)

    @functools.cached_property
    def _status_words(self) -> StatusWords:
        return StatusWords()

    @property
    def status_words(self) -> int:
        return self._status_words.address

    def bind_kernel_call(self, call: KernelCall, *, compiles: bool) -> CpuKernelCall:
        # Before the call begins: the interpreter would refuse it while its peers run.
        inspect.signature(call.kernel.fn).bind(
            *call.arguments, **{name: value for name, value in call.options.items() if name in call.kernel.arg_names}
        )
        return CpuKernelCall(self.executor, self._status_words, call)

    def bind_trigger(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> CpuTrigger:
        return CpuTrigger(words)

    def bind_arrival(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> CpuArrival:
        return CpuArrival()

    def caller_stream(self) -> CallerStream:
        return NO_STREAM

    def run(
        self, loaded: Runnable, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor | None], caller: CallerStream
    ) -> CpuWork | None:
        if async_op:
            # The future keeps the tensors: a caller may drop them before the thread gets there.
            return self.submit(self._run, loaded, epoch, tensors)
        self.synchronize()
        self._run(loaded, epoch, tensors)
        return None

    def _run(self, loaded: Runnable, epoch: int, tensors: Sequence[torch.Tensor | None]) -> None:
        loaded.run(epoch, NO_STREAM)
        # Known calls are not compared before they run. Every peer that has signalled this rank has posted its call.
        self._control.check_same(epoch)

    def submit(self, function: Callable[..., None], *arguments: object) -> CpuWork:
        """Run a function behind all asynchronous calls so far, and before all later calls."""
        try:
            self._last = self._thread.submit(function, *arguments)
        except RuntimeError as error:  # no thread could be started, and the peers make the call
            rank = self.executor.rank
            self._control.abort(f"rank {rank} could not make its call: {error}", (rank,))
            raise
        return CpuWork(self._last, self)

    def set_timeout(self, timeout_s: float) -> None:
        self.executor.timeout_s = timeout_s

    def synchronize(self, call: int | None = None) -> None:
        if self._last is not None:
            self.result(self._last)
            self._last = None

    def result(self, future: CallFuture) -> None:
        """Wait for an asynchronous call, and raise its error if it failed."""
        if self._disowned is not None and not future.done():  # its thread is in another process
            raise self._disowned
        try:
            future.has_ended(None)
            error = future.exception()
        except concurrent.futures.CancelledError:
            raise CommunicatorClosedError("the communicator was closed before this call began") from None
        except KeyboardInterrupt:
            # It is raised in this thread; another one runs the collective: end that one, which tells the peers.
            self.executor.close()
            raise
        if error is not None:
            raise anew(error)

    def wait_for_stores(self) -> None:
        full_fence()

    def renew(self, call: int) -> None:
        full_fence()

    def disown(self, error: SidelaneError) -> None:
        self._disowned = error

    def end(self, until: float) -> None:
        """End at exit of the interpreter: as :meth:`close`, but waiting for ``ending.LEAVING_S`` at most."""
        self.executor.close()
        self._thread.cancel()
        self._thread.end(time.monotonic() + ending.LEAVING_S)

    def close(self) -> None:
        self.executor.close()  # first: this ends the waits of the thread's call
        self._thread.cancel()
        self._thread.end()
        self._last = None


class CpuTrigger:
    """See :class:`sidelane.collectives.backend.Trigger`."""

    def __init__(self, words: Sequence[tuple[int, Value]]) -> None:
        self._words = [(ctypes.c_uint32.from_address(address), value) for address, value in words]

    def fire(self, epoch: int, caller: CallerStream, *, follows: bool = False) -> None:
        self.fire_from_host(epoch)

    def fire_from_host(self, epoch: int) -> None:
        full_fence()
        for word, value in self._words:
            word.value = value.at(epoch) & WORD_MASK

    def follow(self, epoch: int, caller: CallerStream, *, fired: bool) -> None:
        if not fired and not self.is_fired(epoch):
            raise RuntimeError("wait: not fired yet; trigger(), trigger_from_host() or a kernel's store fires it")

    def is_fired(self, epoch: int) -> bool:
        """Return True if a kernel of this process has signalled in call ``epoch``."""
        return all(reached(word.value, value.at(epoch) & WORD_MASK) for word, value in self._words)


class CpuArrival:
    """Implementation of :class:`sidelane.collectives.backend.Arrival` that waits for the end of the whole call.

    The threads that copy share cores with the caller's computation, so that reading early gains nothing.
    """

    def follow(self, epoch: int, caller: CallerStream, work: Work | None) -> None:
        if work is not None:
            work.wait()


class CpuWork(FutureWork):
    """See :class:`sidelane.collectives.work.Work`."""

    def __init__(self, future: CallFuture, backend: CpuBackend) -> None:
        super().__init__()
        self._future, self._backend = future, backend

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if timeout > NO_TIMEOUT and not self._future.has_ended(timeout.total_seconds()):
            raise PeerTimeoutError(timed_out(timeout, self.outputs))
        self._raise()
        return True

    def _raise(self) -> None:
        self._backend.result(self._future)

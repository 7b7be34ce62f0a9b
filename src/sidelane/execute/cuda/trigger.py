"""Triggers and arrivals of programs under way.

A trigger is a flag of this rank that a stream of the caller, the host or a kernel signals. An arrival is a flag that
engines signal and for which streams of the caller wait.

stream   kernels | write flags  [ | wait done ] | next kernels
"""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.execute.base import CallerStream
from sidelane.execute.cuda.calls import DeviceWord, HostWord
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.site import CudaSite
from sidelane.program.ir import EPOCH, Value
from sidelane.program.wraparound import WORD_MASK

_MOST_CALLERS = 64


class CudaArrival:
    """Flags of one arrival, outside of graphs (see :class:`sidelane.collectives.backend.Arrival`).

    Args:
        executor: executor of the rank.
        words: address of each flag, and its value.
        title: name of the program, for errors.
    """

    def __init__(self, executor: CudaSite, words: Sequence[tuple[int, Value]], title: str) -> None:
        self._executor, self._title = executor, title
        self._ops = ops = executor.driver.memory_ops()
        for address, _ in words:
            ops.wait(address, 0, equal=False)
        self._setters = [(value, setter) for at, (_, value) in enumerate(words) for setter in ops.setters([at])]
        self._bound: dict[int, Sequence[Bound]] = {}

    def follow(self, epoch: int, caller: CallerStream, work: object = None) -> None:
        """Let the next work of a stream follow the arrival: one call to the driver.

        Raises:
            PeerError, PeerTimeoutError: an invocation failed.
            DriverError: the driver refused it. The executor is of no use any more.
        """
        executor, driver = self._executor, self._executor.driver
        executor.check_usable("wait_for_arrival")
        with executor.lock, driver.current():
            for value, set_all in self._setters:
                set_all(value.at(epoch) & WORD_MASK)
            try:
                driver.submit(self._bind(caller[0]))
            except BaseException as error:
                executor.fail_submission(self._title, error)
                raise

    def _bind(self, stream: int) -> Sequence[Bound]:
        calls = self._bound.get(stream)
        if calls is None:
            if len(self._bound) >= _MOST_CALLERS:
                self._bound.clear()
            driver, ops = self._executor.driver, self._ops
            calls = self._executor.bind_on(stream, lambda handle: [driver.bind_memory_ops(ops, handle)])
            self._bound[stream] = calls
        return calls


class CudaTrigger:
    """Flags of one trigger (see :class:`sidelane.collectives.backend.Trigger`).

    Args:
        executor: executor of the rank.
        words: address of each flag, and its value. A kernel stores the value, 32 bits, with release at system scope.
        title: name of the program, for errors.
        host: the flag itself, if there is only one and it lies in host memory.
        ends: the trigger fires the whole program of the rank (``transform.hold``), and firing includes the wait for it.
    """

    def __init__(
        self,
        executor: CudaSite,
        words: Sequence[tuple[int, Value]],
        title: str,
        *,
        host: memoryview[int] | None = None,
        ends: bool = False,
    ) -> None:
        assert host is None or len(words) == 1
        self._executor, self._title, self._host = executor, title, host
        self._values = tuple(value for _, value in words)
        self._ops = ops = executor.driver.memory_ops()
        for address, _ in words:
            ops.write(address, 0)
        count = len(words)
        self._fire, self._release = slice(0, count + ends), slice(0, count)
        if ends:
            done = executor.words[DeviceWord.DONE]
            ops.wait(done, 0, equal=False)
            # A stream that waits for a trigger of its own times out like one whose peers do not come.
            ops.write(executor.words[HostWord.STARTED], 0)
            ops.wait(done, 0, equal=False)
        self._begin_and_join, self._join = slice(count + 1, count + 3), slice(count + 2, count + 3)
        places: dict[Value, list[int]] = {}
        for index, value in enumerate((*self._values, *(EPOCH,) * (3 * ends))):
            places.setdefault(value, []).append(index)
        self._setters = [(value, setter) for value, indices in places.items() for setter in ops.setters(indices)]
        self._epoch, self._first_word = 0, 0
        self._bound: dict[tuple[int, int, int], Sequence[Bound]] = {}
        self._fire_on: dict[int, Sequence[Bound]] = {}

    def set(self, epoch: int) -> None:
        """Set the values that fire invocation ``epoch``, to make firing faster; submitted calls keep their values."""
        for value, set_all in self._setters:
            set_all(value.at(epoch) & WORD_MASK)
        self._epoch, self._first_word = epoch, self._values[0].at(epoch) & WORD_MASK

    def fire(self, epoch: int, caller: CallerStream) -> None:
        """Signal behind the work of a stream: one call to the driver.

        Raises:
            ValueError: the stream is being captured.
            PeerError, PeerTimeoutError: an invocation failed.
            DriverError: the driver refused it. The executor is of no use any more.
        """
        stream, capturing = caller
        executor = self._executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("trigger")
        if capturing:
            _refuse_capture("trigger")
        calls = self._fire_on.get(stream)
        if calls is None:
            calls = self._fire_on[stream] = self._bind(self._fire, stream)
        driver = executor.driver
        if epoch != self._epoch or not driver.is_current():
            self._submit(epoch, calls)
            return
        try:  # no context manager: this is on the path of a prelaunched call
            driver.submit(calls)
        except BaseException as error:
            executor.fail_submission(self._title, error)
            raise

    def fire_from_host(self, epoch: int) -> None:
        """Signal at once, without order behind a stream. Raises as :meth:`fire`."""
        executor = self._executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("trigger_from_host")
        if self._host is None:
            self._submit(epoch, self._bind(self._release, executor.internal))
            return
        if epoch != self._epoch:
            self.set(epoch)
        self._host[0] = self._first_word

    def join(self, epoch: int, caller: CallerStream, *, begun: bool) -> None:
        """Order the next work of a stream behind the end. ``begun``: the host has fired it; else a kernel will.

        Raises:
            Exception: as :meth:`fire`.
        """
        stream, capturing = caller
        self._executor.check_usable("wait")
        if capturing:
            _refuse_capture("wait")
        self._submit(epoch, self._bind(self._join if begun else self._begin_and_join, stream))

    def _submit(self, epoch: int, calls: Sequence[Bound]) -> None:
        executor, driver = self._executor, self._executor.driver
        with executor.lock, driver.current():
            if epoch != self._epoch:
                self.set(epoch)
            try:
                driver.submit(calls)
            except BaseException as error:  # the program that waits for it could never go on
                executor.fail_submission(self._title, error)
                raise

    def _bind(self, part: slice, stream: int) -> Sequence[Bound]:
        """Prepare the operations for ``stream``, on the internal stream if ``stream`` does not support them."""
        key = (part.start, part.stop, stream)
        calls = self._bound.get(key)
        if calls is None:
            if len(self._bound) >= _MOST_CALLERS:
                self._bound.clear()
                self._fire_on.clear()
            driver, ops = self._executor.driver, self._ops
            calls = self._executor.bind_on(stream, lambda handle: [driver.bind_memory_ops(ops, handle, part)])
            self._bound[key] = calls
        return calls


def _refuse_capture(method: str) -> None:
    raise ValueError(
        f"{method}: a graph is being captured, which would repeat the trigger of this one call; fire it outside of one"
    )

"""Triggers and arrivals of programs under way, and the streams that wait for triggers.

A trigger is a flag of this rank that a stream of the caller, the host or a kernel signals. An arrival is a flag that
engines signal and for which streams of the caller wait.

Streams that wait hold hardware channels until they are fired: the work on which the trigger depends needs a free one.
They cannot be disarmed, only fired.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from sidelane.errors import UnavailableError
from sidelane.execute.base import CallerStream
from sidelane.execute.cuda.calls import HostWord
from sidelane.execute.cuda.native import Bound, MemoryOps
from sidelane.execute.cuda.site import CudaSite
from sidelane.program.ir import EPOCH, Value
from sidelane.program.wraparound import WORD_MASK

_MOST_CALLERS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class HardwareChannels:
    """The hardware channels to which a vendor's driver maps the streams of a process.

    Attributes:
        variable: environment variable that sets their number.
        default: number of them without it.
    """

    variable: str
    default: int

    def count(self) -> int:
        """Return the number of channels of this process."""
        text = os.environ.get(self.variable, "")
        return int(text) if text.isdigit() and int(text) else self.default


CUDA_CHANNELS = HardwareChannels("CUDA_DEVICE_MAX_CONNECTIONS", 8)


def require_free_channel(
    collective: str, variant: str, streams: int, channels: HardwareChannels = CUDA_CHANNELS
) -> None:
    """Refuse a program that would wait for its trigger on every hardware channel, so that it could not be set.

    Raises:
        UnavailableError: it needs too many channels; the allowed number is named.
    """
    if streams >= channels.count():
        raise UnavailableError(
            f"prelaunch: {collective} {variant} holds {streams} streams back, of {channels.count()} hardware "
            f"channels ({channels.variable}), so that no trigger would get through; allowed: a variant with "
            "fewer engines, such as b2b, or more channels"
        )


class _FlagCalls:
    """Memory operations of a program under way that any stream of the caller makes: one call to the driver.

    Args:
        executor: executor of the rank.
        ops: the operations.
        values: the value of each.
        title: name of the program, for errors.
    """

    def __init__(self, executor: CudaSite, ops: MemoryOps, values: Sequence[Value], title: str) -> None:
        self._executor, self._ops, self._title = executor, ops, title
        indices: dict[Value, list[int]] = {}
        for index, value in enumerate(values):
            indices.setdefault(value, []).append(index)
        self._setters = [(value, setter) for value, of_value in indices.items() for setter in ops.setters(of_value)]
        self._epoch: int | None = None
        self._bound: dict[tuple[int, int, int], Sequence[Bound]] = {}

    def _submit(self, method: str, epoch: int, stream: int, part: slice) -> None:
        """Make some of the operations for invocation ``epoch``.

        Raises:
            PeerError, PeerTimeoutError: an invocation failed.
            DriverError: the driver refused it. The executor is of no use any more.
        """
        executor, driver = self._executor, self._executor.driver
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable(method)
        with executor.lock:
            if epoch != self._epoch:
                self._epoch = epoch
                for value, set_all in self._setters:
                    set_all(value.at(epoch) & WORD_MASK)
            try:
                if driver.is_current():
                    driver.submit(self._bind(stream, part))
                else:
                    with driver.current():
                        driver.submit(self._bind(stream, part))
            except BaseException as error:  # the program under way could never go on
                executor.fail_submission(self._title, error)
                raise

    def _bind(self, stream: int, part: slice) -> Sequence[Bound]:
        key = (stream, part.start, part.stop)
        calls = self._bound.get(key)
        if calls is None:
            if len(self._bound) >= _MOST_CALLERS:
                self._bound.clear()
            driver, ops = self._executor.driver, self._ops
            calls = self._executor.bind_on(stream, lambda handle: [driver.bind_memory_ops(ops, handle, part)])
            self._bound[key] = calls
        return calls


class CudaArrival(_FlagCalls):
    """Flags of one arrival, outside of graphs (see :class:`sidelane.collectives.backend.Arrival`).

    Args:
        executor: executor of the rank.
        words: address of each flag, and its value.
        title: name of the program, for errors.
    """

    def __init__(self, executor: CudaSite, words: Sequence[tuple[int, Value]], title: str) -> None:
        ops = executor.driver.memory_ops()
        for address, _ in words:
            ops.wait(address, 0, equal=False)
        self._all = slice(0, len(words))
        super().__init__(executor, ops, [value for _, value in words], title)

    def follow(self, epoch: int, caller: CallerStream, work: object = None) -> None:
        """Let the next work of a stream follow the arrival.

        Raises:
            Exception: as :meth:`CudaTrigger.fire`.
        """
        self._submit("wait_for_arrival", epoch, caller[0], self._all)


class CudaTrigger(_FlagCalls):
    """Flags of one trigger, outside of graphs (see :class:`sidelane.collectives.backend.Trigger`).

    Args:
        executor: executor of the rank.
        words: address of each flag, and its value. A kernel stores the value, 32 bits, with release at system scope.
        title: name of the program, for errors.
        ended: address of the flag that a program behind one trigger sets at its end (``transform.ended_by``); None of
            other programs.
    """

    def __init__(
        self, executor: CudaSite, words: Sequence[tuple[int, Value]], title: str, ended: int | None = None
    ) -> None:
        ops, count = executor.driver.memory_ops(), len(words)
        for address, _ in words:
            ops.write(address, 0)
        values = [value for _, value in words]
        if ended is not None:
            ops.wait(ended, 0, equal=False)
            ops.write(executor.words[HostWord.STARTED], 0)  # a stream that waits for its trigger times out like others
            ops.wait(ended, 0, equal=False)
            values += [EPOCH] * 3
        self._fire, self._signal = slice(0, count + (ended is not None)), slice(0, count)
        self._expect, self._follow = slice(count + 1, count + 3), slice(count + 2, count + 3)
        super().__init__(executor, ops, values, title)

    def fire(self, epoch: int, caller: CallerStream, *, follows: bool = False) -> None:
        """Signal behind the work of a stream. ``follows``: its next work follows the end, which ``ended`` tells.

        Raises:
            PeerError, PeerTimeoutError: an invocation failed.
            DriverError: the driver refused it. The executor is of no use any more.
        """
        self._submit("trigger", epoch, caller[0], self._fire if follows else self._signal)

    def fire_from_host(self, epoch: int) -> None:
        """Signal at once, without order behind a stream. Raises as :meth:`fire`."""
        self._submit("trigger_from_host", epoch, self._executor.internal, self._signal)

    def follow(self, epoch: int, caller: CallerStream, *, fired: bool) -> None:
        """Let the next work of a stream follow the end of the call.

        If it was not ``fired``, a kernel of the stream has fired it or will, and its time counts from here on.

        Raises:
            Exception: as :meth:`fire`.
        """
        self._submit("wait", epoch, caller[0], self._follow if fired else self._expect)

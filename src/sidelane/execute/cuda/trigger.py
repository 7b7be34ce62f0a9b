"""Triggers of a program under way: flags of its own rank that the caller's stream, the host or a kernel signals."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.execute.base import Place
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.site import CudaSite
from sidelane.program.ir import Value
from sidelane.program.words import WORD_MASK

_MOST_CALLERS = 64


class CudaTrigger:
    """Flags that are signalled together (see :class:`sidelane.collectives.backend.Trigger`).

    Args:
        executor: of the rank.
        words: address of each flag, and its value.
    """

    def __init__(self, executor: CudaSite, words: Sequence[tuple[int, Value]]) -> None:
        self._executor = executor
        self._ops = executor.driver.memory_ops()
        for address, _ in words:
            self._ops.write(address, 0)
        self._setters = [(self._ops.setters([index])[0], value) for index, (_, value) in enumerate(words)]
        self._by_stream: dict[int, list[Bound]] = {}

    def fire(self, epoch: int, place: Place) -> None:
        """Signal behind the work of a stream: one call to the driver.

        Raises:
            ValueError: the stream is being captured.
            PeerError, PeerTimeoutError: an invocation failed.
            DriverError: the driver refused it. The executor is of no use any more.
        """
        stream, capturing = place
        if capturing:
            raise ValueError(
                "trigger: a graph is being captured, which would repeat the trigger of this one call (allowed=outside)"
            )
        self._submit(epoch, stream)

    def fire_from_host(self, epoch: int) -> None:
        """Signal at once, behind nothing. Raises as :meth:`fire`."""
        self._submit(epoch, self._executor.internal)

    def _submit(self, epoch: int, stream: int) -> None:
        executor, driver = self._executor, self._executor.driver
        executor.check_usable("trigger")
        with executor.lock, driver.current():
            calls = self._by_stream.get(stream)
            if calls is None:
                if len(self._by_stream) >= _MOST_CALLERS:
                    self._by_stream.clear()
                bound = executor.by_way_of_internal(stream, lambda handle: driver.bind_memory_ops(self._ops, handle))
                calls = self._by_stream[stream] = bound
            for set_value, value in self._setters:
                set_value(value.at(epoch) & WORD_MASK)
            try:
                driver.submit(calls)
            except BaseException as error:  # what waits for it would never go on
                executor.watch.fail_submission("a trigger", error)
                raise

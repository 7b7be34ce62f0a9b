"""Arrivals of programs under way: flags of the own rank that engines signal, and streams of its caller wait for."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.execute.base import Place
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.site import CudaSite
from sidelane.program.ir import Value
from sidelane.program.words import WORD_MASK

_MOST_CALLERS = 64


class CudaArrival:
    """Flags that are waited for together, outside of graphs (see :class:`sidelane.collectives.backend.Arrival`).

    Args:
        executor: of the rank.
        words: address of each flag, and its value.
        title: of the program, for people.
    """

    def __init__(self, executor: CudaSite, words: Sequence[tuple[int, Value]], title: str) -> None:
        self._executor, self._title = executor, title
        self._ops = ops = executor.driver.memory_ops()
        for address, _ in words:
            ops.wait(address, 0, equal=False)
        self._setters = [(value, setter) for at, (_, value) in enumerate(words) for setter in ops.setters([at])]
        self._bound: dict[int, list[Bound]] = {}

    def follow(self, epoch: int, place: Place, work: object = None) -> None:
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
                driver.submit(self._bind(place[0]))
            except BaseException as error:
                executor.watch.fail_submission(self._title, error)
                raise

    def _bind(self, stream: int) -> list[Bound]:
        calls = self._bound.get(stream)
        if calls is None:
            if len(self._bound) >= _MOST_CALLERS:
                self._bound.clear()
            driver, ops = self._executor.driver, self._ops
            bind = self._executor.by_way_of_internal
            calls = self._bound[stream] = bind(stream, lambda handle: driver.bind_memory_ops(ops, handle))
        return calls

"""Invocations as executable graphs: one or two calls of the host, however many commands the program has.

Frozen programs run like this outside of captures too. A graph cannot write an epoch, so that one batch behind it does.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidelane import forks
from sidelane.execute.cuda.allocations import Allocations
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import Bound
from sidelane.memory.ordinary import Standing
from sidelane.program.words import WORD_MASK


class ExecutableGraph:
    """Calls of the driver as one graph. It goes with its last reference, and what runs of it still ends.

    Args:
        driver: of the device.
        calls: what to record, bound to ``stream``.
        stream: an idle one of the executor's.
    """

    def __init__(self, driver: Driver, calls: Iterable[Bound], stream: int) -> None:
        self._driver = driver
        self._graph = driver.make_graph(calls, stream)
        forks.finalize(self, driver.destroy_graph, self._graph)

    def bind(self, stream: int) -> Bound:
        """Its launch on ``stream``, any one that is not captured; the call keeps the graph."""
        return self._driver.bind_graph(self._graph, stream, owner=self)


class CachedGraph:
    """An executable graph of a whole invocation, launched any number of times, in order.

    Args:
        driver: of the device.
        calls: what to record, bound to ``stream``.
        stream: an idle one of the executor's.
        finished: address of the word that receives the epoch of an invocation when it has ended.
        allocations: of what the calls copy, where it may be freed.

    Attributes:
        words: what :meth:`set_epoch` sets (see :class:`sidelane.execute.base.Repetition`).
    """

    def __init__(
        self, driver: Driver, calls: Iterable[Bound], stream: int, finished: int, allocations: Allocations
    ) -> None:
        self._driver, self._allocations = driver, allocations
        self._graph = ExecutableGraph(driver, calls, stream)
        self._end = driver.memory_ops()
        self._end.write(finished, 0)
        (self._set_end,) = self._end.setters([0])
        self.words = tuple((0, 1, where) for where in self._end.places([0]))

    @property
    def standing(self) -> Standing | None:
        """See :class:`sidelane.execute.base.Repetition`."""
        return self._allocations.standing

    def stands(self) -> bool:
        """False once memory has been freed that it copies: it must not be launched any more."""
        return self._allocations.stand()

    def set_epoch(self, epoch: int) -> None:
        """Say which invocation is launched next."""
        self._set_end(epoch & WORD_MASK)

    def steps(self, stream: int) -> list[Bound]:
        """The calls of an invocation on ``stream``, which must not be the legacy default stream."""
        return [self._graph.bind(stream), self._driver.bind_memory_ops(self._end, stream)]

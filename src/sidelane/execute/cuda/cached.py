"""An invocation as one executable graph: two calls of the host, however many commands the program has.

Frozen programs run like this outside of captures too. A graph cannot write an epoch, so that one batch behind it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import WORD_MASK, Bound


class CachedGraph:
    """An executable graph, launched any number of times, in order.

    Args:
        driver: of the device.
        calls: what to record, bound to ``stream``.
        stream: an idle one of the executor's.
        finished: address of the word that receives the epoch of an invocation when it has ended.
    """

    def __init__(self, driver: Driver, calls: Iterable[Bound], stream: int, finished: int) -> None:
        self._driver = driver
        self._graph = driver.make_graph(calls, stream)
        self._end = driver.memory_ops()
        self._end.write(finished, 0)
        (self._set_end,) = self._end.setters([0])
        self._by_stream: dict[int, list[Bound]] = {}
        weakref.finalize(self, driver.destroy_graph, self._graph).atexit = False

    def steps(self, epoch: int, stream: int) -> list[Bound]:
        """The calls of invocation ``epoch`` on ``stream``, which must not be the legacy default stream."""
        self._set_end(epoch & WORD_MASK)
        bound = self._by_stream.get(stream)
        if bound is None:
            if len(self._by_stream) >= _MOST_STREAMS:
                self._by_stream.clear()
            bound = [self._driver.bind_graph(self._graph, stream), self._driver.bind_memory_ops(self._end, stream)]
            self._by_stream[stream] = bound
        return bound


_MOST_STREAMS = 64  # torch hands out 32 of each priority

"""Graphs in a storm: calls captured on memory of several kinds, replayed between other steps, and let go of."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from enum import StrEnum

import torch

from sidelane.session.pools import SymmetricPool
from sidelane_lab.soak.ahead import Graph, Recorder
from sidelane_lab.soak.calls import Caller
from sidelane_lab.soak.described import Call
from sidelane_lab.soak.memory import Bound
from sidelane_lab.soak.storm.supply import Supply

MOST_GRAPHS = 4
"""At a time. The oldest goes for a new one."""

POOL_BYTES = 64 << 20
"""Of a pool with symmetric memory: torch takes 2 MiB at a time from it, for each stream."""


class Where(StrEnum):
    """In which memory the tensors of a graph lie."""

    SLOT = "tensors of a slot"
    ANY = "tensors that were there before"
    PRIVATE = "the graph's own memory"
    POOL = "a pool with symmetric memory"
    IN_POOL = "such a pool, made in the capture"


POOLED = (Where.POOL, Where.IN_POOL)


class StormGraphs:
    """Of one rank, in one season. All ranks capture, replay and let go alike.

    A graph keeps its tensors, so that none is replayed whose tensors were freed; who lets go of it gets them.

    Args:
        record: captures.
        supply: of tensors.
        pool: with symmetric memory; None where there can be none.
        noted: counts graphs, by memory, and replays.

    Attributes:
        last: what was done last, in words.
    """

    def __init__(
        self, record: Recorder, supply: Supply, pool: SymmetricPool | None, noted: collections.Counter[str]
    ) -> None:
        self._record, self._supply, self._pool, self._noted = record, supply, pool, noted
        self._graphs: list[tuple[Graph, Where]] = []
        self.last = "nothing"

    def __len__(self) -> int:
        return len(self._graphs)

    def places(self, *, in_pool: bool) -> list[Where]:
        """Memory for a graph. ``in_pool``: its calls are of the pool's session."""
        return [where for where in Where if where not in POOLED or (in_pool and self._pool is not None)]

    def capture(
        self, caller: Caller, calls: Sequence[Call], key: int, where: Where, slot: Sequence[Bound] | None = None
    ) -> list[Sequence[Bound]]:
        """Capture calls, each of which is made once before, since a capture can allocate nothing for Sidelane.

        Args:
            caller: whose.
            calls: in their order.
            key: of the inputs of those that are made before.
            where: their tensors lie.
            slot: the tensors of the only call, with ``Where.SLOT``.

        Returns:
            Tensors of the graphs that had to go.
        """
        self.last = f"a capture on {where}: {'; '.join(map(str, calls))}"
        gone: list[Sequence[Bound]] = []
        pooled = [number for number, (_, other) in enumerate(self._graphs) if where in POOLED and other in POOLED]
        if pooled or len(self._graphs) >= MOST_GRAPHS:  # the pool has room for the tensors of one
            gone = self.drop(pooled[0] if pooled else 0)
        bound = [slot] if slot is not None else self._bind(caller, calls, where)
        for number, (call, each) in enumerate(zip(calls, bound, strict=True)):
            caller.once(call, key + number, each)
        captured = bound

        def act() -> None:
            nonlocal captured
            if where in (Where.PRIVATE, Where.IN_POOL):
                captured = self._bind(caller, calls, Where.PRIVATE)
            for call, each in zip(calls, captured, strict=True):
                caller.start(call, each)

        replay = self._record(act, self._pool if where is Where.IN_POOL else None)
        self._graphs.append((Graph(caller, calls, captured, replay), where))
        self._noted["graphs"] += 1
        self._noted[f"graphs on {where}"] += 1
        return gone

    def replay(self, number: int, key: int) -> None:
        """Replay a graph on new inputs, and check it."""
        graph, where = self._graphs[number]
        self.last = f"a replay on {where}: {'; '.join(map(str, graph.calls))}"
        graph.replay(key)
        self._noted["replays"] += 1
        self._noted["replayed calls"] += len(graph.calls)

    def drop(self, number: int) -> list[Sequence[Bound]]:
        """Let go of a graph, once it has ended. Returns its tensors, but none in a pool, where there is little room."""
        if self._supply.on_gpu:
            torch.cuda.synchronize()
        graph, where = self._graphs.pop(number)
        self._noted["graphs let go of"] += 1
        return [] if where in POOLED else list(graph.bound)

    def clear(self) -> None:
        """Let go of all of them, and of the pool."""
        while self._graphs:
            self.drop(0)
        self._pool = None

    def _bind(self, caller: Caller, calls: Sequence[Call], where: Where) -> list[Sequence[Bound]]:
        make: Callable[[int], torch.Tensor] | None = self._supply.plain
        if where in POOLED:
            make = self._pooled
        elif where is not Where.PRIVATE:
            make = None
        with self._supply.only(make):
            return [caller.memory.bind_anew(call) for call in calls]

    def _pooled(self, nbytes: int) -> torch.Tensor:
        assert self._pool is not None
        with self._pool:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._supply.device)

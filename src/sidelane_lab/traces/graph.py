"""The graph of a trace: what one rank ran, and what had to end before what. It is checked when it is made."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from enum import StrEnum


class NodeKind(StrEnum):
    """Kind of work of a node. ``mark``: no work, such as metadata."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    MEMORY = "memory"
    MARK = "mark"


@dataclasses.dataclass(frozen=True, slots=True)
class TraceNode:
    """A piece of work of a rank.

    Attributes:
        ident: number that is unique in the trace.
        name: name of the operator or kernel.
        kind: kind of work.
        after: numbers of the nodes that must have ended before.
        duration_us: recorded duration; 0 if there is none.
        start_us: recorded begin; 0 if there is none.
        on_host: the CPU runs it.
        lane: stream or thread that runs one node after another.
        collective: Chakra's name of the collective in lower case (``all_reduce``); empty elsewhere.
        nbytes: bytes of this rank's input of a collective or of a transfer, or bytes that a computation moves.
        flops: operations of a computation; 0 if they are unknown.
        ranks: number of ranks of a collective; 0 if it is unknown.
    """

    ident: int
    name: str
    kind: NodeKind
    after: tuple[int, ...] = ()
    duration_us: float = 0.0
    start_us: float = 0.0
    on_host: bool = False
    lane: str = ""
    collective: str = ""
    nbytes: int = 0
    flops: int = 0
    ranks: int = 0

    def __str__(self) -> str:
        return f"node {self.ident} {self.name!r}"


@dataclasses.dataclass(frozen=True)
class TraceGraph:
    """A rank's work, in an order in which it can run: every node behind those that it waits for.

    Among nodes that could run next the one that was recorded first comes first, and then the one that the file has
    first.

    Args:
        source: file that it was read from, for messages.
        nodes: nodes in any order.

    Raises:
        ValueError: no nodes, two of one number, a node that waits for one that is missing, or a circle; the message
            names the node.
    """

    source: str
    nodes: tuple[TraceNode, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError(f"TraceGraph: {self.source} needs nodes (value=none, allowed=1 or more)")
        places: dict[int, int] = {}
        for place, node in enumerate(self.nodes):
            if node.ident in places:
                first = self.nodes[places[node.ident]]
                raise ValueError(f"TraceGraph: {self.source} needs a number for each node (value={first}, {node})")
            places[node.ident] = place
        for node in self.nodes:
            if unknown := [ident for ident in node.after if ident not in places]:
                text = f"(value={unknown[0]}, allowed=the number of a node of the trace; is it cut?)"
                raise ValueError(f"TraceGraph: {self.source}: {node} waits for a missing node {text}")
        object.__setattr__(self, "nodes", tuple(self._ordered(places)))

    def _ordered(self, places: dict[int, int]) -> Iterator[TraceNode]:
        missing = {node.ident: len(set(node.after)) for node in self.nodes}
        followers: dict[int, list[TraceNode]] = {ident: [] for ident in places}
        for node in self.nodes:
            for ident in set(node.after):
                followers[ident].append(node)
        ready = [(node.start_us, places[node.ident]) for node in self.nodes if not missing[node.ident]]
        heapq.heapify(ready)
        while ready:
            node = self.nodes[heapq.heappop(ready)[1]]
            del missing[node.ident]
            yield node
            for follower in followers[node.ident]:
                missing[follower.ident] -= 1
                if not missing[follower.ident]:
                    heapq.heappush(ready, (follower.start_us, places[follower.ident]))
        if missing:
            circle = " -> ".join(str(node) for node in self._circle(places, missing))
            raise ValueError(
                f"TraceGraph: {self.source} needs an order (value={circle}, allowed=no circle of dependencies)"
            )

    def _circle(self, places: dict[int, int], missing: dict[int, int]) -> list[TraceNode]:
        """Return some nodes of a circle, in the order in which they wait for each other."""
        seen: dict[int, None] = {}
        ident = next(iter(missing))
        while ident not in seen:
            seen[ident] = None
            ident = next(before for before in self.nodes[places[ident]].after if before in missing)
        circle = list(seen)[list(seen).index(ident) :]
        return [self.nodes[places[one]] for one in (*circle[:5], ident)]

"""Nodes of a step in virtual time: each begins as soon as what it is after has ended and its lane is free.

    lane       a stream, a thread or the network: one node after another
    beside     while a collective runs, computations of the same GPU take longer, by a factor that its mover has

Both recorded steps (``traces/strategies.py``) and DLRM's (``traces/dlrm.py``) run here.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence

from sidelane_lab.traces.graph import NodeKind, TraceNode

DONE_US = 1e-9
"""Microseconds of work that count as none."""


def scheduled(
    nodes: Sequence[TraceNode],
    first: Callable[[TraceNode], float] = lambda node: 0.0,
    slower: Mapping[int, float] | None = None,
) -> tuple[TraceNode, ...]:
    """Return the nodes with their begins, and with durations as they turn out.

    Args:
        nodes: with the durations that they have alone. Nodes of no lane wait for nothing but what they are after.
        first: of several that are ready a lane takes the one with the least value, and else the one that comes first
            in ``nodes``; what it has begun it ends.
        slower: share by which computations take longer beside a collective, by the number of its node.
    """
    slower = slower or {}
    place = {node.ident: at for at, node in enumerate(nodes)}
    missing = [len(node.after) for node in nodes]
    followers: list[list[int]] = [[] for _ in nodes]
    for at, node in enumerate(nodes):
        for ident in node.after:
            followers[place[ident]].append(at)
    ready: dict[str, list[tuple[float, int]]] = {}
    begins, ends = [0.0] * len(nodes), [0.0] * len(nodes)
    busy: set[str] = set()
    left: dict[int, float] = {}
    factors: dict[int, float] = {}
    now, released = 0.0, [at for at, count in enumerate(missing) if not count]
    while True:
        for at in released:
            heapq.heappush(ready.setdefault(nodes[at].lane, []), (first(nodes[at]), at))
        for lane in {nodes[at].lane for at in released} | (set(ready) - busy):
            waiting = ready.get(lane, [])
            while waiting and lane not in busy:
                at = heapq.heappop(waiting)[1]
                begins[at], left[at] = now, nodes[at].duration_us
                if nodes[at].ident in slower:
                    factors[at] = slower[nodes[at].ident]
                busy |= {lane} - {""}
            if not waiting:
                ready.pop(lane, None)
        if not left:
            assert not any(missing), "a node waits for what comes after it"
            made = zip(nodes, begins, ends, strict=True)
            return tuple(dataclasses.replace(node, start_us=b, duration_us=e - b) for node, b, e in made)
        longer = {at: _longer(nodes[at], factors) for at in left}
        step_us = min(left[at] * longer[at] for at in left)
        now, released = now + step_us, []
        for at in list(left):
            left[at] -= step_us / longer[at]
            if left[at] > DONE_US:
                continue
            del left[at]
            factors.pop(at, None)
            ends[at] = now
            busy.discard(nodes[at].lane)
            for follower in followers[at]:
                missing[follower] -= 1
                if not missing[follower]:
                    released.append(follower)


def _longer(node: TraceNode, slower: Mapping[int, float]) -> float:
    """Return the factor by which a node takes longer beside collectives."""
    is_computation = node.kind is NodeKind.COMPUTE and not node.on_host
    return 1.0 + max(slower.values(), default=0.0) * is_computation


def end_us(nodes: Sequence[TraceNode]) -> float:
    """Return when the last node has ended."""
    return max(node.start_us + node.duration_us for node in nodes)

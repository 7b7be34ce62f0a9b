"""The graph of a trace: what one rank ran, and what had to end before what. It is checked when it is made."""

from __future__ import annotations

import dataclasses
import gzip
import heapq
import io
import math
import struct
import zlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from sidelane.user_files import MOST_RANKS, bytes_of

LONGEST_US = 3.6e9
"""Microseconds that the nodes of a thread or stream take together at the most: a trace is of a step, not of an hour."""
MOST_BYTES = 1 << 40
"""Bytes that a node moves at the most: more than any GPU's memory."""
MOST_UNPACKED_BYTES = 1 << 32
"""Bytes of a gzipped trace at the most, once it is unpacked."""
MOST_FLOPS = 1 << 64
"""Operations of a node at the most: about an hour of the fastest GPU."""


def content_of(path: Path) -> bytes:
    """Return the bytes of a trace, unpacked if it is gzipped.

    Raises:
        OSError: the file can not be read.
        ValueError: the gzip file is cut or damaged, or unpacks to more than ``MOST_UNPACKED_BYTES``.
    """
    content = bytes_of(path)
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            found = file.read(MOST_UNPACKED_BYTES + 1)
    except (EOFError, OSError, struct.error, zlib.error) as problem:
        raise ValueError(f"replay: {path} must be a whole gzip file ({problem})") from problem
    if len(found) > MOST_UNPACKED_BYTES:
        raise ValueError(f"replay: {path} unpacks to too many bytes (allowed={MOST_UNPACKED_BYTES})")
    return found


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
        ValueError: no nodes, two of one number, a node that waits for one that is missing, a circle, or times and sizes
            that no step has; the message names the node.
    """

    source: str
    nodes: tuple[TraceNode, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError(f"TraceGraph: {self.source} needs nodes (value=none, allowed=1 or more)")
        _require_plausible(self)
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


def _require_plausible(trace: TraceGraph) -> None:
    """Refuse times and sizes that no step has: damaged ones would be predicted as they are."""
    took: dict[tuple[bool, str], float] = {}
    for node in trace.nodes:
        moved = node.nbytes * (max(node.ranks, 1) if node.collective == "all_gather" else 1)
        for what, value, most in (
            ("bytes", moved, MOST_BYTES),
            ("operations", node.flops, MOST_FLOPS),
            ("ranks", node.ranks, MOST_RANKS),
            ("microseconds", node.duration_us, LONGEST_US),
        ):
            if not 0 <= value <= most:
                text = f"(value={float(min(value, 1e300)):.4g} {what}, allowed=0..{most:.4g})"
                raise ValueError(f"TraceGraph: {trace.source}: {node} is not of a step {text}")
        lane = node.on_host, node.lane
        took[lane] = took.get(lane, 0.0) + node.duration_us
    whole, (_, name) = max((us, lane) for lane, us in took.items())
    if not math.isfinite(whole) or whole > LONGEST_US:
        text = f"(value={whole:.4g} us on stream or thread {name!r}, allowed={LONGEST_US:.4g})"
        raise ValueError(f"TraceGraph: {trace.source} takes longer than a step {text}")

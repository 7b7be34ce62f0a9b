"""A step as a graph: what one rank runs, and what has to end before what. It is checked when it is made."""

from __future__ import annotations

import dataclasses
import gzip
import io
import math
import struct
import zlib
from enum import StrEnum
from pathlib import Path

from sidelane.user_files import MOST_RANKS, bytes_of

LONGEST_US = 3.6e9
"""Microseconds that the nodes of a thread or stream take together at the most: a trace is of a step, not of an hour."""
MOST_BYTES = 1 << 40
"""Bytes that a node moves at the most: more than any GPU's memory."""
MOST_UNPACKED_BYTES = 1 << 32
"""Bytes of a gzipped trace at the most, once it is unpacked."""


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
        raise ValueError(f"plan: {path} must be a whole gzip file ({problem})") from problem
    if len(found) > MOST_UNPACKED_BYTES:
        raise ValueError(f"plan: {path} unpacks to too many bytes (allowed={MOST_UNPACKED_BYTES})")
    return found


class NodeKind(StrEnum):
    """Kind of work of a node. ``launch``: what a CUDA graph takes from a kernel to the next one."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    MEMORY = "memory"
    LAUNCH = "launch"


@dataclasses.dataclass(frozen=True, slots=True)
class TraceNode:
    """A piece of work of a rank.

    Attributes:
        ident: number that is unique in the trace.
        name: name of the operator or kernel.
        kind: kind of work.
        after: numbers of the nodes that must have ended before.
        duration_us: recorded duration; 0 if there is none.
        start_us: begin; 0 if there is none.
        on_host: the CPU runs it.
        lane: stream or thread that runs one node after another.
        collective: name of the collective (``all_reduce``); empty elsewhere.
        nbytes: bytes of this rank's input of a collective, or of a copy.
        ranks: number of ranks of a collective; 0 if it is unknown.
        calm_us: duration of such a computation beside no collective; 0 if there is none.
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
    ranks: int = 0
    calm_us: float = 0.0

    def __str__(self) -> str:
        return f"node {self.ident} {self.name!r}"


@dataclasses.dataclass(frozen=True)
class TraceGraph:
    """A rank's work, in an order in which it can run: every node after those that it waits for.

    Args:
        source: file that it was read from, for messages.
        nodes: in an order in which they can run.
        device: name of the GPU on which it was recorded; empty if it is unknown.
        ranks: number of ranks of the recorded program; 0 if it is unknown.
        step: words for the part of the recording.

    Raises:
        ValueError: times and sizes that no step has; the message names the node.
    """

    source: str
    nodes: tuple[TraceNode, ...]
    device: str = ""
    ranks: int = 0
    step: str = "the whole trace"

    def __post_init__(self) -> None:
        _require_plausible(self)


def _require_plausible(trace: TraceGraph) -> None:
    """Refuse times and sizes that no step has: damaged ones would be predicted as they are."""
    took: dict[tuple[bool, str], float] = {}
    for node in trace.nodes:
        moved = node.nbytes * (max(node.ranks, 1) if node.collective == "all_gather" else 1)
        for what, value, most in (
            ("bytes", moved, MOST_BYTES),
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

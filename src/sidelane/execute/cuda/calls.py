"""Plans: one rank's queues as calls on streams, computed without a driver.

This module uses no device, so that tests can read the calls that a collective submits. Operands stay symbolic; the
executor fills in addresses when it loads the program.

Stream 0 is the caller's. It runs the first DMA queue itself, and small commands of this rank's own engines, so that
such a program needs no event. Every other queue gets a stream that forks from stream 0 by an event and joins it::

    stream 0   record fork | memory ops | copies ...            | wait join 1 | memory ops (finished)
    stream 1               wait fork | memory ops | copies ... | record join 1

A prelaunched program begins with a wait for its trigger, behind which all streams fork. Until that is written, its
streams occupy hardware channels.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from enum import StrEnum
from typing import assert_never

from sidelane.execute.submitted import Counts
from sidelane.program.collective import Reduction
from sidelane.program.ir import Comparison, Flag, Value

MAX_BATCH = 255
"""Largest number of memory operations in one call: the driver's limit is "less than 256"."""

DEFAULT_STREAMS = (0, 1, 2)
"""Handles of the legacy default stream (null, and named) and of the per-thread one. Memory operations fail on the
legacy one, and the last denotes another stream in each thread: such calls run on an internal stream."""


class HostWord(StrEnum):
    """Words of pinned host memory that streams write and the watch thread reads.

    ``started`` and ``finished`` hold the epoch of the last eager invocation that began and ended. ``busy`` is not 0
    while a captured invocation may still wait for a peer: a graph cannot write an epoch.
    """

    STARTED = "started"
    FINISHED = "finished"
    BUSY = "busy"


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """The bytes from ``offset`` on in a buffer of a rank."""

    rank: int
    buffer: str
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class SignalWord:
    """A 32-bit word of this rank's device memory, from which a signal is copied to a peer."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class WriteValue:
    """A store of ``value`` to a word, after all earlier work of the stream is visible to all ranks."""

    target: Flag | SignalWord | HostWord
    value: Value


@dataclasses.dataclass(frozen=True, slots=True)
class WaitValue:
    """A wait of the stream until the comparison of a flag of this rank with ``value`` holds."""

    flag: Flag
    value: Value
    comparison: Comparison = Comparison.GE


@dataclasses.dataclass(frozen=True, slots=True)
class MemOps:
    """Signals and waits that follow each other, as one call."""

    ops: tuple[WriteValue | WaitValue, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Memcpy:
    """One asynchronous copy. ``within_rank``: it crosses no link, and may run on SMs, behind kernels that fill them."""

    dst: Operand | Flag
    src: Operand | SignalWord
    nbytes: int
    within_rank: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MemcpyBatch:
    """Copies to peers that do not depend on each other, as one call; the driver cannot capture it.

    On an H200, three copies of 4 KB take 2.8 us instead of 7.3, three of 16 MB 4 us less (``results/notes/probes.md``).
    """

    copies: tuple[Memcpy, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MemcpyEveryOther:
    """A pitched copy of every other row of bytes that stay on their rank.

    It is slower than a copy of all rows, but does not slow down copies that cross a link meanwhile.

    Attributes:
        dst, src: destination and source of the first row.
        nbytes: size of a row in bytes, and of the gap to the next one.
        rows: number of rows.
    """

    dst: Operand
    src: Operand
    nbytes: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchReduce:
    """One launch of the reducing kernel over ``nbytes`` of each source."""

    dst: Operand
    srcs: tuple[Operand, ...]
    nbytes: int
    reduction: Reduction


@dataclasses.dataclass(frozen=True, slots=True)
class RecordEvent:
    """A mark of this place of the stream."""

    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class WaitEvent:
    """A wait of the stream until the place that the event marks has been reached."""

    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecordStamp:
    """A record of an event with a time stamp."""

    slot: int


Copying = Memcpy | MemcpyBatch | MemcpyEveryOther
Call = MemOps | Copying | LaunchReduce | RecordEvent | WaitEvent | RecordStamp


@dataclasses.dataclass(frozen=True, slots=True)
class StreamCall:
    """A call on a stream."""

    stream: int
    call: Call


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class StreamPlan:
    """The calls of one invocation, in the order of submission.

    Attributes:
        streams: number of streams, including the caller's.
        events: number of events.
        signal_words: number of words of device memory that the signals need.
        steps: the calls.
        marks: for a graph, events that the caller records where each trigger would be fired, before these steps.
        arrivals: for a graph, events for which the caller waits at each arrival, after these steps.
    """

    streams: int
    events: int
    signal_words: int
    steps: tuple[StreamCall, ...]
    marks: tuple[tuple[int, ...], ...] = ()
    arrivals: tuple[tuple[int, ...], ...] = ()

    def calls(self, stream: int | None = None) -> tuple[Call, ...]:
        """Return all calls, or those on one stream."""
        return tuple(step.call for step in self.steps if stream is None or step.stream == stream)


class Route(StrEnum):
    """The way in which an invocation is submitted: on the caller's stream, on an internal one, or into a graph."""

    DIRECT = "direct"
    INTERNAL = "internal"
    CAPTURE = "capture"


def choose_route(handle: int, capturing: bool, captured: bool) -> Route:
    """Decide where and how an invocation on the stream ``handle`` runs.

    Args:
        handle: handle of the caller's stream.
        capturing: the stream is being captured.
        captured: the program was loaded for a graph.

    Raises:
        ValueError: ``capturing`` and ``captured`` differ.
    """
    if capturing != captured:
        asked, given = ("eager calls", "a capture") if capturing else ("a graph", "an eager call")
        raise ValueError(f"start: a program that was loaded for {asked} (value={given}, allowed={asked})")
    if captured:
        return Route.CAPTURE
    return Route.INTERNAL if handle in DEFAULT_STREAMS else Route.DIRECT


DETOUR = Counts(events=4, calls=4)
"""Calls that an internal stream adds: it forks from the caller's by an event and joins it by another."""


def counts_of(plan: StreamPlan, route: Route = Route.DIRECT) -> Counts:
    """Count the calls of one invocation.

    Args:
        plan: calls that are submitted.
        route: way in which they are submitted.
    """
    found: Counter[str] = Counter()
    for call in plan.calls():
        found["calls"] += 1
        match call:
            case MemOps(ops):
                writes = sum(isinstance(op, WriteValue) for op in ops)
                found["writes"] += writes
                found["waits"] += len(ops) - writes
            case Memcpy(within_rank=within):
                found["local_copies" if within else "peer_copies"] += 1
            case MemcpyBatch(copies):
                local = sum(copy.within_rank for copy in copies)
                found["local_copies"] += local
                found["peer_copies"] += len(copies) - local
            case MemcpyEveryOther():
                found["local_copies"] += 1
            case LaunchReduce():
                found["kernels"] += 1
            case RecordEvent() | WaitEvent() | RecordStamp():
                found["events"] += 1
            case _:
                assert_never(call)
    counts = Counts(**found)
    return counts + DETOUR if route is Route.INTERNAL else counts

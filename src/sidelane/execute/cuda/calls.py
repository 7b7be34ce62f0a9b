"""What the executor will ask the driver for, worked out without a driver: one rank's queues as calls on streams.

Nothing in here touches a device, so that a test can read what a collective submits. Operands stay symbolic; the
executor puts addresses in when it loads the program.

Stream 0 is the caller's and runs the first DMA queue itself, and whatever is small on this rank's own engines, so that
such a program needs no event. Every other queue gets a stream that forks from stream 0 by an event and joins it::

    stream 0   record fork | memory ops | copies ...            | wait join 1 | memory ops (finished)
    stream 1               wait fork | memory ops | copies ... | record join 1

A prelaunched program is split: its queues are submitted ``ahead`` and block on their triggers, which the ``caller``
queue on stream 0 writes when the collective is called. Until then they occupy hardware channels (see ``order``). Where
all queues have one trigger, the call is one batch (``held``).
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from sidelane.program.collective import Reduction
from sidelane.program.ir import Comparison, Flag, Value

MAX_BATCH = 255
"""Memory operations in one call: the driver's limit is "less than 256"."""

DEFAULT_STREAMS = (0, 1, 2)
"""Handles of the legacy default stream (null, and named) and of the per-thread one. Memory operations fail on the
legacy one, and the last means another stream in each thread: work goes by way of an internal stream."""


class HostWord(StrEnum):
    """Words of pinned host memory that streams write and the watching thread reads.

    ``started`` and ``finished`` hold the epoch of the last eager invocation that began and ended. ``busy`` is not 0
    while a captured invocation may still wait for a peer: a graph cannot write an epoch.
    """

    STARTED = "started"
    FINISHED = "finished"
    BUSY = "busy"


class DeviceWord(StrEnum):
    """Words of device memory that streams write and wait for.

    ``done`` holds the epoch of the last invocation that ended of those with one trigger for all queues.
    """

    DONE = "done"


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """Bytes from ``offset`` on in a buffer of a rank."""

    rank: int
    buffer: str
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A 32-bit word of this rank's device memory, from which a signal is copied to a peer."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class WriteValue:
    """Store ``value`` in a word, after everything earlier in the stream can be seen by all ranks."""

    target: Flag | Cell | HostWord | DeviceWord
    value: Value


@dataclasses.dataclass(frozen=True, slots=True)
class WaitValue:
    """Hold the stream until a flag or a word of this rank compares with ``value`` as asked."""

    flag: Flag | DeviceWord
    value: Value
    comparison: Comparison = Comparison.GE


@dataclasses.dataclass(frozen=True, slots=True)
class MemOps:
    """Signals and waits that follow each other, as one call."""

    ops: tuple[WriteValue | WaitValue, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Memcpy:
    """One asynchronous copy. ``within_rank``: it crosses no link, and may run on SMs, behind whatever fills them."""

    dst: Operand | Flag
    src: Operand | Cell
    nbytes: int
    within_rank: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MemcpyBatch:
    """Copies to peers that do not depend on each other, as one call; the driver cannot capture it.

    On an H200, three copies of 4 KB take 2.8 us instead of 7.3, three of 16 MB 4 us less (``docs/lab/probes.md``).
    """

    copies: tuple[Memcpy, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MemcpyRows:
    """Small copies from ranks in their order to places at equal distances: one pitched copy, where the sources lie at
    equal distances too (``mirror``), and single copies elsewhere. It can be captured.

    On four H200s four rows of 256 bytes take 3.5 us in a graph, three copies 9 (``docs/lab/probes.md``).
    """

    copies: tuple[Memcpy, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MemcpyEveryOther:
    """Rows of bytes that stay on their rank, of which the next one but one follows: one pitched copy.

    It is slower than a copy of all of them, and slows nothing down that crosses a link meanwhile (``alongside``).

    Attributes:
        dst, src: where the first row goes, and lies.
        nbytes: of a row, and from its end to the next one.
        rows: how many.
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
    """Mark this place of the stream."""

    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class WaitEvent:
    """Hold the stream until the place that the event marks has been reached."""

    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecordStamp:
    """Record an event that keeps the time."""

    slot: int


Copying = Memcpy | MemcpyBatch | MemcpyRows | MemcpyEveryOther
Call = MemOps | Copying | LaunchReduce | RecordEvent | WaitEvent | RecordStamp


@dataclasses.dataclass(frozen=True, slots=True)
class StreamCall:
    """A call on a stream."""

    stream: int
    call: Call


@dataclasses.dataclass(frozen=True, slots=True)
class StreamPlan:
    """Everything one invocation submits, in the order of submission.

    Attributes:
        streams: how many, the caller's included.
        events: how many.
        cells: how many words of device memory the signals need.
        ahead: submitted before the collective is called (prelaunched programs; else empty).
        steps: submitted by the call.
        is_held: one trigger fires all that is ahead, which begins and ends on stream 1.
        marks: of a graph: events that the caller records where each trigger would be fired, before these steps.
        arrivals: of a graph: events that the caller waits for at each arrival, behind these steps.
    """

    streams: int
    events: int
    cells: int
    ahead: tuple[StreamCall, ...]
    steps: tuple[StreamCall, ...]
    is_held: bool = False
    marks: tuple[tuple[int, ...], ...] = ()
    arrivals: tuple[tuple[int, ...], ...] = ()

    @property
    def held_streams(self) -> int:
        """How many streams triggers hold: all but the caller's, where that has the trigger."""
        return self.streams - bool(self.ahead)

    def calls(self, stream: int | None = None) -> tuple[Call, ...]:
        """All calls, or those on one stream."""
        return tuple(step.call for step in (*self.ahead, *self.steps) if stream is None or step.stream == stream)


class Route(StrEnum):
    """How an invocation reaches its streams: on the caller's, by way of an internal one, or into a graph."""

    DIRECT = "direct"
    INTERNAL = "internal"
    CAPTURE = "capture"


def choose_route(handle: int, capturing: bool, captured: bool) -> Route:
    """Decide where and how an invocation on the stream ``handle`` runs.

    Args:
        handle: of the caller's stream.
        capturing: it is being captured.
        captured: the program was loaded for a graph.

    Raises:
        ValueError: it was, and the stream is not being captured; or the other way round.
    """
    if capturing != captured:
        asked, given = ("eager calls", "a capture") if capturing else ("a graph", "an eager call")
        raise ValueError(f"start: a program that was loaded for {asked} (value={given}, allowed={asked})")
    if captured:
        return Route.CAPTURE
    return Route.INTERNAL if handle in DEFAULT_STREAMS else Route.DIRECT

"""Binding: it turns a plan and addresses into prepared driver calls, before the first call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sidelane.execute.base import Addresses, StridedWords
from sidelane.execute.boxes import Box, boxes
from sidelane.execute.cuda.calls import (
    Call,
    Copying,
    HostWord,
    LaunchReduce,
    Memcpy,
    MemcpyBatch,
    MemcpyEveryOther,
    MemOps,
    Operand,
    RecordEvent,
    RecordStamp,
    SignalWord,
    StreamPlan,
    WaitEvent,
    WaitValue,
    WriteValue,
)
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import Bound
from sidelane.program.collective import Span
from sidelane.program.ir import Comparison, Flag, Program, Value
from sidelane.program.wraparound import WORD_BYTES, WORD_MASK

Moving = tuple[tuple[int, int, StridedWords], ...]
"""Words that depend on the epoch, in the form of :class:`sidelane.execute.base.Repetition`."""

_MOST_CALLERS = 64  # streams for which bound calls are remembered; torch hands out 32 of each priority


class Resolver:
    """Addresses of all operands, flags and words of a plan in one process.

    Args:
        program: program of the plan.
        rank: rank of this process.
        addresses: addresses of buffers and flags.
        signal_words: address of the words from which signals are copied.
        words: address of each host word.
    """

    def __init__(
        self, program: Program, rank: int, addresses: Addresses, signal_words: int, words: Mapping[HostWord, int]
    ) -> None:
        self._program, self.rank, self._addresses, self._signal_words, self._words = (
            program,
            rank,
            addresses,
            signal_words,
            words,
        )
        self._bases: Mapping[tuple[int, str], int] = {} if addresses.pieces else addresses.buffers
        self.has_rows = addresses.has_rows

    def at(self, addresses: Addresses) -> Resolver:
        """Return a resolver with other addresses of buffers."""
        return Resolver(self._program, self.rank, addresses, self._signal_words, self._words)

    def require(self, calls: Iterable[Call]) -> None:
        """Refuse calls with an operand that has no address, before the first one is submitted.

        Raises:
            ValueError: an operand has no address.
        """
        for call in calls:
            match call:
                case LaunchReduce(dst, srcs):
                    for operand in (dst, *srcs):
                        self(operand)
                case Memcpy() | MemcpyBatch() | MemcpyEveryOther():
                    for copy in copies_of(call):
                        self(copy.dst), self(copy.src)

    def boxes(self, copy: Memcpy) -> Iterator[Box]:
        """Yield the pitched copies of which a copy between buffers consists, each as the driver accepts it."""
        dst, src = copy.dst, copy.src
        if not (isinstance(dst, Operand) and isinstance(src, Operand)):
            yield Box(self(dst), self(src), copy.nbytes)
            return
        to, source = (Span(place.rank, place.buffer, place.offset, copy.nbytes) for place in (dst, src))
        for box in boxes(to, source, self._addresses):
            yield from accepted(box)

    def __call__(self, place: Operand | Flag | SignalWord | HostWord) -> int:
        """Return the address of a place.

        Raises:
            ValueError: the address is missing.
        """
        match place:
            case Operand(rank, buffer, offset):
                base = self._bases.get((rank, buffer))  # most operands; those of lists consist of pieces
                if base is not None:
                    return base + offset
                address = self._addresses.find(rank, buffer, offset)
                if address is None:
                    raise ValueError(
                        f"load: no address of buffer {buffer} of rank {rank}, which rank {self.rank} needs in "
                        f"{self._program.collective} {self._program.variant}"
                    )
                return address
            case Flag():
                return self._addresses.flag(place)
            case SignalWord(index):
                return self._signal_words + WORD_BYTES * index
            case _:
                return self._words[place]


def copies_of(call: Copying) -> tuple[Memcpy, ...]:
    """Return the copies that one call submits; for every other row, one copy that spans all of them."""
    match call:
        case Memcpy():
            return (call,)
        case MemcpyEveryOther(dst, src, nbytes, rows):
            return (Memcpy(dst, src, nbytes * (2 * rows - 1), within_rank=True),)
        case _:
            return call.copies


MOST_PITCH = (1 << 31) - 1
"""Largest distance of rows in bytes that the driver accepts."""


def accepted(box: Box) -> Iterator[Box]:
    """Yield a box as boxes that the driver accepts: distances are below a limit, and planes begin where rows would."""
    if box.planes > 1 and any(distance % pitch for distance, pitch in zip(box.distances, box.pitches, strict=True)):
        for plane in range(box.planes):
            dst, src = (at + plane * far for at, far in zip((box.dst, box.src), box.distances, strict=True))
            yield from accepted(Box(dst, src, box.width, box.rows, box.pitches))
    elif max(box.pitches) > MOST_PITCH:
        for row, plane in itertools.product(range(box.rows), range(box.planes)):
            dst, src = (
                at + row * pitch + plane * far
                for at, pitch, far in zip((box.dst, box.src), box.pitches, box.distances, strict=True)
            )
            yield Box(dst, src, box.width)
    else:
        yield box


class Frame:
    """The part of a bound plan that does not depend on the addresses of buffers: memory operations, streams, events.

    Args:
        driver: driver of the device.
        plan: calls to submit.
        resolve: turns flags and words into addresses.
        sides: streams of the plan, without the caller's.
        events: events of the plan.
        stamps: an event for each stamp slot.
        captured: the plan is for a graph.
        busy: value of ``HostWord.BUSY`` while a captured invocation runs.

    Attributes:
        words: the words that :meth:`set_epoch` sets.
    """

    def __init__(
        self,
        driver: Driver,
        plan: StreamPlan,
        resolve: Resolver,
        *,
        sides: Sequence[int],
        events: Sequence[int],
        stamps: Mapping[int, int],
        captured: bool,
        busy: int,
    ) -> None:
        self.driver, self.plan, self.sides, self.events = driver, plan, tuple(sides), tuple(events)
        self._resolve, self._stamps, self._busy, self._captured = resolve, stamps, busy, captured
        # All operations of the plan in one place, so that few calls give them their values of an invocation.
        self._ops = driver.memory_ops()
        self._batches: dict[int, slice] = {}
        moving: dict[Value, list[int]] = {}
        for call in plan.calls():
            if isinstance(call, MemOps):
                self._batches[id(call)] = self._append(call, moving)
        self._setters = [(value, self._ops.setters(indices)) for value, indices in moving.items()]
        self.words: Moving = tuple(
            (value.at(0) & WORD_MASK, value.per_epoch & WORD_MASK, where)
            for value, indices in moving.items()
            for where in self._ops.strided_words(indices)
        )
        self._last_epoch = 0
        self._by_caller: dict[int, list[Bound | Moves]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the values of all signals and waits for an invocation. The driver copies them at submission."""
        if epoch == self._last_epoch:
            return
        for value, setters in self._setters:
            word = value.at(epoch) & WORD_MASK
            for set_all in setters:
                set_all(word)
        self._last_epoch = epoch

    def steps(self, caller: int) -> list[Bound | Moves]:
        """Return the plan's steps with ``caller`` as stream 0; those that use no buffer are bound."""
        found = self._by_caller.get(caller)
        if found is None:
            if len(self._by_caller) >= _MOST_CALLERS:
                self._by_caller.clear()
            streams = (caller, *self.sides)
            found = self._by_caller[caller] = [self._bind(step.call, streams[step.stream]) for step in self.plan.steps]
        return found

    def _bind(self, call: Call, stream: int) -> Bound | Moves:
        driver = self.driver
        match call:
            case MemOps():
                return driver.bind_memory_ops(self._ops, stream, self._batches[id(call)])
            case RecordEvent(event):
                return driver.bind_record(self.events[event], stream)
            case WaitEvent(event):
                return driver.bind_wait(self.events[event], stream)
            case RecordStamp(slot):
                return driver.bind_record(self._stamps[slot], stream, external=self._captured)
            case _:
                return Moves(call, stream)

    def _append(self, call: MemOps, moving: dict[Value, list[int]]) -> slice:
        """Add a batch to the operations, and return its slice. ``moving``: operations that depend on the epoch."""
        first = len(self._ops)
        for index, op in enumerate(call.ops, first):
            value = op.value
            match op:
                case WriteValue(target):
                    if target is HostWord.BUSY and value.base:
                        value = Value(self._busy)
                    self._ops.write(self._resolve(target), value.at(0))
                case WaitValue(flag, _, comparison):
                    self._ops.wait(self._resolve(flag), value.at(0), equal=comparison is Comparison.EQ)
            if value.per_epoch:
                moving.setdefault(value, []).append(index)
        return slice(first, len(self._ops))


class Moves(NamedTuple):
    """A call that uses buffers, and its stream."""

    call: Copying | LaunchReduce
    stream: int


class BoundPlan:
    """The calls of a plan at fixed addresses.

    Args:
        frame: bound part of the plan that uses no buffers.
        resolve: turns operands into addresses.
    """

    def __init__(self, frame: Frame, resolve: Resolver) -> None:
        self.frame, self.plan, self.words, self.set_epoch = frame, frame.plan, frame.words, frame.set_epoch
        self._driver, self._resolve = frame.driver, resolve

    def at(self, addresses: Addresses) -> BoundPlan:
        """Return the plan bound to other addresses of the same buffers."""
        return BoundPlan(self.frame, self._resolve.at(addresses))

    def steps(self, caller: int) -> list[Bound]:
        """Return the calls with ``caller`` as stream 0."""
        return self._bind(self.frame.steps(caller))

    def _bind(self, steps: Sequence[Bound | Moves]) -> list[Bound]:
        bound: list[Bound] = []
        for step in steps:
            if not isinstance(step, Moves):
                bound.append(step)
            elif self._resolve.has_rows and isinstance(step.call, Copying):
                bound += self._bind_boxes(step.call, step.stream)
            else:
                bound.append(self._bind_call(*step))
        return bound

    def _bind_boxes(self, call: Copying, stream: int) -> list[Bound]:
        """Prepare copies between buffers whose bytes lie in rows; of a batch, what is contiguous stays one call."""
        assert not isinstance(call, MemcpyEveryOther), "programs with layouts are not alone"
        driver = self._driver
        found = [box for copy in copies_of(call) for box in self._resolve.boxes(copy)]
        plain = [(box.dst, box.src, box.width) for box in found if box.nbytes == box.width]
        if isinstance(call, MemcpyBatch) and len(plain) > 1:
            bound = [driver.bind_copies(plain, stream)]
        else:
            bound = [driver.bind_copy(*copy, stream) for copy in plain]
        for box in found:
            if box.planes > 1:
                bound.append(driver.bind_planes(box, stream))
            elif box.rows > 1:
                bound.append(driver.bind_rows(box.dst, box.src, box.pitches, box.width, box.rows, stream))
        return bound

    def _bind_call(self, call: Copying | LaunchReduce, stream: int) -> Bound:
        driver, resolve = self._driver, self._resolve
        match call:
            case Memcpy(dst, src, nbytes):
                return driver.bind_copy(resolve(dst), resolve(src), nbytes, stream)
            case MemcpyBatch(copies):
                return driver.bind_copies(
                    [(resolve(copy.dst), resolve(copy.src), copy.nbytes) for copy in copies], stream
                )
            case MemcpyEveryOther(dst, src, nbytes, rows):
                return driver.bind_rows(resolve(dst), resolve(src), (2 * nbytes, 2 * nbytes), nbytes, rows, stream)
            case LaunchReduce(dst, srcs, nbytes, reduction):
                return driver.bind_reduce(resolve(dst), list(map(resolve, srcs)), nbytes, reduction, stream)

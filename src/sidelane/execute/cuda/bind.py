"""From a plan and addresses to driver calls that are ready to run: whatever can be done before a call has been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sidelane.execute.base import Addresses, Places
from sidelane.execute.cuda.calls import (
    Call,
    Cell,
    Gate,
    HostWord,
    LaunchReduce,
    Memcpy,
    MemcpyBatch,
    MemcpyRows,
    MemOps,
    Operand,
    Plan,
    RecordEvent,
    RecordStamp,
    StreamCall,
    WaitEvent,
    WaitValue,
    WriteValue,
)
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.rows import pitch
from sidelane.program.collective import Buffer
from sidelane.program.ir import Comparison, Flag, Program, Value
from sidelane.program.words import WORD_MASK

Moving = tuple[tuple[int, int, Places], ...]
"""Words that follow the epoch, as :class:`sidelane.execute.base.Repetition` has them."""

WORD_BYTES = 4
_MOST_CALLERS = 64  # streams for which bound calls are remembered; torch hands out 32 of each priority


class Resolver:
    """Addresses of everything a plan names, for one rank's process.

    Args:
        program: whose operands.
        rank: of this process.
        addresses: of buffers and flags.
        cells: address of the words from which signals are copied.
        words: address of each host word, and of each gate that the plan has.
    """

    def __init__(
        self, program: Program, rank: int, addresses: Addresses, cells: int, words: Mapping[HostWord | Gate, int]
    ) -> None:
        self._program, self.rank, self._addresses, self._cells, self._words = program, rank, addresses, cells, words

    def is_spread(self, place: Operand | Flag | Cell) -> bool:
        """True in memory of which all ranks' lies at equal distances in one mapping."""
        return isinstance(place, Operand) and place.buffer == Buffer.STAGING and self._addresses.spread

    def __call__(self, place: Operand | Flag | Cell | HostWord | Gate) -> int:
        """The address.

        Raises:
            ValueError: it was not given.
        """
        match place:
            case Operand(rank, buffer, offset):
                address = self._addresses.find(rank, buffer, offset)
                if address is None:
                    raise ValueError(
                        f"load: no address of buffer {buffer} of rank {rank}, which rank {self.rank} needs in "
                        f"{self._program.collective} {self._program.variant}"
                    )
                return address
            case Flag(rank, index):
                return self._addresses.flags[rank] + WORD_BYTES * index
            case Cell(index):
                return self._cells + WORD_BYTES * index
            case _:
                return self._words[place]


def copies_of(call: Memcpy | MemcpyBatch | MemcpyRows) -> tuple[Memcpy, ...]:
    """The copies that one call submits."""
    return (call,) if isinstance(call, Memcpy) else call.copies


class BoundPlan:
    """The calls of a plan at fixed addresses.

    Args:
        driver: of the device.
        plan: what to submit.
        resolve: turns operands into addresses.
        sides: a stream for each but the caller's.
        events: one for each of the plan's.
        stamps: an event for each slot.
        captured: the plan is for a graph.
        busy: what ``HostWord.BUSY`` holds while a captured invocation runs.
        reduce_blocks: most thread blocks of a reduction.

    Attributes:
        words: what :meth:`set_epoch` sets.

    Raises:
        ValueError: an operand has no address.
    """

    def __init__(
        self,
        driver: Driver,
        plan: Plan,
        resolve: Resolver,
        *,
        sides: Sequence[int],
        events: Sequence[int],
        stamps: Mapping[int, int],
        captured: bool,
        busy: int,
        reduce_blocks: int,
    ) -> None:
        self.plan, self.sides, self.events = plan, tuple(sides), tuple(events)
        self._driver, self._resolve, self._stamps, self._busy = driver, resolve, stamps, busy
        self._reduce_blocks = reduce_blocks
        self._captured = captured
        # All operations of the plan in one place, so that few calls give them their values of an invocation.
        self._ops = driver.memory_ops()
        self._batches: dict[int, slice] = {}
        moving: dict[Value, list[int]] = {}
        for call in plan.calls():
            if isinstance(call, MemOps):
                self._batches[id(call)] = self._append(call, moving)
            elif isinstance(call, Memcpy | MemcpyBatch | MemcpyRows):
                for copy in copies_of(call):
                    resolve(copy.dst), resolve(copy.src)  # what has no address is found now, not at the first call
            elif isinstance(call, LaunchReduce):
                resolve(call.dst), *map(resolve, call.srcs)
        self._setters = [(value, self._ops.setters(places)) for value, places in moving.items()]
        self.words: Moving = tuple(
            (value.at(0) & WORD_MASK, value.per_epoch & WORD_MASK, where)
            for value, places in moving.items()
            for where in self._ops.places(places)
        )
        self._last_epoch = 0
        self._by_caller: dict[int, list[Bound]] = {}
        self.ahead = self._bind(plan.ahead, caller=0)

    def own_spans(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of this rank's inputs and outputs that are copied: the rest is the communicator's memory."""
        for call in self.plan.calls():
            if isinstance(call, Memcpy | MemcpyBatch | MemcpyRows):
                for copy in copies_of(call):
                    for end in (copy.dst, copy.src):
                        if isinstance(end, Operand) and self._is_callers(end):
                            yield self._resolve(end), copy.nbytes

    def set_epoch(self, epoch: int) -> None:
        """Give every signal and wait its value of this invocation. Submitting a batch copies its values."""
        if epoch == self._last_epoch:
            return
        for value, setters in self._setters:
            word = value.at(epoch) & WORD_MASK
            for set_all in setters:
                set_all(word)
        self._last_epoch = epoch

    def steps(self, caller: int) -> list[Bound]:
        """The calls with ``caller`` as stream 0, bound when the stream is first seen."""
        bound = self._by_caller.get(caller)
        if bound is None:
            if len(self._by_caller) >= _MOST_CALLERS:
                self._by_caller.clear()
            bound = self._by_caller[caller] = self._bind(self.plan.steps, caller)
        return bound

    def _bind(self, steps: Sequence[StreamCall], caller: int) -> list[Bound]:
        calls = [(call, step.stream) for step in steps for call in self._without_uneven_rows(step.call)]
        return [self._bind_call(call, self.sides[stream - 1] if stream else caller) for call, stream in calls]

    def _is_callers(self, operand: Operand) -> bool:
        return operand.rank == self._resolve.rank and operand.buffer != Buffer.STAGING

    def _without_uneven_rows(self, call: Call) -> tuple[Call, ...]:
        """A call as it is, or its copies where its rows are not at equal distances in one mapping."""
        if not isinstance(call, MemcpyRows) or None not in self._pitches(call):
            return (call,)
        ranks = [copy.src.rank for copy in call.copies if isinstance(copy.src, Operand)]
        own = ranks.index(self._resolve.rank) + 1 if self._resolve.rank in ranks else 0
        return (*call.copies[own:], *call.copies[:own])  # in rotated order: not all ranks at one peer

    def _pitches(self, rows: MemcpyRows) -> tuple[int | None, int | None]:
        """Distances of destinations and of sources; None where a pitched copy cannot take them."""
        nbytes = rows.copies[0].nbytes
        if not all(self._resolve.is_spread(copy.src) for copy in rows.copies):
            return None, None
        dsts = [self._resolve(copy.dst) for copy in rows.copies]
        srcs = [self._resolve(copy.src) for copy in rows.copies]
        return pitch(dsts, nbytes), pitch(srcs, nbytes)

    def _bind_call(self, call: Call, stream: int) -> Bound:
        driver = self._driver
        match call:
            case MemOps():
                return driver.bind_memory_ops(self._ops, stream, self._batches[id(call)])
            case Memcpy(dst, src, nbytes):
                return driver.bind_copy(self._resolve(dst), self._resolve(src), nbytes, stream)
            case MemcpyBatch(copies):
                resolved = [(self._resolve(copy.dst), self._resolve(copy.src), copy.nbytes) for copy in copies]
                return driver.bind_copies(resolved, stream)
            case MemcpyRows(copies):
                first, (dst_pitch, src_pitch) = copies[0], self._pitches(call)
                assert dst_pitch is not None, "uneven ones were taken apart"
                assert src_pitch is not None
                ends = self._resolve(first.dst), self._resolve(first.src)
                return driver.bind_rows(*ends, (dst_pitch, src_pitch), first.nbytes, len(copies), stream)
            case LaunchReduce(dst, srcs, nbytes, reduction):
                sources = [self._resolve(src) for src in srcs]
                return driver.bind_reduce(self._resolve(dst), sources, nbytes, reduction, stream, self._reduce_blocks)
            case RecordEvent(event):
                return driver.bind_record(self.events[event], stream)
            case WaitEvent(event):
                return driver.bind_wait(self.events[event], stream)
            case RecordStamp(slot):
                return driver.bind_record(self._stamps[slot], stream, external=self._captured)

    def _append(self, call: MemOps, moving: dict[Value, list[int]]) -> slice:
        """Add a batch to the operations; where it is. ``moving``: which operations follow the epoch."""
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

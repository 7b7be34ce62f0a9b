"""Plans: one rank's commands on streams (``streams``) become calls (``calls``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane.execute.cuda.calls import (
    MAX_BATCH,
    Call,
    HostWord,
    LaunchReduce,
    Memcpy,
    MemOps,
    Operand,
    RecordEvent,
    RecordStamp,
    SignalWord,
    StreamCall,
    StreamPlan,
    WaitEvent,
    WaitValue,
    WriteValue,
)
from sidelane.execute.cuda.copy_batches import LEAST_SPLIT_BYTES, batch_copies, split_in_rows
from sidelane.execute.cuda.streams import Placed, RankStreams
from sidelane.program.collective import Span
from sidelane.program.ir import EPOCH, Copy, Flag, Program, Reduce, Signal, SignalOp, Stamp, Value, Wait, describe
from sidelane.program.transform import ended_by, flags_by_callers, held_by, release, waits_for


def plan_calls(
    program: Program,
    rank: int,
    *,
    peer_writes: bool = True,
    copy_batches: bool = True,
    in_rows: bool = True,
    captured: bool = False,
) -> StreamPlan:
    """Turn the queues of ``rank`` into calls. Prelaunched ones stand behind the first trigger of the rank.

    Args:
        program: the program; its moves must be copies (``transform.lower`` rewrites the others).
        rank: rank whose queues are planned.
        peer_writes: the driver can write a value into a peer's memory; else a signal is a 4-byte copy.
        copy_batches: the driver accepts several copies in one call.
        in_rows: copies of rows are made by copy engines, so that copies within the rank may be split in rows.
        captured: the plan is for a graph: only single copies, and no epochs in host words.

    Raises:
        ValueError: the driver does not support a command of the program; the text names the first.
    """
    trigger, ended = (None, None) if captured else (held_by(program, rank), ended_by(program, rank))
    if program.prelaunched:
        program = release(program)
    plan = _Lowering(RankStreams(program, rank, captured), peer_writes, in_rows).plan(trigger, ended)
    if captured or not copy_batches:
        return plan
    return dataclasses.replace(plan, steps=batch_copies(plan.steps))


class _Lowering:
    """The calls of a rank's commands, as far as they are lowered."""

    def __init__(self, streams: RankStreams, peer_writes: bool, in_rows: bool) -> None:
        self.streams, self.peer_writes = streams, peer_writes
        self.unhurried = streams.unhurried() if in_rows and streams.program.alone else frozenset()
        self.event_of = {flag: event for event, flag in enumerate(streams.own_flags)}
        self.events, self.signal_words = len(self.event_of), 0
        captured = streams.captured
        self.begins = WriteValue(HostWord.BUSY, Value(1)) if captured else WriteValue(HostWord.STARTED, EPOCH)
        self.ends = WriteValue(HostWord.BUSY, Value(0)) if captured else WriteValue(HostWord.FINISHED, EPOCH)
        self.unforked, self.fork = {*streams.forking}, -1
        self.steps: list[StreamCall] = []
        # Memory operations that follow each other on one stream are one call.
        self.batch: list[WriteValue | WaitValue] = []
        self.batch_stream = 0
        self.signal_copies: list[Memcpy] = []  # behind the batch

    def plan(self, trigger: Flag | None, ended: Flag | None) -> StreamPlan:
        """Lower all commands. Stream 0, from which the others fork, waits for ``trigger`` first, and sets ``ended``."""
        streams, behind = self.streams, len(self.streams.commands)
        if trigger is not None:
            self._add(0, WaitValue(trigger, EPOCH))
        self._begin(-1)
        self._fork()
        for position, placed in enumerate(streams.commands):
            self._join_asides(position)
            self._begin(position)
            if placed.stream in self.unforked:
                self.unforked.remove(placed.stream)
                self._emit(placed.stream, WaitEvent(self.fork))
            self._lower(placed)
            self._end(position)
        self._begin(behind)
        self._join_asides(behind)
        self._join(streams.joining)
        if ended is not None:
            self._add(0, WriteValue(ended, EPOCH))  # in front of the word of the host, which takes longer
        self._end(behind)
        self._flush()
        marks, arrivals = self._events_of_callers()
        counts = (len(streams.sides) + 1, self.events, self.signal_words)
        return StreamPlan(*counts, tuple(self.steps), marks=marks, arrivals=arrivals)

    def _begin(self, position: int) -> None:
        """Tell the host of the begin, if ``position`` is its place."""
        if position == self.streams.begin_at:
            self._add(0, self.begins)

    def _end(self, position: int) -> None:
        """Tell the host of the end, if ``position`` is its place."""
        if position == self.streams.end_at:
            self._add(0, self.ends)

    def _join_asides(self, position: int) -> None:
        """Let stream 0 wait for the asides, if ``position`` is its place."""
        if position == self.streams.join_at:
            if self.streams.end_at is None:
                self._add(self.streams.asides[-1], self.ends)  # in the shadow of the copies
            self._join(self.streams.asides)

    def _fork(self) -> None:
        """Record where side streams fork. Each waits for the event at its first command."""
        if self.unforked:
            self.fork = self._new_event()
            self._emit(0, RecordEvent(self.fork))

    def _events_of_callers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the events that replace the triggers and the arrivals in a graph."""
        streams = self.streams
        both = flags_by_callers(streams.program, streams.rank) if streams.captured else ((), ())
        events = self.event_of
        return tuple(tuple(tuple(events[flag] for flag in flags if flag in events) for flags in one) for one in both)

    def _join(self, streams: Sequence[int]) -> None:
        """Let stream 0 wait for the end of ``streams``."""
        joins = {stream: self._new_event() for stream in streams}
        for stream, event in joins.items():
            self._emit(stream, RecordEvent(event))
        for event in joins.values():
            self._emit(0, WaitEvent(event))

    def _lower(self, placed: Placed) -> None:
        stream, queue, command = placed
        match command:
            case Copy(dst, src):
                if src.nbytes:
                    copy = Memcpy(_operand(dst), _operand(src), src.nbytes, within_rank=dst.rank == src.rank)
                    in_rows = stream in self.unhurried and src.nbytes >= LEAST_SPLIT_BYTES
                    for call in split_in_rows(copy) if in_rows else (copy,):
                        self._emit(stream, call)
            case Reduce(dst, srcs, reduction):
                if dst.nbytes:
                    launch = LaunchReduce(_operand(dst), tuple(map(_operand, srcs)), dst.nbytes, reduction)
                    self._emit(stream, launch)
            case Signal(flag, value, SignalOp.SET):
                if flag not in self.event_of:
                    self._signal(stream, flag, value)
                elif not waits_for(queue, flag) and not self.streams.is_within_stream(flag):
                    # (A queue that also waits for the flag is resetting it, which events do not need.)
                    self._record(stream, flag)
            case Wait(flag, value, comparison) if flag.rank == self.streams.rank:
                if flag not in self.event_of:
                    self._add(stream, WaitValue(flag, value, comparison))
                elif not self.streams.is_within_stream(flag):
                    self._emit(stream, WaitEvent(self.event_of[flag]))
            case Stamp(slot):
                self._emit(stream, RecordStamp(slot))
            case _:
                raise ValueError(
                    f"plan_calls: the driver has no such command (value={describe(command)!r} in rank {queue.rank} "
                    f"{queue.engine}, allowed=copy, reduce, signal set, wait on a flag of the own rank, stamp)"
                )

    def _signal(self, stream: int, flag: Flag, value: Value) -> None:
        if flag.rank == self.streams.rank or self.peer_writes:
            self._add(stream, WriteValue(flag, value))
            return
        signal_word = SignalWord(self.signal_words)
        self.signal_words += 1
        # Only writes to such words may stand between the write of one and its copy: copies go out when the batch does.
        if self.batch_stream != stream or not self.signal_copies:
            self._flush()
        self._add(stream, WriteValue(signal_word, value), deferred=Memcpy(flag, signal_word, 4, within_rank=False))

    def _add(self, stream: int, op: WriteValue | WaitValue, deferred: Memcpy | None = None) -> None:
        if self.batch_stream != stream or len(self.batch) == MAX_BATCH or (self.signal_copies and deferred is None):
            self._flush()
        self.batch_stream = stream
        self.batch.append(op)
        if deferred is not None:
            self.signal_copies.append(deferred)

    def _record(self, stream: int, flag: Flag) -> None:
        """Record an event for the streams that wait for ``flag``; one event serves all flags signalled here."""
        self._flush()
        last = self.steps[-1] if self.steps else None
        if last is not None and last.stream == stream and isinstance(last.call, RecordEvent):
            self.event_of[flag] = last.call.event
        else:
            self._emit(stream, RecordEvent(self.event_of[flag]))

    def _emit(self, stream: int, call: Call) -> None:
        self._flush()
        self.steps.append(StreamCall(stream, call))

    def _flush(self) -> None:
        """Submit the batch, before any call on another stream, to keep the order of submission."""
        if self.batch:
            self.steps.append(StreamCall(self.batch_stream, MemOps(tuple(self.batch))))
            self.steps += [StreamCall(self.batch_stream, copy) for copy in self.signal_copies]
        self.batch, self.signal_copies = [], []

    def _new_event(self) -> int:
        self.events += 1
        return self.events - 1


def _operand(span: Span) -> Operand:
    return Operand(span.rank, span.buffer, span.offset)

"""Planner: it lowers one rank's queues to calls on streams. ``calls`` describes the result.

Over 400 lines, since its steps share the state of one plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence

from sidelane.execute.cuda.calls import (
    MAX_BATCH,
    Call,
    Cell,
    HostWord,
    LaunchReduce,
    Memcpy,
    MemOps,
    Operand,
    RecordEvent,
    RecordStamp,
    StreamCall,
    StreamPlan,
    WaitEvent,
    WaitValue,
    WriteValue,
)
from sidelane.execute.cuda.copy_batches import LEAST_SPLIT_BYTES, batch_copies, join_rows, split_in_rows
from sidelane.execute.cuda.prelaunch import hold_back
from sidelane.program.collective import Span
from sidelane.program.ir import (
    EPOCH,
    Command,
    Copy,
    EngineKind,
    Flag,
    Program,
    Queue,
    Reduce,
    Signal,
    SignalOp,
    Stamp,
    Value,
    Wait,
    describe,
    spans,
)
from sidelane.program.own_flags import flags_between_own_queues, waits_for
from sidelane.program.transform.freeze import LOWERED
from sidelane.program.transform.prelaunch import held_by, release
from sidelane.program.transform.triggers import flags_by_callers

CommandIndex = tuple[int, int]
"""Index of a command of one rank: (position of its queue among the queues of the rank, position in the queue)."""

Words = MutableMapping[Flag, int]
"""Values of flags; one that was never written is 0."""


def submission_order(program: Program, is_small: Callable[[Queue], bool]) -> tuple[tuple[CommandIndex, ...], ...]:
    """Order the commands of every rank as in one execution of the whole program.

    A rank stays with a queue as long as any rank makes progress, so that there are few changes between queues (a change
    splits a batch of signals and waits). But it pauses after every copy that is signalled to a peer, if another copy
    follows:

    - queues that copy to the same ranks alternate there; otherwise one engine would get all of its copies before
      another one gets its first;
    - the reduction of a piece, on its own stream, is submitted between the next piece's copies and their signals. A
      signal holds its channel until those copies have ended, and a reduction behind it would begin only then.

    The rest of a program that deadlocks, which ``verify`` refuses, is kept queue by queue.

    Args:
        program: the program; its signals set flags and do not add to them.
        is_small: returns True for queues whose reductions are too small, or too late, to be submitted early.

    Returns:
        The commands of each rank in order.
    """
    ranks = [_Rank(program.queues_of(rank), is_small) for rank in range(program.world_size)]
    words = _triggers(program)
    while _round(ranks, words, _Rank.advance) or _round(ranks, words, _Rank.switch):
        pass
    for rank in ranks:
        rank.finish()
    return tuple(tuple(rank.order) for rank in ranks)


def _triggers(program: Program) -> dict[Flag, int]:
    """Return the flags that callers signal (``transform.triggers``), with values as if all had been fired."""
    signalled = {c.flag for queue in program.queues for c in queue.commands if isinstance(c, Signal)}
    found: dict[Flag, int] = {}
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, Wait) and command.flag not in signalled:
                found[command.flag] = max(found.get(command.flag, 0), command.value.at(1))
    return found


def _round(ranks: Sequence[_Rank], words: dict[Flag, int], step: Callable[[_Rank, Words], bool]) -> bool:
    """Let every rank take a step. It sees the signals of earlier rounds, so that all ranks proceed equally.

    Returns:
        True if any rank made progress.
    """
    own: list[dict[Flag, int]] = [{} for _ in ranks]
    moved = [step(rank, ChainMap(written, words)) for rank, written in zip(ranks, own, strict=True)]
    for written in own:
        words.update(written)
    return any(moved)


class _Rank:
    def __init__(self, queues: tuple[Queue, ...], is_small: Callable[[Queue], bool]) -> None:
        self.queues = queues
        self.summing = [
            index
            for index, queue in enumerate(queues)
            if queue.engine.kind is EngineKind.COMPUTE and not is_small(queue)
        ]
        self.next = [0] * len(queues)
        self.current = 0
        self.order: list[CommandIndex] = []
        self.turns = [_turns(queue) for queue in queues]
        self.told = [_told(queue) for queue in queues]
        self.reached = [_reached(queue) for queue in queues]

    def advance(self, words: Words) -> bool:
        """Execute the current queue until it blocks, ends, or pauses. Return True if a command was executed."""
        if not self.queues:
            return False
        moved, index = False, self.current
        while (command := self._head(index)) is not None and not _blocks(command, words):
            self._execute(index, command, words)
            moved = True
            if self.next[index] in self.turns[index]:
                self.switch(words, self.reached[index])
                break
            if self.next[index] in self.told[index]:
                self._compute(words)
        return moved

    def _execute(self, index: int, command: Command, words: Words) -> None:
        if isinstance(command, Signal):
            words[command.flag] = command.value.at(1)
        self.order.append((index, self.next[index]))
        self.next[index] += 1

    def _compute(self, words: Words) -> None:
        """Execute the separate reductions whose inputs are ready."""
        for index in self.summing:
            for command in self._until_summed(index, words):
                if _blocks(command, words):
                    break
                self._execute(index, command, words)

    def _until_summed(self, index: int, words: Words) -> Sequence[Command]:
        """Return the next commands of a queue that can run, up to the last reduction among them and its signals."""
        commands = self.queues[index].commands[self.next[index] :]
        found = 0
        for count, command in enumerate(commands, 1):
            if _blocks(command, words):
                break
            if isinstance(command, Reduce) or (found == count - 1 and isinstance(command, Signal)):
                found = count
        return commands[:found]

    def switch(self, words: Words, reached: frozenset[int] | None = None) -> bool:
        """Turn to the next queue, in a circle, whose first command can run. Return False if there is none.

        Args:
            words: values of the flags.
            reached: ranks to which it must copy; None for any.
        """
        for step in range(1, len(self.queues) + 1):
            candidate = (self.current + step) % len(self.queues)
            if reached is not None and self.reached[candidate] != reached:
                continue
            command = self._head(candidate)
            if command is not None and not _blocks(command, words):
                self.current = candidate
                return True
        return False

    def finish(self) -> None:
        for index, queue in enumerate(self.queues):
            self.order += [(index, position) for position in range(self.next[index], len(queue.commands))]

    def _head(self, index: int) -> Command | None:
        commands = self.queues[index].commands
        return commands[self.next[index]] if self.next[index] < len(commands) else None


def _reached(queue: Queue) -> frozenset[int]:
    """Return the ranks to which a queue copies."""
    return frozenset(command.dst.rank for command in queue.commands if isinstance(command, Copy))


def _turns(queue: Queue) -> frozenset[int]:
    """Return the positions of copies at which a queue pauses: the copy before was signalled to peers.

    A wait after such a signal stays with it, since both are one call.
    """
    copies = [index for index, command in enumerate(queue.commands) if isinstance(command, Copy)]
    return frozenset(
        later
        for earlier, later in itertools.pairwise(copies)
        if any(isinstance(c, Signal) and c.flag.rank != queue.rank for c in queue.commands[earlier:later])
    )


def _told(queue: Queue) -> frozenset[int]:
    """Return the positions of signals to peers that directly follow a copy; stamps between them do not count."""
    commands = [(index, command) for index, command in enumerate(queue.commands) if not isinstance(command, Stamp)]
    return frozenset(
        index
        for (_, before), (index, command) in itertools.pairwise(commands)
        if isinstance(before, Copy) and isinstance(command, Signal) and command.flag.rank != queue.rank
    )


def _blocks(command: Command, words: Words) -> bool:
    if not isinstance(command, Wait):
        return False
    return not command.comparison.holds(words.get(command.flag, 0), command.value.at(1))


INLINE_BYTES = 4 << 20
"""Largest number of bytes of a ``local`` or ``compute`` queue that runs on stream 0. Its own stream would cost four
event calls and some ten microseconds, in which a GPU copies about this much inside its own memory."""


def plan_calls(
    program: Program,
    rank: int,
    *,
    peer_writes: bool = True,
    copy_batches: bool = True,
    in_rows: bool = True,
    captured: bool = False,
) -> StreamPlan:
    """Turn the queues of ``rank`` into calls.

    Args:
        program: the program; its moves must be copies (``transform.lower`` rewrites the others).
        rank: rank whose queues are planned.
        peer_writes: the driver can write a value into a peer's memory; else a signal is a 4-byte copy.
        copy_batches: the driver accepts several copies in one call.
        in_rows: copies of rows are made by copy engines, so that copies within the rank may be split in rows.
        captured: the plan is for a graph: no calls ahead, only single copies or rows, and no epochs in host words.

    Raises:
        ValueError: the driver does not support a command of the program; the text names the first.
    """
    trigger = None if captured else held_by(program, rank)
    if trigger is not None:
        options = {"peer_writes": peer_writes, "copy_batches": copy_batches, "in_rows": in_rows}
        plan = plan_calls(release(program), rank, **options)
        return hold_back(plan, trigger)
    plan = _Planner(program, rank, peer_writes, in_rows, captured).plan()
    if captured:
        return dataclasses.replace(plan, steps=join_rows(plan.steps))
    if not copy_batches:
        return plan
    return dataclasses.replace(plan, ahead=batch_copies(plan.ahead), steps=batch_copies(plan.steps))


class _Planner:
    def __init__(self, program: Program, rank: int, peer_writes: bool, in_rows: bool, captured: bool) -> None:
        self.in_rows = in_rows
        self.program, self.rank, self.peer_writes, self.captured = program, rank, peer_writes, captured
        self.split = program.prelaunched and not captured
        self.with_callers = captured and not program.prelaunched
        self.queues = program.queues_of(rank)
        self.stream_of = self._assign_streams()
        self.commands = self._order_commands()
        own_flags = flags_between_own_queues(program, rank, self.split)
        self.local_events = {flag: event for event, flag in enumerate(own_flags)}
        self.events = len(self.local_events)
        self.forks: dict[int, int] = {}
        self.unhurried: frozenset[int] = frozenset()  # streams
        self.cells = 0
        self.begun = self.ended = False
        self.steps: list[StreamCall] = []
        self.batch: list[WriteValue | WaitValue] = []
        self.cell_copies: list[Memcpy] = []
        self.stream = 0

    def plan(self) -> StreamPlan:
        sides = sorted(set(self.stream_of.values()) - {0})
        asides, join_at = self._place_asides()
        if self.program.alone and self.in_rows:
            self.unhurried = self._in_the_shadow(asides)
        last_wait = self._last_wait()
        ends_aside = bool(asides) and last_wait is not None and last_wait < join_at
        if self.split:
            self._begin()
        else:
            self._fork([stream for stream in sides if not self._forks_by_itself(stream)])
        begin_at = self._place_of_begin()
        for position, (index, command) in enumerate(self.commands):
            if position == join_at:
                self._join_asides(asides, ends_aside)
            if position == begin_at:
                self._begin()
            self._lower_next(index, command)
            if position == last_wait and not ends_aside:
                self._end()
        self._begin()
        if join_at == len(self.commands):
            self._join_asides(asides, ends_aside)
        self._join([s for s in sides if s not in asides and not self._joins_by_itself(s)])
        self._end()
        self._flush()
        ahead = [step for step in self.steps if self.split and step.stream]
        steps = [step for step in self.steps if not self.split or not step.stream]
        marks, arrivals = self._events_of_callers()
        plan = StreamPlan(len(sides) + 1, self.events, self.cells, tuple(ahead), tuple(steps))
        return dataclasses.replace(plan, marks=marks, arrivals=arrivals)

    def _events_of_callers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the events that replace the triggers and the arrivals in a graph."""
        events = self.local_events
        both = flags_by_callers(self.program, self.rank) if self.with_callers else ((), ())
        return tuple(tuple(tuple(events[flag] for flag in flags if flag in events) for flags in one) for one in both)

    def _lower_next(self, index: int, command: Command) -> None:
        stream = self.stream_of[index]
        fork = self.forks.pop(stream, None)
        if fork is not None:
            self._emit(stream, WaitEvent(fork))
        self._lower(stream, self.queues[index], command)

    def _fork(self, streams: Sequence[int]) -> None:
        """Record where ``streams`` fork. Each waits for the event at its first command."""
        if streams:
            event = self._event()
            self.forks = dict.fromkeys(streams, event)
            self._emit(0, RecordEvent(event))

    def _join(self, streams: Sequence[int]) -> None:
        joins = {stream: self._event() for stream in streams}
        for stream, event in joins.items():
            self._emit(stream, RecordEvent(event))
        for event in joins.values():
            self._emit(0, WaitEvent(event))

    def _join_asides(self, asides: Sequence[int], ends: bool) -> None:
        if ends:
            self._end(asides[-1])  # in the shadow of the copies
        self._join(asides)

    def _lower(self, stream: int, queue: Queue, command: Command) -> None:
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
                if flag not in self.local_events:
                    self._signal(stream, flag, value)
                elif not waits_for(queue, flag) and not self._same_stream(flag):
                    # (A queue that also waits for the flag is resetting it, which events do not need.)
                    self._record(stream, flag)
            case Wait(flag, value, comparison) if flag.rank == self.rank:
                if flag not in self.local_events:
                    self._add(stream, WaitValue(flag, value, comparison))
                elif not self._same_stream(flag):
                    self._emit(stream, WaitEvent(self.local_events[flag]))
            case Stamp(slot):
                self._emit(stream, RecordStamp(slot))
            case _:
                raise ValueError(
                    f"plan_calls: the driver has no such command (value={describe(command)!r} in rank {queue.rank} "
                    f"{queue.engine}, allowed=copy, reduce, signal set, wait on a flag of the own rank, stamp)"
                )

    def _signal(self, stream: int, flag: Flag, value: Value) -> None:
        if flag.rank == self.rank or self.peer_writes:
            self._add(stream, WriteValue(flag, value))
            return
        cell = Cell(self.cells)
        self.cells += 1
        # Only writes to cells may stand between a cell's write and its copy: the copies go out when the batch does.
        if self.stream != stream or not self.cell_copies:
            self._flush()
        self._add(stream, WriteValue(cell, value), deferred=Memcpy(flag, cell, 4, within_rank=False))

    def _add(self, stream: int, op: WriteValue | WaitValue, deferred: Memcpy | None = None) -> None:
        if self.stream != stream or len(self.batch) == MAX_BATCH or (self.cell_copies and deferred is None):
            self._flush()
        self.stream = stream
        self.batch.append(op)
        if deferred is not None:
            self.cell_copies.append(deferred)

    def _record(self, stream: int, flag: Flag) -> None:
        """Record an event for the streams that wait for ``flag``; one event serves all flags signalled here."""
        self._flush()
        last = self.steps[-1] if self.steps else None
        if last is not None and last.stream == stream and isinstance(last.call, RecordEvent):
            self.local_events[flag] = last.call.event
        else:
            self._emit(stream, RecordEvent(self.local_events[flag]))

    def _emit(self, stream: int, call: Call) -> None:
        self._flush()
        self.steps.append(StreamCall(stream, call))

    def _flush(self) -> None:
        """Submit the batch, before any call on another stream, to keep the order of submission."""
        if self.batch:
            self.steps.append(StreamCall(self.stream, MemOps(tuple(self.batch))))
            self.steps += [StreamCall(self.stream, copy) for copy in self.cell_copies]
        self.batch, self.cell_copies = [], []

    def _place_of_begin(self) -> int | None:
        """Return the position of the host word's write: after the signals for which peers wait, and before a stamp."""
        first = [(n, command) for n, (index, command) in enumerate(self.commands) if not self.stream_of[index]]
        others = (n for n, (_, c) in enumerate(first) if not isinstance(c, Signal | Stamp) and not _stays(c))
        place = next(others, None)
        while place and isinstance(first[place - 1][1], Stamp):
            place -= 1
        return None if place is None else first[place][0]

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            word, value = (HostWord.BUSY, Value(1)) if self.captured else (HostWord.STARTED, EPOCH)
            self._add(0, WriteValue(word, value))

    def _end(self, stream: int = 0) -> None:
        if not self.ended:
            self.ended = True
            word, value = (HostWord.BUSY, Value(0)) if self.captured else (HostWord.FINISHED, EPOCH)
            self._add(stream, WriteValue(word, value))

    def _event(self) -> int:
        self.events += 1
        return self.events - 1

    def _assign_streams(self) -> dict[int, int]:
        """Assign a stream to each queue with commands to submit."""
        queues = self.queues
        used = [
            index
            for index, queue in enumerate(queues)
            if any(_submits(queue)) and not (self.with_callers and queue.engine.kind is EngineKind.CALLER)
        ]
        prelaunched = self.program.prelaunched
        kind = EngineKind.CALLER if prelaunched else EngineKind.DMA
        first = [index for index in used if self.queues[index].engine.kind is kind][:1]
        if not first and not prelaunched:
            first = used[:1]
        inline = (
            [] if prelaunched else [index for index in used if _is_small(queues[index]) and not self._follows(index)]
        )
        on_first = {*first, *inline} if first else set()
        others = [index for index in used if index not in on_first]
        return dict.fromkeys(sorted(on_first), 0) | {index: stream for stream, index in enumerate(others, start=1)}

    def _follows(self, index: int) -> bool:
        """Return True if a queue waits for another one of this rank: on stream 0 it could block that one."""
        waits = {command.flag for command in self.queues[index].commands if isinstance(command, Wait)}
        return any(
            isinstance(command, Signal) and command.flag in waits
            for other, queue in enumerate(self.queues)
            for command in queue.commands
            if other != index
        )

    def _order_commands(self) -> list[tuple[int, Command]]:
        """Return the submitted commands, each with the position of its queue, in the order of submission."""
        order = submission_order(self.program, _is_small)[self.rank]
        commands = [(index, self.queues[index].commands[position]) for index, position in order]
        return [(index, command) for index, command in commands if index in self.stream_of]

    def _place_asides(self) -> tuple[list[int], int]:
        """Order the copies of ``asides`` after those of stream 0, and find the place where stream 0 joins them.

        An aside is a side stream of copies and resets that waits for events of stream 0 only, so that it always ends.
        The place is after the last signals, while the rank waits for its peers: at 1 KB on four H200s 26 us, instead of
        32 before the signals and 28 after the waits. In a graph it is before the signals, so that signals and waits
        stay one node: 171 us at 64 MiB, instead of 177 or 183. There the copies of stream 0 must come first: 25 us
        instead of 34 at 1 KB, since the driver gives the first captured work the channel of the work before.

        Returns:
            The asides, and the position of the command before which stream 0 joins them.
        """
        asides = [] if self.split else self._streams_of_copies()
        main = [entry for entry in self.commands if self.stream_of[entry[0]] not in asides]
        first = [(n, command) for n, (index, command) in enumerate(main) if not self.stream_of[index]]
        last_move = max((n for n, c in first if not isinstance(c, Signal | Wait | Stamp)), default=-1)
        while (last_move + 1, Stamp) in [(n, type(c)) for n, c in first]:
            last_move += 1  # the stamp marks the end of the copies, not of the streams that join
        marks = {c.flag for n, c in first if n <= last_move and isinstance(c, Signal)}
        if not all(self._waited(stream) <= marks for stream in asides):
            return [], len(self.commands)
        signals = [n for n, c in first if isinstance(c, Signal) and not self.captured]
        copies = [entry for entry in self.commands if self.stream_of[entry[0]] in asides]
        self.commands = [*main[: last_move + 1], *copies, *main[last_move + 1 :]]
        return asides, max([last_move, *signals]) + 1 + len(copies)

    def _in_the_shadow(self, asides: Sequence[int]) -> frozenset[int]:
        """Return the side streams whose copies may take twice their time, since other copies cross links for longer."""
        crossing, within = Counter[int](), Counter[int]()
        for index, command in self.commands:
            if isinstance(command, Copy):
                (within if _stays(command) else crossing)[self.stream_of[index]] += command.src.nbytes
        aside = frozenset(stream for stream in asides if not crossing[stream])
        longest = max(crossing.values(), default=0)
        return aside if sum(within[stream] for stream in aside) <= longest else frozenset()

    def _streams_of_copies(self) -> list[int]:
        """Return the side streams that only copy, reset flags, and wait for events of this rank's queues."""
        found = []
        for index, stream in self.stream_of.items():
            waited = self._waited(stream)
            only_copies = all(
                isinstance(command, Copy | Wait | Stamp)
                or (isinstance(command, Signal) and (command.flag in waited or command.value == LOWERED))
                for command in self.queues[index].commands
            )
            if stream and only_copies and waited <= set(self.local_events):
                found.append(stream)
        return found

    def _last_wait(self) -> int | None:
        """Return the position of the last wait for a peer in a graph; None if several streams wait for peers.

        There ``BUSY`` is reset, since no later call can hang. (An epoch means that all work has ended: it is written at
        the end.)
        """
        waits = [
            (position, self.stream_of[index])
            for position, (index, command) in enumerate(self.commands)
            if isinstance(command, Wait) and command.flag not in self.local_events
        ]
        if not self.captured or not waits or any(stream for _, stream in waits):
            return None
        return waits[-1][0]

    def _forks_by_itself(self, stream: int) -> bool:
        """Return True if a side stream begins with a wait for stream 0."""
        first = self._without_resets(stream)[0]
        return isinstance(first, Wait) and first.flag in self._signalled(0) & set(self.local_events)

    def _joins_by_itself(self, stream: int) -> bool:
        """Return True if a side stream ends with a signal for which stream 0 waits."""
        last = self._without_resets(stream)[-1]
        return isinstance(last, Signal) and last.flag in self._waited(0) & set(self.local_events)

    def _without_resets(self, stream: int) -> list[Command]:
        """Return the commands of a stream without resets of own flags, which events do not need."""
        commands = [command for index, command in self.commands if self.stream_of[index] == stream]
        waited = self._waited(stream)
        return [command for command in commands if not (isinstance(command, Signal) and command.flag in waited)]

    def _signalled(self, stream: int) -> set[Flag]:
        """Return the flags that a stream signals."""
        return {c.flag for index, c in self.commands if self.stream_of[index] == stream and isinstance(c, Signal)}

    def _waited(self, stream: int) -> set[Flag]:
        """Return the flags for which a stream waits."""
        return {c.flag for index, c in self.commands if self.stream_of[index] == stream and isinstance(c, Wait)}

    def _same_stream(self, flag: Flag) -> bool:
        """Return True if the order of one stream makes the event of ``flag`` unnecessary."""
        touching = {
            self.stream_of.get(index)
            for index, queue in enumerate(self.queues)
            for command in queue.commands
            if isinstance(command, Signal | Wait) and command.flag == flag
        }
        return len(touching) == 1


def _stays(command: Command) -> bool:
    return isinstance(command, Copy) and command.dst.rank == command.src.rank


def _is_small(queue: Queue) -> bool:
    if queue.engine.kind not in (EngineKind.LOCAL, EngineKind.COMPUTE):
        return False
    work = [command for command in queue.commands if not isinstance(command, Signal | Wait | Stamp)]
    if queue.engine.kind is EngineKind.COMPUTE and len(work) == 1:
        behind = queue.commands[queue.commands.index(work[0]) + 1 :]
        if all(isinstance(command, Signal) and command.flag.rank == queue.rank for command in behind):
            return True  # one reduction, at the end or waited for here: there is nothing that it could run beside
    return sum(span.nbytes for command in queue.commands for span in spans(command)) // 2 <= INLINE_BYTES


def _submits(queue: Queue) -> Iterator[bool]:
    for command in queue.commands:
        match command:
            case Copy(src=span) | Reduce(dst=span):
                yield span.nbytes > 0
            case _:
                yield True


def _operand(span: Span) -> Operand:
    return Operand(span.rank, span.buffer, span.offset)

"""The commands of one rank on streams. ``plan`` turns them into calls.

Stream 0 is the caller's (``calls``). Flags by which queues of the rank wait for each other become events of streams.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sidelane.execute.cuda.order import submission_order
from sidelane.program.ir import Command, Copy, EngineKind, Flag, Program, Queue, Reduce, Signal, Stamp, Wait, spans
from sidelane.program.transform import flags_between_own_queues

INLINE_BYTES = 4 << 20
"""Largest number of bytes of a ``local`` or ``compute`` queue that runs on stream 0. Its own stream would cost four
event calls and some ten microseconds, in which a GPU copies about this much inside its own memory."""


class Placed(NamedTuple):
    """A command, its queue, and the stream on which the queue runs."""

    stream: int
    queue: Queue
    command: Command


class RankStreams:
    """The submitted commands of one rank on streams.

    Args:
        program: the program.
        rank: rank whose queues are placed.
        captured: they are for a graph.

    Attributes:
        commands: the commands in the order of submission.
        own_flags: flags that become events, in a fixed order.
        sides: streams besides the caller's.
        asides: side streams of copies and resets that wait for events of stream 0 only, so that they always end.
        join_at: position of the command before which stream 0 joins the asides.
        forking: side streams for which a fork from stream 0 is recorded; others wait for it by themselves.
        joining: side streams that stream 0 joins at the end.
        begin_at: position of the command before which the host is told of the begin; -1: at once.
        end_at: position of the command behind which the host is told of the end; None: where the asides end.
    """

    def __init__(self, program: Program, rank: int, captured: bool) -> None:
        self.program, self.rank, self.captured = program, rank, captured
        queues = program.queues_of(rank)
        stream_of = _assign_streams(queues, captured)
        order = submission_order(program, is_small)[rank]
        self.commands = [
            Placed(stream_of[index], queues[index], queues[index].commands[position])
            for index, position in order
            if index in stream_of
        ]
        self.own_flags = tuple(flags_between_own_queues(program, rank))
        self.sides = sorted(set(stream_of.values()) - {0})
        self._signalled: defaultdict[int, set[Flag]] = defaultdict(set)
        self._waited: defaultdict[int, set[Flag]] = defaultdict(set)
        self._touching: defaultdict[Flag, set[int | None]] = defaultdict(set)
        for index, queue in enumerate(queues):
            stream = stream_of.get(index)
            for command in queue.commands:
                if isinstance(command, Signal | Wait):
                    self._touching[command.flag].add(stream)
                    if stream is not None:
                        by_stream = self._signalled if isinstance(command, Signal) else self._waited
                        by_stream[stream].add(command.flag)
        self.asides, self.join_at = self._order_asides()
        own = set(self.own_flags)
        self.forking = [s for s in self.sides if not self._forks_by_itself(s, own)]
        self.joining = [s for s in self.sides if s not in self.asides and not self._joins_by_itself(s, own)]
        self.begin_at = self._find_begin()
        self.end_at = self._find_end()

    def is_within_stream(self, flag: Flag) -> bool:
        """Return True if the order of one stream makes the event of ``flag`` unnecessary."""
        return len(self._touching[flag]) == 1

    def unhurried(self) -> frozenset[int]:
        """Return the side streams whose copies may take twice their time, since other copies cross links for longer."""
        crossing, within = Counter[int](), Counter[int]()
        for stream, _, command in self.commands:
            if isinstance(command, Copy):
                (within if _stays(command) else crossing)[stream] += command.src.nbytes
        aside = frozenset(stream for stream in self.asides if not crossing[stream])
        longest = max(crossing.values(), default=0)
        return aside if sum(within[stream] for stream in aside) <= longest else frozenset()

    def _find_begin(self) -> int:
        """Return the position behind the signals for which peers wait, and in front of a stamp there.

        It is behind all commands if stream 0 has no others.
        """
        first = [(n, placed.command) for n, placed in enumerate(self.commands) if not placed.stream]
        others = (n for n, (_, c) in enumerate(first) if not isinstance(c, Signal | Stamp) and not _stays(c))
        position = next(others, None)
        while position and isinstance(first[position - 1][1], Stamp):
            position -= 1
        return len(self.commands) if position is None else first[position][0]

    def _find_end(self) -> int | None:
        """Return the position behind all commands; in a graph behind the last wait for a peer, if one stream waits.

        There ``BUSY`` is reset, since no later call can hang. (An epoch means that all work has ended.)
        """
        waits = [
            (position, placed.stream)
            for position, placed in enumerate(self.commands)
            if isinstance(placed.command, Wait) and placed.command.flag not in self.own_flags
        ]
        if not self.captured or not waits or any(stream for _, stream in waits):
            return len(self.commands)
        last = waits[-1][0]
        return None if self.asides and last < self.join_at else last

    def _forks_by_itself(self, stream: int, own: set[Flag]) -> bool:
        """Return True if a side stream begins with a wait for stream 0."""
        first = self._without_resets(stream)[0]
        return isinstance(first, Wait) and first.flag in self._signalled[0] & own

    def _joins_by_itself(self, stream: int, own: set[Flag]) -> bool:
        """Return True if a side stream ends with a signal for which stream 0 waits."""
        last = self._without_resets(stream)[-1]
        return isinstance(last, Signal) and last.flag in self._waited[0] & own

    def _order_asides(self) -> tuple[list[int], int]:
        """Order the copies of ``asides`` behind those of stream 0, and find the position where stream 0 joins them.

        It is after the last signals, while the rank waits for its peers: at 1 KB on four H200s 26 us, instead of
        32 before the signals and 28 after the waits. In a graph it is before the signals, so that signals and waits
        stay one node: 171 us at 64 MiB, instead of 177 or 183. There the copies of stream 0 must come first: 25 us
        instead of 34 at 1 KB, since the driver gives the first captured work the channel of the work before.
        """
        asides = [stream for stream in self.sides if self._only_copies(stream)]
        main = [placed for placed in self.commands if placed.stream not in asides]
        first = [(n, placed.command) for n, placed in enumerate(main) if not placed.stream]
        last_move = max((n for n, c in first if not isinstance(c, Signal | Wait | Stamp)), default=-1)
        while (last_move + 1, Stamp) in [(n, type(c)) for n, c in first]:
            last_move += 1  # the stamp marks the end of the copies, not of the streams that join
        marks = {c.flag for n, c in first if n <= last_move and isinstance(c, Signal)}
        if not all(self._waited[stream] <= marks for stream in asides):
            return [], len(self.commands)
        signals = [n for n, c in first if isinstance(c, Signal) and not self.captured]
        copies = [placed for placed in self.commands if placed.stream in asides]
        self.commands = [*main[: last_move + 1], *copies, *main[last_move + 1 :]]
        return asides, max([last_move, *signals]) + 1 + len(copies)

    def _only_copies(self, stream: int) -> bool:
        """Return True if a stream only copies, waits for events of this rank's queues, and resets these."""
        waited = self._waited[stream]
        return waited <= set(self.own_flags) and all(
            isinstance(command, Copy | Wait | Stamp) or (isinstance(command, Signal) and command.flag in waited)
            for command in self._of(stream)
        )

    def _without_resets(self, stream: int) -> list[Command]:
        """Return the commands of a stream without resets of own flags, which events do not need."""
        waited = self._waited[stream]
        return [c for c in self._of(stream) if not (isinstance(c, Signal) and c.flag in waited)]

    def _of(self, stream: int) -> list[Command]:
        return [placed.command for placed in self.commands if placed.stream == stream]


def is_small(queue: Queue) -> bool:
    """Return True for a queue of this rank's own engines that may run on stream 0."""
    if queue.engine.kind not in (EngineKind.LOCAL, EngineKind.COMPUTE):
        return False
    work = [command for command in queue.commands if not isinstance(command, Signal | Wait | Stamp)]
    if queue.engine.kind is EngineKind.COMPUTE and len(work) == 1:
        behind = queue.commands[queue.commands.index(work[0]) + 1 :]
        if all(isinstance(command, Signal) and command.flag.rank == queue.rank for command in behind):
            return True  # one reduction, at the end or waited for here: there is nothing that it could run beside
    return sum(span.nbytes for command in queue.commands for span in spans(command)) // 2 <= INLINE_BYTES


def _assign_streams(queues: Sequence[Queue], captured: bool) -> dict[int, int]:
    """Assign a stream to the index of each queue with commands to submit."""
    used = [  # callers of a graph record and wait for events themselves
        index
        for index, queue in enumerate(queues)
        if any(_submits(queue)) and not (captured and queue.engine.kind is EngineKind.CALLER)
    ]
    on_first = {*[index for index in used if queues[index].engine.kind is EngineKind.DMA][:1]} or {*used[:1]}
    on_first |= {index for index in used if is_small(queues[index]) and not _follows(queues, index)}
    others = [index for index in used if index not in on_first]
    return dict.fromkeys(on_first, 0) | {index: stream for stream, index in enumerate(others, start=1)}


def _follows(queues: Sequence[Queue], index: int) -> bool:
    """Return True if a queue waits for another one of this rank: on stream 0 it could block that one."""
    waits = {command.flag for command in queues[index].commands if isinstance(command, Wait)}
    return any(
        isinstance(command, Signal) and command.flag in waits
        for other, queue in enumerate(queues)
        for command in queue.commands
        if other != index
    )


def _submits(queue: Queue) -> Iterator[bool]:
    for command in queue.commands:
        match command:
            case Copy(src=span) | Reduce(dst=span):
                yield span.nbytes > 0
            case _:
                yield True


def _stays(command: Command) -> bool:
    return isinstance(command, Copy) and command.dst.rank == command.src.rank

"""Unroll programs over several invocations into events and the orders that the queues and the callers impose.

The model. Between two invocations stands, for each rank, one *user event*: the invocation that ends has joined all
queues of the rank; its caller then reads and overwrites its whole input and output; then the next one starts::

    user(r, 0) -> first command of each queue of r ... last command of each queue -> user(r, 1) -> ...

Ranks are not tied to each other: a fast rank may be invocations ahead of a slow one unless flags hold it. The queues of
a prelaunched program were handed to the engines ahead of the call, so they do not hang behind the caller: only behind
what the same program had given the same queue before. Its ``caller`` queue does, and the end still joins all queues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from sidelane.program.collective import Buffer
from sidelane.program.ir import Command, Engine, EngineKind, Flag, Program, Queue, Signal, SignalOp, Wait


class Event(NamedTuple):
    """One step of a queue in one invocation, or (without a command) the user event of a rank after that invocation.

    A step is a signal, a wait, or a *run*: commands that follow each other without a signal or wait between them.
    Nothing outside of a run can come between two of its commands, so that one event stands for all of them, and the
    order of a program costs what its signals and waits do, however many bytes and tensors it moves.

    Attributes:
        step: index of the (first) command in its queue.
        value: what a ``Signal`` writes or a ``Wait`` compares with in this invocation.
        run: all commands of a run; of a signal or wait, that alone.
    """

    invocation: int
    rank: int
    engine: Engine | None = None
    step: int = 0
    command: Command | None = None
    value: int = 0
    run: tuple[Command, ...] = ()

    def at(self, index: int) -> Event:
        """One command of the run."""
        return self._replace(step=self.step + index, command=self.run[index], run=self.run[index : index + 1])


@dataclasses.dataclass(slots=True)
class FlagUse:
    """Who writes and who awaits one flag, as event numbers in the order of unrolling."""

    flag: Flag
    writes: list[int] = dataclasses.field(default_factory=list)
    waits: list[int] = dataclasses.field(default_factory=list)
    counts: bool = False


@dataclasses.dataclass(slots=True)
class Unrolled:
    """Events of all invocations.

    Attributes:
        programs: ``programs[i - 1]`` runs in invocation i.
        events: numbered; an event that a queue or a caller orders before another has the smaller number.
        predecessors: for each event, those that come right before it in its queue or on its rank.
        flags: every flag in use.
    """

    programs: tuple[Program, ...]
    events: list[Event]
    predecessors: list[list[int]]
    flags: dict[Flag, FlagUse]

    @property
    def world_size(self) -> int:
        return self.programs[0].world_size

    def buffer_bytes(self, rank: int, buffer: Buffer) -> int:
        """The most bytes that any of the programs sees in a buffer."""
        return max(program.buffer_bytes(rank, buffer) for program in self.programs)


def epochs(invocations: int) -> tuple[int, ...]:
    """Epochs to unroll with: they grow by 1 and by 2 in turn, since communicators promise growth, not steps of 1.

    >>> epochs(5)
    (1, 2, 4, 5, 7)
    """
    return tuple(1 + i + i // 2 for i in range(invocations))


def unroll(programs: Sequence[Program]) -> Unrolled:
    """Lay out ``programs``, one an invocation."""
    world_size = programs[0].world_size
    events = [Event(0, rank) for rank in range(world_size)]
    unrolled = Unrolled(tuple(programs), events, [[] for _ in range(world_size)], {})
    users = list(range(world_size))
    steps = {id(program): [_steps(queue) for queue in program.queues] for program in programs}
    last_of_queue: dict[tuple[int, int, Engine], int] = {}
    for invocation, (program, epoch) in enumerate(zip(programs, epochs(len(programs)), strict=True), start=1):
        # A rank ends after its user event of before even if it has no queue, and after every queue of this invocation.
        ends = [[user] for user in users]
        for queue, runs in zip(program.queues, steps[id(program)], strict=True):
            if not runs:
                continue
            key = (id(program), queue.rank, queue.engine)
            if program.prelaunched and queue.engine.kind is not EngineKind.CALLER:
                before = [last_of_queue[key]] if key in last_of_queue else []
            else:
                before = [users[queue.rank]]
            for index, run in runs:
                event = Event(invocation, queue.rank, queue.engine, index, run[0], run=run)
                before = [_add(unrolled, event, epoch, before)]
            last_of_queue[key] = before[0]
            ends[queue.rank].append(before[0])
        for rank in range(world_size):
            users[rank] = len(events)
            events.append(Event(invocation, rank))
            unrolled.predecessors.append(ends[rank])
    return unrolled


def _steps(queue: Queue) -> list[tuple[int, tuple[Command, ...]]]:
    """The signals, waits and runs of a queue, each with the index of its first command."""
    found: list[tuple[int, tuple[Command, ...]]] = []
    commands = queue.commands
    start = 0
    while start < len(commands):
        end = start + 1
        if not isinstance(commands[start], Signal | Wait):
            while end < len(commands) and not isinstance(commands[end], Signal | Wait):
                end += 1
        found.append((start, commands[start:end]))
        start = end
    return found


def _add(unrolled: Unrolled, event: Event, epoch: int, before: list[int]) -> int:
    number = len(unrolled.events)
    command = event.command
    if isinstance(command, Signal | Wait):
        event = event._replace(value=command.value.at(epoch))
        use = unrolled.flags.setdefault(command.flag, FlagUse(command.flag))
        if isinstance(command, Wait):
            use.waits.append(number)
        else:
            use.writes.append(number)
            use.counts |= command.op is SignalOp.ADD
    unrolled.events.append(event)
    unrolled.predecessors.append(before)
    return number

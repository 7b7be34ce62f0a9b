"""Diagnosis of a stalled invocation: the rank and command that are missing, from the flag words of all ranks.

With epochs, a flag word tells whether its signal of this invocation has arrived. So the position of every queue of
every rank is known: its first wait whose signal has not arrived. A rank is at fault if one of its signals is missing
although no earlier wait in its queue is open. Frozen flags are reset after their wait, so that 0 means "not yet" or
"long ago"; there, every rank whose flag is 0 is a suspect. The functions are pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from sidelane.program.ir import Comparison, Flag, Program, Queue, Signal, Wait, describe

FlagWords = Mapping[int, Sequence[int]]
"""Flag words by rank. A rank whose flags could not be read is missing; its waits count as satisfied."""

RELEASE_STEP = 1 << 30
"""Step to add to an epoch to fulfil every wait: half of the largest step that comparisons modulo 2**32 allow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """The cause of a stalled invocation.

    Attributes:
        waiting: description of this rank's open wait; "" if there is none.
        missing: (rank, description of the missing command) for each rank at fault.
    """

    waiting: str
    missing: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.missing)


def find_stall(program: Program, rank: int, epoch: int, words: FlagWords) -> Stall:
    """Find the cause for which ``rank`` waits in invocation ``epoch``.

    Args:
        program: the program.
        rank: rank whose waits are explained.
        epoch: number of the invocation; any for a frozen program.
        words: flag words of the ranks.
    """
    return _Search(program, epoch, words).stall(rank)


def assume_missing(program: Program, epoch: int, ranks: Collection[int]) -> FlagWords:
    """Return the words as if all ranks except ``ranks`` had sent all signals, for flags that cannot be read."""
    words = {rank: [max(epoch - 1, 0)] * program.flag_count for rank in range(program.world_size)}
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, Wait) and command.comparison is Comparison.EQ:
                words[command.flag.rank][command.flag.index] = 0
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, Signal) and queue.rank not in ranks and not _resets(queue, command):
                words[command.flag.rank][command.flag.index] = command.value.at(epoch)
    return words


class _Search:
    def __init__(self, program: Program, epoch: int, words: FlagWords) -> None:
        self.program, self.epoch, self.words = program, epoch, words
        self.senders: dict[Flag, list[tuple[Queue, int]]] = {}
        for queue in program.queues:
            for index, command in enumerate(queue.commands):
                if isinstance(command, Signal) and not _resets(queue, command):
                    self.senders.setdefault(command.flag, []).append((queue, index))
        # Commands that each queue has passed. Queues of a rank may wait for each other in turn: all go on together.
        self._passed = {(queue.rank, queue.engine): 0 for queue in program.queues}
        while any(self._goes_on(queue) for queue in program.queues):
            pass

    def stall(self, rank: int) -> Stall:
        own = [(queue, index) for queue in self.program.queues_of(rank) if (index := self._stop(queue)) is not None]
        waiting = "; ".join(_where(queue, index) for queue, index in own)
        # Follow the waits-for graph from every open wait of this rank; a rank without an open wait is at fault.
        culprits: dict[int, str] = {}
        seen: set[tuple[int, str]] = set()
        todo = [
            (queue, index)
            for queue in self.program.queues_of(rank)
            for index, command in enumerate(queue.commands)
            if isinstance(command, Wait) and not self._satisfied(command)
        ]
        while todo:
            queue, index = todo.pop(0)
            wait = queue.commands[index]
            assert isinstance(wait, Wait)
            senders = self.senders.get(wait.flag, [])
            if not senders and self._stop(queue) == index:
                culprits.setdefault(queue.rank, f"its trigger: {_where(queue, index)}")
            for sender, position in senders:
                stop = self._stop(sender)
                key = (sender.rank, str(sender.engine))
                if stop is None or stop > position:
                    culprits.setdefault(sender.rank, _where(sender, position))
                elif key not in seen:
                    seen.add(key)
                    todo.append((sender, stop))
        if not culprits:  # all ranks wait for each other: name those for which this rank waits
            for queue, index in own:
                for sender, position in self._senders_of(queue, index):
                    culprits.setdefault(sender.rank, _where(sender, position))
        return Stall(waiting, tuple(sorted(culprits.items())))

    def _senders_of(self, queue: Queue, index: int) -> list[tuple[Queue, int]]:
        wait = queue.commands[index]
        return self.senders.get(wait.flag, []) if isinstance(wait, Wait) else []

    def _stop(self, queue: Queue) -> int | None:
        """Return the position of the first wait of ``queue`` that is not satisfied; None if all are."""
        passed = self._passed[queue.rank, queue.engine]
        return passed if passed < len(queue.commands) else None

    def _goes_on(self, queue: Queue) -> bool:
        """Let a queue pass what it can, and return True if that is something."""
        first = self._passed[queue.rank, queue.engine]
        for command in queue.commands[first:]:
            if isinstance(command, Wait) and not self._satisfied(command):
                break
            self._passed[queue.rank, queue.engine] += 1
        return self._passed[queue.rank, queue.engine] > first

    def _satisfied(self, wait: Wait) -> bool:
        senders = self.senders.get(wait.flag, [])
        if senders and all(queue.rank == wait.flag.rank for queue, _ in senders):
            # Between queues of one rank: no word tells (the executor uses an event); it is there once its queue is.
            return all(self._passed[queue.rank, queue.engine] > index for queue, index in senders)
        words = self.words.get(wait.flag.rank)
        if words is None:
            return True
        return wait.comparison.holds(int(words[wait.flag.index]), wait.value.at(self.epoch))


def _resets(queue: Queue, signal: Signal) -> bool:
    return any(isinstance(command, Wait) and command.flag == signal.flag for command in queue.commands)


def _where(queue: Queue, index: int) -> str:
    return f"queue {queue.engine} command {index} ({describe(queue.commands[index])})"

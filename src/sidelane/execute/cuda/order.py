"""In which order a host hands the commands of a rank to its streams, so that streams may share a hardware channel.

CUDA maps streams to a few channels (``CUDA_DEVICE_MAX_CONNECTIONS``: 8, and 1 where Megatron trains), and a channel is
first in, first out: a stream wait that blocks holds everything behind it, of other streams too. If every rank hands
over its commands in the order of one possible execution of the whole program, one channel a rank is enough: whatever a
wait depends on was handed over before it, here and on the peers.
"""

from __future__ import annotations

import itertools

from sidelane.program.ir import Command, Comparison, Copy, Flag, Program, Queue, Signal, SignalOp, Wait

Place = tuple[int, int]
"""A command of one rank: (position of its queue among the queues of the rank, position in the queue)."""


def submission_order(program: Program) -> tuple[tuple[Place, ...], ...]:
    """Order the commands of every rank as in one execution of the whole program.

    A rank stays with a queue for as long as anybody gets on, so that few orders jump between queues (a jump splits a
    batch of signals and waits). Only queues that copy to the same ranks take turns, behind every copy that a peer is
    told of: else one engine would be handed all of its copies before another one gets its first. A program that
    deadlocks, which ``verify`` refuses, keeps its rest queue by queue.

    Returns:
        For each rank, its commands.
    """
    ranks = [_Rank(program.queues_of(rank)) for rank in range(program.world_size)]
    words: dict[Flag, int] = {}
    while True:
        # Sums, not any(): every rank gets its turn.
        while sum(rank.advance(words) for rank in ranks):
            pass
        if not sum(rank.switch(words) for rank in ranks):
            break
    for rank in ranks:
        rank.finish()
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    def __init__(self, queues: tuple[Queue, ...]) -> None:
        self.queues = queues
        self.next = [0] * len(queues)
        self.current = 0
        self.order: list[Place] = []
        self.turns = [_turns(queue) for queue in queues]
        self.reached = [_reached(queue) for queue in queues]

    def advance(self, words: dict[Flag, int]) -> bool:
        """Execute the current queue until it blocks, ends, or it is another one's turn. True if anything happened."""
        moved = False
        index = self.current
        while self.queues and (command := self._head(index)) is not None and not _blocks(command, words):
            if isinstance(command, Signal):
                grown = words.get(command.flag, 0) if command.op is SignalOp.ADD else 0
                words[command.flag] = grown + command.value.at(1)
            self.order.append((index, self.next[index]))
            self.next[index] += 1
            moved = True
            if self.next[index] in self.turns[index] and self.switch(words, self.reached[index]):
                break
        return moved

    def switch(self, words: dict[Flag, int], reached: frozenset[int] | None = None) -> bool:
        """Turn to the next queue, in a circle, whose first command can run. False if there is none.

        Args:
            words: flags.
            reached: ranks that it must copy to; None for any.
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
    """The ranks that it copies to."""
    return frozenset(command.dst.rank for command in queue.commands if isinstance(command, Copy))


def _turns(queue: Queue) -> frozenset[int]:
    """Positions of copies before which others go first: peers have been told of the copy before.

    A wait behind such a signal stays with it, for both are one call.
    """
    copies = [index for index, command in enumerate(queue.commands) if isinstance(command, Copy)]
    return frozenset(
        later
        for earlier, later in itertools.pairwise(copies)
        if any(isinstance(c, Signal) and c.flag.rank != queue.rank for c in queue.commands[earlier:later])
    )


def _blocks(command: Command, words: dict[Flag, int]) -> bool:
    if not isinstance(command, Wait):
        return False
    word, value = words.get(command.flag, 0), command.value.at(1)
    return word != value if command.comparison is Comparison.EQ else word < value

"""The order in which a host submits the commands of every rank: that of one execution of the whole program."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Callable, MutableMapping, Sequence

from sidelane.program.ir import Command, Copy, EngineKind, Flag, Program, Queue, Reduce, Signal, Stamp, Wait

CommandIndex = tuple[int, int]
"""Index of a command of one rank: (position of its queue among the queues of the rank, position in the queue)."""

FlagValues = MutableMapping[Flag, int]
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
    """Return the flags that callers signal (``program.transform``), with values as if all had been fired."""
    signalled = {c.flag for queue in program.queues for c in queue.commands if isinstance(c, Signal)}
    found: dict[Flag, int] = {}
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, Wait) and command.flag not in signalled:
                found[command.flag] = max(found.get(command.flag, 0), command.value.at(1))
    return found


def _round(ranks: Sequence[_Rank], words: dict[Flag, int], step: Callable[[_Rank, FlagValues], bool]) -> bool:
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
        self.pauses = [_pauses(queue) for queue in queues]
        self.signalled = [_signalled(queue) for queue in queues]
        self.reached = [_reached(queue) for queue in queues]

    def advance(self, words: FlagValues) -> bool:
        """Execute the current queue until it blocks, ends, or pauses. Return True if a command was executed."""
        if not self.queues:
            return False
        moved, index = False, self.current
        while (command := self._head(index)) is not None and not _blocks(command, words):
            self._execute(index, command, words)
            moved = True
            if self.next[index] in self.pauses[index]:
                self.switch(words, self.reached[index])
                break
            if self.next[index] in self.signalled[index]:
                self._compute(words)
        return moved

    def _execute(self, index: int, command: Command, words: FlagValues) -> None:
        if isinstance(command, Signal):
            words[command.flag] = command.value.at(1)
        self.order.append((index, self.next[index]))
        self.next[index] += 1

    def _compute(self, words: FlagValues) -> None:
        """Execute the separate reductions whose inputs are ready."""
        for index in self.summing:
            for command in self._until_summed(index, words):
                if _blocks(command, words):
                    break
                self._execute(index, command, words)

    def _until_summed(self, index: int, words: FlagValues) -> Sequence[Command]:
        """Return the next commands of a queue that can run, up to the last reduction among them and its signals."""
        commands = self.queues[index].commands[self.next[index] :]
        found = 0
        for count, command in enumerate(commands, 1):
            if _blocks(command, words):
                break
            if isinstance(command, Reduce) or (found == count - 1 and isinstance(command, Signal)):
                found = count
        return commands[:found]

    def switch(self, words: FlagValues, reached: frozenset[int] | None = None) -> bool:
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


def _pauses(queue: Queue) -> frozenset[int]:
    """Return the positions of copies at which a queue pauses: the copy before was signalled to peers.

    A wait after such a signal stays with it, since both are one call.
    """
    copies = [index for index, command in enumerate(queue.commands) if isinstance(command, Copy)]
    return frozenset(
        later
        for earlier, later in itertools.pairwise(copies)
        if any(isinstance(c, Signal) and c.flag.rank != queue.rank for c in queue.commands[earlier:later])
    )


def _signalled(queue: Queue) -> frozenset[int]:
    """Return the positions of signals to peers that directly follow a copy; stamps between them do not count."""
    commands = [(index, command) for index, command in enumerate(queue.commands) if not isinstance(command, Stamp)]
    return frozenset(
        index
        for (_, before), (index, command) in itertools.pairwise(commands)
        if isinstance(before, Copy) and isinstance(command, Signal) and command.flag.rank != queue.rank
    )


def _blocks(command: Command, words: FlagValues) -> bool:
    if not isinstance(command, Wait):
        return False
    return not command.comparison.holds(words.get(command.flag, 0), command.value.at(1))

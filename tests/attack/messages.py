"""Programs made up at random: messages between the queues of two or three ranks, right or not.

Builders know one handshake. Here a message is one or several writers, a flag that they set, raise or count on, and a
queue that waits; bytes go straight into an output, or through staging. A barrier stands in front or at the end, or is
missing. What they add up to is an all_to_all.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from sidelane.program import ir
from sidelane.program.collective import Buffer, Span, all_to_all

Where = tuple[int, int]
"""Rank, and number of a queue on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    writer: Where
    reader: Where
    flag: int
    nbytes: int


def messages(rng: random.Random) -> ir.Program:
    """Draw a program."""
    return _Drawing(rng).program()


class _Drawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ranks = rng.choice((2, 2, 3))
        self.queues: dict[Where, list[ir.Command]] = {
            (rank, k): [] for rank in range(self.ranks) for k in range(rng.choice((1, 1, 2)))
        }
        self.groups = [self._group(flag) for flag in range(rng.randint(1, 5))]
        sent = [message for group in self.groups for message in group]
        counts = [[0] * self.ranks for _ in range(self.ranks)]
        starts: list[int] = []  # of each message among all from its writer's rank to its reader's
        for message in sent:
            i, j = message.writer[0], message.reader[0]
            starts.append(counts[i][j])
            counts[i][j] += message.nbytes
        self.counts, self.starts = counts, dict(zip(map(id, sent), starts, strict=True))
        self.flags = len(self.groups)
        self.staging = [0] * self.ranks

    def program(self) -> ir.Program:
        entry, end = self.rng.choice(((True, True), (True, False), (True, False), (False, True), (False, False)))
        if entry:
            self._barrier()
        for group in self.groups:
            self._send(group)
        if end:
            self._barrier()
        queues = [
            ir.Queue(rank, ir.Engine(ir.EngineKind.DMA, k), tuple(commands))
            for (rank, k), commands in self.queues.items()
        ]
        return ir.Program(
            all_to_all(self.counts),
            "messages",
            tuple(queue for queue in queues if queue.commands),
            tuple(self.staging),
            self.flags,
        )

    def _group(self, flag: int) -> list[_Message]:
        reader = self.rng.choice(list(self.queues))
        others = [where for where in self.queues if where != reader]
        writers = self.rng.sample(others, self.rng.randint(1, len(others)) if self.rng.random() < 0.5 else 1)
        return [_Message(writer, reader, flag, self.rng.randint(1, 3)) for writer in writers]

    def _send(self, group: Sequence[_Message]) -> None:
        """Put what writers do into their queues, then what the reader does into its own."""
        rng, reader, flag = self.rng, group[0].reader, ir.Flag(group[0].reader[0], group[0].flag)
        signals, waits, resets = self._counted(flag, len(group)) if len(group) > 1 else self._words(flag)
        fetched: list[list[ir.Command]] = []
        for message, signal in zip(group, signals, strict=True):
            source, target = self._spans(message)
            fetched.append([])
            if rng.random() < 0.5:
                held = Span(target.rank, Buffer.STAGING, self.staging[target.rank], target.nbytes)
                self.staging[target.rank] += target.nbytes
                fetched[-1].append(ir.Copy(target, held))
                target = held
            self.queues[message.writer] += [ir.Copy(target, source), signal]
        if rng.random() < 0.2:
            rng.shuffle(fetched)
        if len(waits) == 1:
            fetched = [[command for commands in fetched for command in commands]]
        received = [command for wait, commands in zip(waits, fetched, strict=True) for command in (wait, *commands)]
        other = (reader[0], 1 - reader[1])
        if resets and other in self.queues and rng.random() < 0.25:
            self._reset_elsewhere([message.writer for message in group], reader, received, other, resets)
        else:
            at = len(received) if rng.random() < 0.5 else received.index(waits[-1]) + 1
            self.queues[reader] += [*received[:at], *resets, *received[at:]]

    def _counted(self, flag: ir.Flag, writers: int) -> tuple[list[ir.Signal], list[ir.Wait], list[ir.Signal]]:
        """Writers add to a flag; the reader waits for all of them, or for one after the other, and takes it back."""
        rng = self.rng
        style = rng.random()
        if style < 0.4:
            steps = [rng.choice((1, 1, 2, 3))] * writers
        elif style < 0.6:
            steps = [rng.choice((1, 2, 3, 4)) for _ in range(writers)]
        else:  # each more than those behind it together, so that every sum says whose it is
            steps = [1 << k for k in reversed(range(writers))]
        sums = [sum(steps[: k + 1]) for k in range(writers)]
        if style < 0.6 and rng.random() < 0.7:
            sums = sums[-1:]
        if rng.random() < 0.2:
            sums[-1] -= rng.choice((1, steps[-1], -1))
        compared = rng.choice((ir.Comparison.GE, ir.Comparison.GE, ir.Comparison.EQ))
        signals = [ir.Signal(flag, ir.Value(step), ir.SignalOp.ADD) for step in steps]
        return signals, [ir.Wait(flag, ir.Value(total), compared) for total in sums], self._reset(flag)

    def _words(self, flag: ir.Flag) -> tuple[list[ir.Signal], list[ir.Wait], list[ir.Signal]]:
        """One writer adds to a flag, raises it, or lets it follow the epochs."""
        rng = self.rng
        compared = rng.choice((ir.Comparison.GE, ir.Comparison.GE, ir.Comparison.EQ))
        style = rng.random()
        if style < 0.2:
            return self._counted(flag, 1)
        if style < 0.55:
            up = ir.Value(rng.choice((1, 1, 2, 2**31 - 1)))
            return [ir.Signal(flag, up)], [ir.Wait(flag, up, compared)], self._reset(flag)
        step = rng.choice((1, 1, 2, 5))
        less = rng.randrange(step) if rng.random() < 0.8 else rng.choice((step, -1))
        return [ir.Signal(flag, ir.Value(0, step))], [ir.Wait(flag, ir.Value(-less, step), ir.Comparison.GE)], []

    def _reset(self, flag: ir.Flag) -> list[ir.Signal]:
        return [] if self.rng.random() < 0.05 else [ir.Signal(flag, ir.Value(int(self.rng.random() < 0.04)))]

    def _reset_elsewhere(
        self, writers: Sequence[Where], reader: Where, received: list[ir.Command], other: Where, resets: list[ir.Signal]
    ) -> None:
        """Another queue of the reader's rank resets, told by the reader, or by the writers alone."""
        flags = [self._flag(other[0]) for _ in writers]
        self.queues[reader] += received
        if self.rng.random() < 0.5:
            flags = flags[:1]
            self.queues[reader].append(ir.Signal(flags[0], ir.EPOCH))
        else:
            for writer, flag in zip(writers, flags, strict=True):
                self.queues[writer].append(ir.Signal(flag, ir.EPOCH))
        self.queues[other] += [*(ir.Wait(flag, ir.EPOCH) for flag in flags), *resets]

    def _spans(self, message: _Message) -> tuple[Span, Span]:
        i, j = message.writer[0], message.reader[0]
        start = self.starts[id(message)]
        source = sum(self.counts[i][:j]) + start
        target = sum(row[j] for row in self.counts[:i]) + start
        return Span(i, Buffer.INPUT, source, message.nbytes), Span(j, Buffer.OUTPUT, target, message.nbytes)

    def _barrier(self) -> None:
        """Every rank waits for every other one; its second queue for its first, and sometimes the first for it."""
        ranks = range(self.ranks)
        if all((rank, 1) not in self.queues or not self.queues[rank, 1] for rank in ranks):
            joins = []
        else:
            joins = [rank for rank in ranks if (rank, 1) in self.queues and self.rng.random() < 0.9]
        for rank in joins:  # what the second queue has done comes before the barrier, too
            flag = self._flag(rank)
            self.queues[rank, 1].append(ir.Signal(flag, ir.EPOCH))
            self.queues[rank, 0].append(ir.Wait(flag, ir.EPOCH))
        first = self.flags
        self.flags += self.ranks
        for rank in ranks:
            peers = [peer for peer in ranks if peer != rank]
            self.queues[rank, 0] += [ir.Signal(ir.Flag(peer, first + rank), ir.EPOCH) for peer in peers]
            self.queues[rank, 0] += [ir.Wait(ir.Flag(rank, first + peer), ir.EPOCH) for peer in peers]
        for rank in ranks:
            if (rank, 1) in self.queues and self.rng.random() < 0.95:
                flag = self._flag(rank)
                self.queues[rank, 0].append(ir.Signal(flag, ir.EPOCH))
                self.queues[rank, 1].append(ir.Wait(flag, ir.EPOCH))

    def _flag(self, rank: int) -> ir.Flag:
        self.flags += 1
        return ir.Flag(rank, self.flags - 1)

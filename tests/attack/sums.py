"""Reductions made up at random, right or not: every rank fetches all inputs, then adds them up in some steps.

Builders have one Reduce for each element. Here sums are trees: in the order of the ranks, mostly, grouped in any way,
through staging or in place, other elements in other ways, and now and then of another operation. What gives the bits of
one sum in the order of the ranks is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from sidelane.program.collective import ELEMENT_BYTES, SLOT_ALIGNMENT, Buffer, ReduceOp, Reduction, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Reduce, Signal, Wait

SLOTS = 24
"""Of staging: the inputs of up to four ranks, and partial sums."""


def sums(rng: random.Random) -> Program:
    """Draw a program."""
    return _Drawing(rng).program()


class _Drawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.ranks = rng, rng.choice((2, 3, 3, 4))
        ops, dtypes = (ReduceOp.SUM, ReduceOp.SUM, *ReduceOp), ("bfloat16", "float32", *ELEMENT_BYTES)
        self.reduction = Reduction(rng.choice(ops), rng.choice(dtypes))
        self.elements = rng.choice((1, 3, 6, 8))
        self.nbytes = self.elements * self.reduction.element_bytes
        self.slots = self.ranks  # in use on the rank at hand

    def program(self) -> Program:
        shards = [self.nbytes] + [0] * (self.ranks - 1)
        queues = []
        seed, alike = self.rng.random(), self.rng.random() < 0.8
        for rank in range(self.ranks):
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(self._fetch(rank))))
            self.slots = self.ranks
            given = random.Random(seed) if alike else self.rng
            adding = (Wait(Flag(rank, 2 * self.ranks), EPOCH), *self._added(rank, given))
            queues.append(Queue(rank, Engine(EngineKind.COMPUTE), adding))
        staging = (SLOTS * SLOT_ALIGNMENT,) * self.ranks
        return Program(all_reduce(shards, self.reduction), "sums", tuple(queues), staging, 2 * self.ranks + 1)

    def _fetch(self, rank: int) -> Iterator[Command]:
        """Flags 0 to n - 1 are the entries by each rank, n to 2n - 1 their exits, 2n says that all has been fetched."""
        peers = [peer for peer in range(self.ranks) if peer != rank]
        yield from (Signal(Flag(peer, rank), EPOCH) for peer in peers)
        yield from (Wait(Flag(rank, peer), EPOCH) for peer in peers)
        for source in range(self.ranks):
            yield from self._copies(self._slot(rank, source), Span(source, Buffer.INPUT, 0, self.nbytes))
        yield Signal(Flag(rank, 2 * self.ranks), EPOCH)
        yield from (Signal(Flag(peer, self.ranks + rank), EPOCH) for peer in peers)
        yield from (Wait(Flag(rank, self.ranks + peer), EPOCH) for peer in peers)

    def _copies(self, dst: Span, src: Span) -> Iterator[Command]:
        """A copy, in two parts now and then."""
        cut = self.rng.randrange(src.nbytes) if self.rng.random() < 0.2 else 0
        for start, end in ((0, cut), (cut, src.nbytes)):
            if end > start:
                yield Copy(_part(dst, start, end), _part(src, start, end))

    def _added(self, rank: int, rng: random.Random) -> Iterator[Command]:
        """All elements in one way, or those before a cut in another way than those behind it."""
        size = self.reduction.element_bytes
        cut = rng.randrange(self.elements) * size if rng.random() < 0.3 else 0
        for start, end in ((0, cut), (cut, self.nbytes)):
            if end > start:
                yield from self._tree(rank, rng, start, end)

    def _tree(self, rank: int, rng: random.Random, start: int, end: int) -> Iterator[Command]:
        terms = [_part(self._slot(rank, source), start, end) for source in range(self.ranks)]
        if rng.random() < 0.15:
            rng.shuffle(terms)
        if rng.random() < 0.05:
            terms[rng.randrange(len(terms))] = rng.choice(terms)
        output = Span(rank, Buffer.OUTPUT, start, end - start)
        while len(terms) > 1:
            count = rng.randint(2, len(terms))
            first = 0 if rng.random() < 0.6 else rng.randint(0, len(terms) - count)
            srcs = tuple(terms[first : first + count])
            if count == len(terms) and rng.random() < 0.9:
                yield Reduce(output, srcs, self._step(rng))
                return
            held = rng.choice(srcs) if rng.random() < 0.3 else self._free(rank, start, end)
            yield Reduce(held, srcs, self._step(rng))
            if rng.random() < 0.15:
                moved = self._free(rank, start, end)
                yield Copy(moved, held)
                held = moved
            terms[first : first + count] = [held]
        yield Copy(output, terms[0])

    def _step(self, rng: random.Random) -> Reduction:
        if rng.random() < 0.95:
            return self.reduction
        if rng.random() < 0.5:
            return Reduction(rng.choice(list(ReduceOp)), self.reduction.dtype)
        alike = [name for name, size in ELEMENT_BYTES.items() if size == self.reduction.element_bytes]
        return Reduction(self.reduction.op, rng.choice(alike))

    def _free(self, rank: int, start: int, end: int) -> Span:
        """The same elements of the next slot."""
        self.slots += 1
        return _part(self._slot(rank, self.slots - 1), start, end)

    def _slot(self, rank: int, number: int) -> Span:
        return Span(rank, Buffer.STAGING, number * SLOT_ALIGNMENT, self.nbytes)


def _part(span: Span, start: int, end: int) -> Span:
    return Span(span.rank, span.buffer, span.offset + start, end - start)

"""The reference machine: programs on real bytes, one step of one actor at a time, in the order of a schedule.

A rank is a caller and a queue for each engine that its programs use. The caller fills its whole input and output with
fresh random bytes, finds them as it left them, calls, waits for the queues of its own rank, compares, and goes on to
the next call at once; nothing ties the ranks to each other but flags. A queue runs when its caller has called; one that
was handed over ahead only follows itself. Moves and reductions happen in random pieces with pauses between, so that
what races shows as wrong bytes. A flag is 32 bits that wrap. A run hangs if nobody can step and somebody has not ended.

It knows programs as data (``program.ir``, ``program.collective``, ``program.batch``) and shares nothing else with what
it judges.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Generator, Iterable, Sequence
from heapq import heappop, heappush, heappushpop

from attack import epochs, scheduling
from attack.arithmetic import reduced
from attack.definitions import inputs, outputs, own_place
from attack.epochs import MASK
from attack.machine import ADD, MOVE, REDUCE, SET, WAIT_EQ, WAIT_GE, Failure, Machine, Place, Work
from attack.scheduling import Event
from sidelane.program.collective import Reduction
from sidelane.program.ir import Program

_HALF = 1 << 31

# Plain numbers: comparing members of an enumeration costs the loop a tenth of its time.
BLOCKED, STEPPED, MOVED_PIECE, SIGNALLED, WOKEN, ENDED = map(int, Event)

Step = Generator[int, None, None]
"""What an actor does, an event a step."""


def run(machine: Machine, seed: int, style: str | None = None, trace: list[str] | None = None) -> None:
    """Run programs under one schedule.

    Args:
        machine: the programs, one an invocation.
        seed: of everything that is random.
        style: of the schedule, one of ``scheduling.STYLES``; drawn if None.
        trace: gets a line for each step.

    Raises:
        Failure: the schedule hangs, or bytes are wrong at the end of an invocation.
    """
    _Run(machine, random.Random(seed), style).run(trace)


def failure(programs: Sequence[Program], seeds: Iterable[int], style: str | None = None) -> Failure | None:
    """The first failure that schedules with these seeds show, of programs that run one after the other."""
    try:
        machine = Machine(programs)
        for seed in seeds:
            run(machine, seed, style)
    except Failure as found:
        return found
    return None


class _Run:
    def __init__(self, machine: Machine, rng: random.Random, style: str | None) -> None:
        self.machine, self.rng = machine, rng
        self.memory = [bytearray(rng.randbytes(size)) for size in machine.sizes]
        self.epochs, self.flags = epochs.drawn(machine, rng)
        self.waiting: list[list[int]] = [[] for _ in self.flags]
        self.called = [0] * machine.ranks
        self.unheard: list[list[int]] = [[] for _ in self.called]  # queues that wait for their caller
        self.unfinished = [list(counts) for counts in machine.queues_of]
        self.joining = [-1] * machine.ranks  # the invocation whose end a caller waits for
        self.images: list[list[tuple[bytearray, bytearray, bytearray, bytearray]]] = []
        self.now, self.heap = 0.0, list[tuple[float, int]]()
        self.key = scheduling.STYLES[style or scheduling.drawn(rng)][0](machine.actors, rng, machine.length)
        self.actors = [self._engine(number, work) for number, work in enumerate(machine.work)]
        self.actors += [self._caller(rank) for rank in range(machine.ranks)]

    def run(self, trace: list[str] | None) -> None:
        heap, key, steps = self.heap, self.key, [actor.__next__ for actor in self.actors]
        ended: set[int] = set()
        for number in range(len(steps)):
            self._wake(number)
        now, number = heappop(heap)
        while True:
            self.now = now
            event = steps[number]()
            if trace is not None:
                trace.append(f"{Event(event).name.lower():12} {self._where(number)}")
            if BLOCKED < event < ENDED:
                now, number = heappushpop(heap, (key(number, now, event), number))
                continue
            if event == ENDED:
                ended.add(number)
            if not heap:
                break
            now, number = heappop(heap)
        if len(ended) < len(steps):
            stuck = [self._where(number) for number in range(len(steps)) if number not in ended]
            raise Failure("hang", f"{'; '.join(stuck)} (epochs {self.epochs})")

    def _wake(self, number: int) -> None:
        heappush(self.heap, (self.key(number, self.now, WOKEN), number))

    def _caller(self, rank: int) -> Step:
        """All calls of one rank."""
        given, received = self.memory[3 * rank], self.memory[3 * rank + 1]
        for invocation in range(len(self.epochs)):
            if len(self.images) == invocation:
                self.images.append(self._draw(invocation))
            mine, junk, kept, right = self.images[invocation][rank]
            given[:], received[:] = mine, junk
            yield STEPPED
            if given != mine or received != junk:
                raise Failure("overwritten", f"what rank {rank} has before {self._call(invocation)}")
            self.called[rank] = invocation + 1
            woken, self.unheard[rank] = self.unheard[rank], []
            for queue in woken:
                self._wake(queue)
            yield SIGNALLED
            unfinished = self.unfinished[invocation]
            if unfinished[rank]:
                self.joining[rank] = invocation
                yield BLOCKED
            yield STEPPED
            if given != kept or received != right:
                raise self._wrong(rank, invocation)
            yield STEPPED
        yield ENDED

    def _engine(self, number: int, work: Work) -> Step:
        """One queue in all of its invocations."""
        flags, waiting, wake = self.flags, self.waiting, self._wake
        rank = work.actor.rank
        for invocation in work.invocations:
            index = -1
            while not work.is_ahead and self.called[rank] <= invocation:
                self.unheard[rank].append(number)
                yield BLOCKED
            epoch = self.epochs[invocation]
            for index, op in enumerate(work.ops):  # noqa: B007  (looked at from outside, by ``_where``)
                code = op[0]
                if code <= WAIT_EQ:
                    _, flag, base, slope = op
                    value = (base + slope * epoch) & MASK
                    if code <= ADD:
                        flags[flag] = value if code == SET else (flags[flag] + value) & MASK
                        if waiting[flag]:
                            woken, waiting[flag] = waiting[flag], []
                            for waiter in woken:
                                wake(waiter)
                        yield SIGNALLED
                        continue
                    while ((flags[flag] - value) & MASK >= _HALF) if code == WAIT_GE else flags[flag] != value:
                        waiting[flag].append(number)
                        yield BLOCKED
                elif code == MOVE:
                    yield from self._move(op[1], op[2])
                    continue
                elif code == REDUCE:
                    yield from self._reduce(*op[1:])
                    continue
                yield STEPPED
            self.unfinished[invocation][rank] -= 1
            if not self.unfinished[invocation][rank] and self.joining[rank] == invocation:
                wake(len(self.machine.work) + rank)
            yield STEPPED
        yield ENDED

    def _move(self, moves: Sequence[tuple[int, int, int, int]], nbytes: int) -> Step:
        """Move pieces in random order; some are on their way for a while."""
        memory, pieces = self.memory, self._pieces(nbytes)
        for start, end in pieces:
            held = [memory[src][at + start : at + end] for _, _, src, at in moves]
            for (dst, at, _, _), data in zip(moves, held, strict=True):
                if self.rng.random() < 0.2:
                    yield MOVED_PIECE
                memory[dst][at + start : at + end] = data
            yield MOVED_PIECE

    def _reduce(self, dst: Place, srcs: Sequence[Place], nbytes: int, reduction: Reduction) -> Step:
        """Reduce some elements after the others: read them from each source in turn, then write."""
        memory, size = self.memory, reduction.element_bytes
        for first, last in self._pieces(nbytes // size):
            start, end = first * size, last * size
            operands = []
            for src, at in srcs:
                operands.append(bytes(memory[src][at + start : at + end]))
                yield STEPPED
            memory[dst[0]][dst[1] + start : dst[1] + end] = reduced(reduction, operands)
            yield MOVED_PIECE

    def _pieces(self, count: int) -> Sequence[tuple[int, int]]:
        """One, two or three ranges that make up ``count``, in any order."""
        draw = self.rng.random
        style = draw()
        if count < 2 or style < 0.25:
            return ((0, count),)
        cut = 1 + int(draw() * (count - 1))
        if count == 2 or style < 0.6:
            return ((0, cut), (cut, count))
        if style < 0.8:
            return ((cut, count), (0, cut))
        other = 1 + int(draw() * (count - 1))
        low, high = min(cut, other), max(cut, other)
        return ((low, high), (0, low), (high, count)) if low < high else ((0, low), (low, count))

    def _draw(self, invocation: int) -> list[tuple[bytearray, bytearray, bytearray, bytearray]]:
        """For each rank what its input and output hold when an invocation begins, and when it has ended."""
        rng, sizes = self.rng, self.machine.sizes
        before = [bytearray(rng.randbytes(size) if k % 3 < 2 else b"") for k, size in enumerate(sizes)]
        rights = []
        for part in self.machine.tensors[invocation]:
            given = inputs(part.collective, rng)
            rights.append((part, outputs(part.collective, given)))
            for (buffer, at), data in zip(part.inputs, given, strict=True):
                before[buffer][at : at + len(data)] = data
        after = [bytearray(data) for data in before]
        for part, data_of in rights:
            for rank, ((buffer, at), data) in enumerate(zip(part.outputs, data_of, strict=True)):
                left = before[buffer][at : at + len(data)]
                after[buffer][at : at + len(data)] = data
                if not part.collective.copies_own:
                    own = own_place(part.collective, rank)
                    after[buffer][at + own.start : at + own.stop] = left[own]
        for (to, start), places, nbytes, reduction in self.machine.results[invocation]:
            sources = [bytes(before[src][at : at + nbytes]) for src, at in places]
            after[to][start : start + nbytes] = sources[0] if reduction is None else reduced(reduction, sources)
        return [(before[k], before[k + 1], after[k], after[k + 1]) for k in range(0, len(sizes), 3)]

    def _wrong(self, rank: int, invocation: int) -> Failure:
        _, _, kept, right = self.images[invocation][rank]
        where = f"rank {rank} at the end of {self._call(invocation)}"
        name, number, expected = "output", 3 * rank + 1, right
        if self.memory[number] == right:
            name, number, expected = "input", 3 * rank, kept
        wrong = [k for k, (a, b) in enumerate(zip(self.memory[number], expected, strict=True)) if a != b]
        places = [part.outputs[rank] for part in self.machine.tensors[invocation]]
        places += [to for to, *_ in self.machine.results[invocation]]
        kind = "wrong bytes" if any(buffer == number for buffer, _ in places) else "lost input"
        return Failure(kind, f"{len(wrong)} bytes of the {name}, the first at {wrong[0]}, on {where}")

    def _call(self, invocation: int) -> str:
        return f"invocation {invocation + 1} (epochs {self.epochs})"

    def _where(self, number: int) -> str:
        """Where an actor is; looks into its frame, so that the loop need not keep account."""
        here = inspect.getgeneratorlocals(self.actors[number])
        return self.machine.name(number, here.get("invocation", 0), here.get("index", -1))

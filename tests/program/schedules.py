"""An oracle for ``verify`` that shares no code with it: run a program on real bytes under random schedules.

Every rank has a caller that fills its input with fresh random bytes, poisons its output, calls, waits for its own
queues only, compares, and goes on to the next call. Which queue takes the next step is random, with queues and callers
of very different speeds, and every move takes two steps. A program that is right survives all schedules.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np

from sidelane.program.batch import parts_of
from sidelane.program.collective import Buffer, Collective, Kind, ReduceOp, Span
from sidelane.program.ir import (
    Broadcast,
    Comparison,
    Copy,
    EngineKind,
    Flag,
    Program,
    Queue,
    Reduce,
    Signal,
    SignalOp,
    Stamp,
    Swap,
    Wait,
)

NUMPY = {"int32": np.int32, "int64": np.int64}
REDUCERS = {ReduceOp.SUM: np.add.reduce, ReduceOp.MIN: np.minimum.reduce, ReduceOp.MAX: np.maximum.reduce}


class Failure(Exception):
    """What a schedule brought to light: a hang or wrong bytes."""


def run(programs: tuple[Program, ...], seed: int) -> None:
    """Run one program an invocation under one random schedule.

    Raises:
        Failure: the schedule hangs, or an output is wrong at the end of its invocation.
    """
    _Schedule(programs, random.Random(seed)).run()


def failure(programs: tuple[Program, ...], seeds: range) -> Failure | None:
    """The first failure that the schedules ``seeds`` show."""
    for seed in seeds:
        try:
            run(programs, seed)
        except Failure as error:
            return error
    return None


Step = Iterator[bool]
"""A generator that yields True after each step, False while it waits."""


class _Schedule:
    def __init__(self, programs: tuple[Program, ...], rng: random.Random) -> None:
        self.programs = programs
        self.rng = rng
        self.ranks = range(programs[0].world_size)
        self.memory = {
            (rank, buffer): bytearray(max(program.buffer_bytes(rank, buffer) for program in programs))
            for rank in self.ranks
            for buffer in Buffer
        }
        self.flags: dict[Flag, int] = {}
        self.started = dict.fromkeys(self.ranks, 0)
        self.epochs = [0]
        for _ in programs:
            self.epochs.append(self.epochs[-1] + rng.choice((1, 1, 2)))
        # The bytes of all inputs are chosen beforehand, so that a fast rank's output can be checked at once.
        self.parts = [list(parts_of(program.collective)) for program in programs]
        self.inputs = [
            [[rng.randbytes(part.input_bytes(rank)) for rank in self.ranks] for part, _ in parts]
            for parts in self.parts
        ]
        self.outputs = [
            [outputs(part, data) for (part, _), data in zip(parts, given, strict=True)]
            for parts, given in zip(self.parts, self.inputs, strict=True)
        ]
        self.unfinished: dict[tuple[int, int], int] = {}
        for invocation, program in enumerate(programs, 1):
            for rank in self.ranks:
                self.unfinished[rank, invocation] = len(program.queues_of(rank))

    def run(self) -> None:
        actors = [self._caller(rank) for rank in self.ranks]
        engines: dict[tuple[int, object], list[tuple[int, Queue]]] = {}
        for invocation, program in enumerate(self.programs, 1):
            for queue in program.queues:
                engines.setdefault((queue.rank, queue.engine, id(program)), []).append((invocation, queue))
        actors += [self._engine(work) for work in engines.values()]
        speeds = [10 ** self.rng.uniform(-2, 0) for _ in actors]
        blocked: set[int] = set()
        while actors:
            awake = [k for k in range(len(actors)) if k not in blocked]
            if not awake:
                raise Failure("hang")
            (k,) = self.rng.choices(awake, [speeds[k] for k in awake])
            try:
                if next(actors[k]):
                    blocked.clear()
                else:
                    blocked.add(k)
            except StopIteration:
                del actors[k], speeds[k]
                blocked.clear()

    def _caller(self, rank: int) -> Step:
        for invocation in range(1, len(self.programs) + 1):
            calls = list(
                zip(self.parts[invocation - 1], self.inputs[invocation - 1], self.outputs[invocation - 1], strict=True)
            )
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                memory = self.memory[rank, buffer]
                memory[:] = self.rng.randbytes(len(memory))
            for (part, place), given, _ in calls:
                self._store(place(part.input_span(rank, 0, len(given[rank]))), given[rank])
            yield True
            self.started[rank] = invocation
            yield True
            while self.unfinished[rank, invocation]:
                yield False
            for (part, place), given, right in calls:
                if self._load(place(part.output_span(rank, 0, len(right[rank])))) != right[rank]:
                    raise Failure(f"rank {rank} has wrong bytes after invocation {invocation}")
                kept = place(part.input_span(rank, 0, len(given[rank])))
                if not part.in_place and self._load(kept) != given[rank]:
                    raise Failure(f"rank {rank} lost its input in invocation {invocation}")
            yield True

    def _engine(self, work: list[tuple[int, Queue]]) -> Step:
        for invocation, queue in work:
            ahead = self.programs[invocation - 1].prelaunched and queue.engine.kind is not EngineKind.CALLER
            while not ahead and self.started[queue.rank] < invocation:
                yield False
            for command in queue.commands:
                yield from self._command(command, self.epochs[invocation])
            self.unfinished[queue.rank, invocation] -= 1
            yield True

    def _command(self, command: object, epoch: int) -> Step:
        match command:
            case Signal(flag, value, SignalOp.SET):
                self.flags[flag] = value.at(epoch)
            case Signal(flag, value):
                self.flags[flag] = self.flags.get(flag, 0) + value.at(epoch)
            case Wait(flag, value, comparison):
                while not self._holds(self.flags.get(flag, 0), value.at(epoch), comparison):
                    yield False
            case Copy(dst, src):
                yield from self._move([(dst, src)])
            case Broadcast(dsts, src):
                yield from self._move([(dst, src) for dst in dsts])
            case Swap(a, b):
                yield from self._move([(a, b), (b, a)])
            case Reduce(dst, srcs, reduction):
                arrays = [np.frombuffer(self._load(src), NUMPY[reduction.dtype]) for src in srcs]
                yield True
                self._store(dst, REDUCERS[reduction.op](np.stack(arrays)).astype(arrays[0].dtype).tobytes())
            case Stamp():
                pass
        yield True

    def _move(self, moves: list[tuple[Span, Span]]) -> Step:
        """Move the first halves, pause, move the second halves."""
        for half in (0, 1):
            bounds = [(span.nbytes // 2 * half, span.nbytes // 2 if not half else span.nbytes) for _, span in moves]
            loaded = [self._load(src)[low:high] for (_, src), (low, high) in zip(moves, bounds, strict=True)]
            for (dst, _), (low, _), data in zip(moves, bounds, loaded, strict=True):
                self._store(dataclasses.replace(dst, offset=dst.offset + low, nbytes=len(data)), data)
            yield True

    @staticmethod
    def _holds(value: int, target: int, comparison: Comparison) -> bool:
        return value == target if comparison is Comparison.EQ else value >= target

    def _load(self, span: Span) -> bytes:
        return bytes(self.memory[span.rank, span.buffer][span.offset : span.end])

    def _store(self, span: Span, data: bytes) -> None:
        self.memory[span.rank, span.buffer][span.offset : span.end] = data


def outputs(collective: Collective, inputs: list[bytes]) -> list[bytes]:
    """What every rank must receive, from the definitions that torch.distributed gives."""
    counts = collective.counts
    ranks = range(collective.world_size)
    match collective.kind:
        case Kind.ALL_GATHER:
            return [b"".join(inputs)] * collective.world_size
        case Kind.BROADCAST:
            return [inputs[collective.root]] * collective.world_size
        case Kind.GATHER:
            return [b"".join(inputs) if rank == collective.root else b"" for rank in ranks]
        case Kind.SCATTER:
            root = collective.root
            return [_part(inputs[root], counts[root], rank) for rank in ranks]
        case Kind.ALL_TO_ALL:
            return [b"".join(_part(inputs[src], counts[src], rank) for src in ranks) for rank in ranks]
    reduction = collective.reduction
    stacked = np.stack([np.frombuffer(data, NUMPY[reduction.dtype]) for data in inputs])
    total = REDUCERS[reduction.op](stacked).astype(stacked.dtype).tobytes()
    if collective.kind is Kind.ALL_REDUCE:
        return [total] * collective.world_size
    return [_part(total, counts[0], rank) for rank in ranks]


def _part(data: bytes, sizes: tuple[int, ...], index: int) -> bytes:
    start = sum(sizes[:index])
    return data[start : start + sizes[index]]

"""From programs to what the interpreter runs: queues of plain tuples, flags and buffers by number, done once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from attack.scheduling import Actor
from attack.wellformed import faults
from sidelane.program import ir
from sidelane.program.batch import parts_of
from sidelane.program.collective import Buffer, Collective, Reduction, Span
from sidelane.program.contract import Contract

SET, ADD, WAIT_GE, WAIT_EQ, MOVE, REDUCE, NOTHING = range(7)
"""First of the tuple of a command; then flag, base, slope; or moves of (to, offset, from, offset) and their bytes."""

Op = tuple[Any, ...]
Place = tuple[int, int]
"""Number of a buffer, offset."""

BUFFERS = (Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING)


class Failure(Exception):
    """What a schedule brought to light.

    Attributes:
        kind: ``malformed`` (no schedule was needed), ``hang``, ``wrong bytes`` of an output, ``lost input``, or
            ``overwritten``, which a caller's memory was between two calls.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The queue of one engine of a rank in all invocations of a program.

    Attributes:
        actor: whose it is.
        ops: its commands.
        invocations: in which it runs.
        is_ahead: it was handed over ahead of the call, and does not wait for its caller.
    """

    actor: Actor
    ops: tuple[Op, ...]
    invocations: tuple[int, ...]
    is_ahead: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Tensors:
    """Where a part of a program has its input and output on each rank: (number of a buffer, offset) of each."""

    collective: Collective
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


class Machine:
    """Programs of one communicator, one an invocation.

    Attributes:
        programs: ``programs[k]`` runs in invocation k.
        sizes: of each buffer; that of a rank has number ``3 * rank + BUFFERS.index(buffer)``.
        flags: the number of each flag.
        work: of all engines.
        queues_of: for each invocation and rank, queues to wait for.
        tensors: for each invocation, those of each part.
        results: for each invocation, those of its contract: (to, from, bytes, reduction).
        slopes: of all values, without 0.
        signals: for each flag, (base, slope) of the signals that follow epochs.
        length: about how many steps there are.
        period: invocations from one of a program to its next, at most, and until each has run.

    Raises:
        Failure: a program is malformed.
    """

    def __init__(self, programs: Sequence[ir.Program]) -> None:
        distinct = {id(program): program for program in programs}
        for program in distinct.values():
            for fault in faults(program):
                raise Failure("malformed", fault)
        self.programs = tuple(programs)
        self.ranks = programs[0].world_size
        self.sizes = [
            max(program.buffer_bytes(rank, buffer) for program in distinct.values())
            for rank in range(self.ranks)
            for buffer in BUFFERS
        ]
        self.flags: dict[ir.Flag, int] = {}
        self.signals: dict[int, set[tuple[int, int]]] = {}
        self.slopes: set[int] = set()
        self.work: list[Work] = []
        counts = {key: [len(program.queues_of(r)) for r in range(self.ranks)] for key, program in distinct.items()}
        self.queues_of = [counts[id(program)] for program in programs]
        layouts = {key: _layout(program) for key, program in distinct.items()}
        self.tensors = [layouts[id(program)] for program in programs]
        contracts = {key: _results(program) for key, program in distinct.items()}
        self.results = [contracts[id(program)] for program in programs]
        for key, program in distinct.items():
            invocations = tuple(number for number, other in enumerate(programs) if id(other) == key)
            for queue in program.queues:
                is_ahead = program.prelaunched and queue.engine.kind is not ir.EngineKind.CALLER
                ops = tuple(self._op(command) for command in queue.commands)
                self.work.append(Work(Actor(queue.rank, queue.engine), ops, invocations, is_ahead))
        runs = [[-1, *(k for k, other in enumerate(programs) if id(other) == key)] for key in distinct]
        self.period = max(later - earlier for of_one in runs for earlier, later in pairwise(of_one))
        self.length = sum(len(work.invocations) * sum(map(_steps, work.ops)) for work in self.work)
        self.actors = [*(work.actor for work in self.work), *(Actor(rank) for rank in range(self.ranks))]

    def queue(self, number: int, invocation: int) -> ir.Queue:
        """The queue of actor ``number`` in an invocation."""
        rank, engine = self.actors[number]
        return next(q for q in self.programs[invocation].queues_of(rank) if q.engine == engine)

    def _op(self, command: ir.Command) -> Op:
        match command:
            case ir.Signal(flag, value, op):
                number = self._flag(flag, value.per_epoch)
                if value.per_epoch > 0:
                    self.signals.setdefault(number, set()).add((value.base, value.per_epoch))
                return (ADD if op is ir.SignalOp.ADD else SET, number, value.base, value.per_epoch)
            case ir.Wait(flag, value, comparison):
                code = WAIT_EQ if comparison is ir.Comparison.EQ else WAIT_GE
                return (code, self._flag(flag, value.per_epoch), value.base, value.per_epoch)
            case ir.Copy(dst, src):
                return (MOVE, (_move(dst, src),), src.nbytes)
            case ir.Broadcast(dsts, src):
                return (MOVE, tuple(_move(dst, src) for dst in dsts), src.nbytes)
            case ir.Swap(a, b):
                return (MOVE, (_move(a, b), _move(b, a)), a.nbytes)
            case ir.Reduce(dst, srcs, reduction):
                return (REDUCE, _place(dst), tuple(map(_place, srcs)), dst.nbytes, reduction)
            case ir.Stamp():
                return (NOTHING,)
        raise AssertionError(command)

    def _flag(self, flag: ir.Flag, slope: int) -> int:
        if slope:
            self.slopes.add(slope)
        return self.flags.setdefault(flag, len(self.flags))

    def name(self, number: int, invocation: int, index: int) -> str:
        """Name the command that an actor is at."""
        rank, engine = self.actors[number]
        where = f"invocation {invocation + 1}, rank {rank}"
        if engine is None:
            return f"{where} caller"
        if index < 0:
            return f"{where} {engine} before its first command"
        return f"{where} {engine} command {index} ({ir.describe(self.queue(number, invocation).commands[index])})"


def _place(span: Span) -> tuple[int, int]:
    return 3 * span.rank + BUFFERS.index(span.buffer), span.offset


def _move(dst: Span, src: Span) -> tuple[int, int, int, int]:
    return (*_place(dst), *_place(src))


def _steps(op: Op) -> int:
    return 3 if op[0] in (MOVE, REDUCE) else 1


def _results(program: ir.Program) -> tuple[tuple[Place, tuple[Place, ...], int, Reduction | None], ...]:
    if not isinstance(program.collective, Contract):
        return ()
    return tuple(
        (_place(result.dst), tuple(map(_place, result.srcs)), result.dst.nbytes, result.reduction)
        for result in program.collective.results
    )


def _layout(program: ir.Program) -> tuple[Tensors, ...]:
    if isinstance(program.collective, Contract):
        return ()
    ranks = range(program.world_size)
    return tuple(
        Tensors(
            part,
            tuple(_place(placed(part.input_span(rank, 0, part.input_bytes(rank)))) for rank in ranks),
            tuple(_place(placed(part.output_span(rank, 0, part.output_bytes(rank)))) for rank in ranks),
        )
        for part, placed in parts_of(program.collective)
    )

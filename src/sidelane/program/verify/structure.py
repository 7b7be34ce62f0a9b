"""Rules that each command, queue and flag of a program must keep on its own, whatever runs when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sidelane.program.batch import Batch, Definition
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import (
    MOVES,
    Broadcast,
    Command,
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
    Value,
    Wait,
    spans,
)
from sidelane.program.verify.report import name_command

MAX_FLAG_VALUE = 2**31 - 1
"""Flags are 32-bit words, and hardware compares them by the sign of their difference (cuStreamWaitValue32, GEQ)."""


def check_structure(program: Program) -> list[str]:
    """Return what is wrong with the shape of ``program``, one line for each finding; every other check needs none."""
    violations = list(_program(program))
    if violations:
        return violations
    for queue in program.queues:
        for index, command in enumerate(queue.commands):
            problems = list(_command(program, queue, command))
            if problems:
                name = name_command(queue.rank, queue.engine, index, command)
                violations += [f"{name}: {problem}" for problem in problems]
    violations += _stamps(program)
    violations += _flags(program)
    return violations


def is_reset(queue_rank: int, signal: Signal) -> bool:
    """True for the signal by which the owner of a flag takes it back to 0 after its wait; nobody waits for that one."""
    return signal.flag.rank == queue_rank and signal.op is SignalOp.SET and signal.value == Value(0)


def _program(program: Program) -> Iterator[str]:
    world_size = program.world_size
    if len(program.staging_bytes) != world_size:
        yield f"staging_bytes gives {len(program.staging_bytes)} sizes for {world_size} ranks"
    elif min(program.staging_bytes) < 0:
        yield f"staging_bytes has a negative size ({program.staging_bytes})"
    if program.flag_count < 0:
        yield f"flag_count is negative ({program.flag_count})"
    for queue in program.queues:
        if not 0 <= queue.rank < world_size:
            yield f"rank {queue.rank} {queue.engine}: a queue on a rank outside of 0..{world_size - 1}"
    for (rank, engine), count in Counter((queue.rank, queue.engine) for queue in program.queues).items():
        if count > 1:
            yield f"rank {rank} {engine}: {count} queues on one engine; an engine runs one queue"


def _command(program: Program, queue: Queue, command: Command) -> Iterator[str]:
    yield from dict.fromkeys(problem for span in spans(command) for problem in _span(program, queue, span))
    match command:
        case Copy(dst, src):
            yield from _same_size((dst, src))
            yield from _disjoint((dst, src))
        case Swap(a, b):
            yield from _same_size((a, b))
            yield from _disjoint((a, b))
        case Broadcast(dsts, src):
            yield from _same_size((*dsts, src))
            yield from _disjoint((*dsts, src))
        case Reduce():
            yield from _reduce(command)
            if queue.engine.kind is not EngineKind.COMPUTE:
                yield "only compute engines reduce; copy engines cannot add"
        case Signal(flag, value, op):
            yield from _flag(program, flag)
            yield from _value(value, least=1 if op is SignalOp.ADD else 0)
        case Wait(flag, value):
            yield from _flag(program, flag)
            yield from _value(value, least=0)
            if flag.rank != queue.rank:
                yield f"waits for a flag of rank {flag.rank}; a queue waits only for flags of its own rank"
        case Stamp(slot):
            if slot < 0:
                yield "the slot is negative"
    if isinstance(command, MOVES) and queue.engine.kind is EngineKind.CALLER:
        yield "the caller engine only signals and waits; it moves no bytes"


def _span(program: Program, queue: Queue, span: Span) -> Iterator[str]:
    if not 0 <= span.rank < program.world_size:
        yield f"{span} names a rank outside of 0..{program.world_size - 1}"
        return
    size = program.buffer_bytes(span.rank, span.buffer)
    if span.nbytes <= 0:
        yield f"{span} has {span.nbytes} bytes; commands move at least one"
    elif span.offset < 0 or span.end > size:
        yield f"{span} is out of bounds: {span.buffer}@{span.rank} has {size} bytes"
    elif span.buffer is not Buffer.STAGING and not _in_one_piece(program.collective, span):
        yield f"{span} is out of bounds: it does not lie within one piece of {program.collective}"
    if queue.engine.kind is EngineKind.LOCAL and span.rank != queue.rank:
        yield f"{span} is on another rank; a local engine moves bytes that stay on rank {queue.rank}"


def _in_one_piece(definition: Definition, span: Span) -> bool:
    return not isinstance(definition, Batch) or definition.holds(span)


def _same_size(operands: tuple[Span, ...]) -> Iterator[str]:
    if len({span.nbytes for span in operands}) > 1:
        yield f"operands differ in size ({', '.join(str(span.nbytes) for span in operands)} bytes)"


def _disjoint(operands: tuple[Span, ...]) -> Iterator[str]:
    for k, first in enumerate(operands):
        for second in operands[k + 1 :]:
            if _overlap(first, second):
                yield f"operands {first} and {second} overlap"


def _overlap(a: Span, b: Span) -> bool:
    return (a.rank, a.buffer) == (b.rank, b.buffer) and a.offset < b.end and b.offset < a.end


def _reduce(command: Reduce) -> Iterator[str]:
    element = command.reduction.element_bytes
    if not command.srcs:
        yield "a reduce needs at least one source"
    yield from _same_size((command.dst, *command.srcs))
    for span in dict.fromkeys(spans(command)):
        if span.nbytes % element or span.offset % element:
            yield f"{span} does not hold whole {command.reduction.dtype} elements of {element} bytes"
    for src in command.srcs:
        if src != command.dst and _overlap(src, command.dst):
            yield f"operands {command.dst} and {src} overlap; the destination may only be exactly one of the sources"


def _flag(program: Program, flag: Flag) -> Iterator[str]:
    if not 0 <= flag.rank < program.world_size:
        yield f"flag {flag.index} of rank {flag.rank}: the rank is outside of 0..{program.world_size - 1}"
    if not 0 <= flag.index < program.flag_count:
        yield f"flag {flag.index} of rank {flag.rank} is out of range: there are {program.flag_count} flags a rank"


def _value(value: Value, least: int) -> Iterator[str]:
    # Growing with the epoch is fine: hardware compares differences, so that counting on past 2**31 keeps its order.
    if value.per_epoch < 0 or not least <= value.at(1) <= MAX_FLAG_VALUE:
        yield f"the value {value} does not fit (allowed={least}..{MAX_FLAG_VALUE} in the first epoch, never shrinking)"


def _stamps(program: Program) -> Iterator[str]:
    slots: dict[tuple[int, int], str] = {}
    for queue in program.queues:
        for index, command in enumerate(queue.commands):
            if isinstance(command, Stamp):
                name = name_command(queue.rank, queue.engine, index, command)
                first = slots.setdefault((queue.rank, command.slot), name)
                if first != name:
                    yield f"{name}: {first} writes the same slot"


def _flags(program: Program) -> Iterator[str]:
    """Keep counters apart from plain flags: a counter is added to by anyone and set only to 0, by its owner."""
    added: set[Flag] = set()
    assigned: dict[Flag, str] = {}
    for queue in program.queues:
        for index, command in enumerate(queue.commands):
            if not isinstance(command, Signal):
                continue
            if command.op is SignalOp.ADD:
                added.add(command.flag)
            elif not is_reset(queue.rank, command):
                assigned[command.flag] = name_command(queue.rank, queue.engine, index, command)
    for flag in sorted(added & assigned.keys(), key=lambda flag: (flag.rank, flag.index)):
        yield f"{assigned[flag]}: other signals add to this flag; a counter is only ever reset to 0, by its own rank"

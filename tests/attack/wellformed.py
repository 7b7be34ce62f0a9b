"""What no machine runs at all: a program with one of these faults needs no schedule to be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sidelane.program import ir
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Span


def faults(program: ir.Program) -> Iterator[str]:
    """Say what an executor could not do."""
    ranks = range(program.world_size)
    if len(program.staging_bytes) != len(ranks) or min(program.staging_bytes) < 0:
        yield f"staging_bytes {program.staging_bytes}"
        return
    for (rank, engine), count in Counter((queue.rank, queue.engine) for queue in program.queues).items():
        if count > 1 or rank not in ranks:
            yield f"{count} queues on rank {rank} {engine}"
    for queue in program.queues:
        for index, command in enumerate(queue.commands):
            for fault in _faults(program, queue, command):
                yield f"rank {queue.rank} {queue.engine} command {index} ({_words(command)}): {fault}"
    for slot, count in Counter(
        (queue.rank, c.slot) for queue in program.queues for c in queue.commands if isinstance(c, ir.Stamp)
    ).items():
        if count > 1:
            yield f"{count} stamps of rank {slot[0]} in slot {slot[1]}"


def _faults(program: ir.Program, queue: ir.Queue, command: ir.Command) -> Iterator[str]:
    kind = queue.engine.kind
    for span in ir.spans(command):
        if fault := _outside(program, span):
            yield f"{span} {fault}"
        if kind is ir.EngineKind.LOCAL and span.rank != queue.rank:
            yield f"a local engine touches rank {span.rank}"
    if kind is ir.EngineKind.CALLER and not isinstance(command, ir.Signal | ir.Wait | ir.Stamp):
        yield "a caller moves no bytes"
    match command:
        case ir.Copy(dst, src):
            yield from _operands(dst, src)
        case ir.Swap(a, b):
            yield from _operands(a, b)
        case ir.Broadcast(dsts, src):
            if len(dsts) != 2:
                yield f"{len(dsts)} destinations; the command of an engine has two"
            yield from _operands(*dsts, src)
        case ir.Reduce(dst, srcs, reduction):
            if kind is not ir.EngineKind.COMPUTE:
                yield "only compute engines reduce"
            if len(srcs) < 2:
                yield f"{len(srcs)} sources"
            if any(size % reduction.element_bytes for span in (dst, *srcs) for size in (span.offset, span.nbytes)):
                yield f"parts of {reduction.dtype} elements"
            for src in srcs:
                if src.nbytes != dst.nbytes or (src != dst and _overlap(src, dst)):
                    yield f"source {src} does not fit {dst}"
        case ir.Signal(flag):
            yield from _flag(program, flag)
        case ir.Wait(flag):
            yield from _flag(program, flag)
            if flag.rank != queue.rank:
                yield "waits for a flag of another rank"


def _outside(program: ir.Program, span: Span) -> str | None:
    """Why a span is not memory of the program."""
    if span.rank not in range(program.world_size):
        return "is of no rank"
    if span.nbytes < 1:
        return "has no bytes"
    if span.buffer is Buffer.STAGING or not isinstance(program.collective, Batch):
        pieces = [(0, program.buffer_bytes(span.rank, span.buffer))]
    else:  # every tensor lies somewhere else
        starts = program.collective.starts(span.rank, span.buffer)
        sizes = [part.buffer_bytes(span.rank, span.buffer) for part in program.collective.parts]
        pieces = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    if not any(start <= span.offset and span.offset + span.nbytes <= end for start, end in pieces):
        return "is out of bounds"
    return None


def _operands(*operands: Span) -> Iterator[str]:
    if len({span.nbytes for span in operands}) > 1:
        yield "operands of different sizes"
    for k, first in enumerate(operands):
        for second in operands[:k]:
            if _overlap(first, second):
                yield f"{first} overlaps {second}"


def _overlap(a: Span, b: Span) -> bool:
    alike = (a.rank, a.buffer) == (b.rank, b.buffer)
    return alike and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _flag(program: ir.Program, flag: ir.Flag) -> Iterator[str]:
    if flag.rank not in range(program.world_size) or flag.index not in range(program.flag_count):
        yield "there is no such flag"


def _words(command: ir.Command) -> str:
    # ``describe`` writes two destinations.
    return repr(command) if isinstance(command, ir.Broadcast) else ir.describe(command)

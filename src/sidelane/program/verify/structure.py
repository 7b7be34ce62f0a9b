"""Rules that each command and queue of a program must keep on its own, whatever runs when."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from sidelane.program import ir
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Span
from sidelane.program.contract import Contract
from sidelane.program.verify.layout import MAX_FLAGS, name_command


def check_structure(program: ir.Program) -> list[str]:
    """Return the errors in the shape of ``program``, one line each; all other checks require that there is none."""
    violations = list(_program(program))
    if violations:
        return violations
    sizes = Sizes(program)
    for queue in program.queues:
        for index, command in enumerate(queue.commands):
            if _is_plainly_right(program, sizes, queue, command):
                continue
            problems = [*_command(program, sizes, queue, command), *_computed(program, queue, index)]
            if problems:
                name = name_command(queue.rank, queue.engine, index, command)
                violations += [f"{name}: {problem}" for problem in problems]
    violations += _stamps(program)
    return violations


class Sizes:
    """Sizes in bytes of the buffers of a program, each computed once."""

    def __init__(self, program: ir.Program) -> None:
        self._program = program
        self._found: dict[str, dict[int, int]] = collections.defaultdict(dict)

    def of(self, rank: int, buffer: str) -> int:
        """Return the size in bytes of a buffer of an existing rank."""
        found = self._found[buffer]
        size = found.get(rank)
        if size is None:
            size = found[rank] = self._program.buffer_bytes(rank, buffer)
        return size


def _program(program: ir.Program) -> Iterator[str]:
    world_size = program.world_size
    if len(program.staging_bytes) != world_size:
        yield f"staging_bytes gives {len(program.staging_bytes)} sizes for {world_size} ranks"
    elif min(program.staging_bytes) < 0:
        yield f"staging_bytes has a negative size ({program.staging_bytes})"
    if program.flag_count < 0:
        yield f"flag_count is negative ({program.flag_count})"
    elif program.flag_count > MAX_FLAGS:
        yield f"flag_count is {program.flag_count} (allowed=..{MAX_FLAGS})"
    for queue in program.queues:
        if not 0 <= queue.rank < world_size:
            yield f"rank {queue.rank} {queue.engine}: a queue on a rank outside of 0..{world_size - 1}"
    for (rank, engine), count in collections.Counter((queue.rank, queue.engine) for queue in program.queues).items():
        if count > 1:
            yield f"rank {rank} {engine}: {count} queues on one engine; an engine runs one queue"


def _is_plainly_right(program: ir.Program, sizes: Sizes, queue: ir.Queue, command: ir.Command) -> bool:
    """Return True for most commands that keep the rules: a fast path, as programs of large groups have millions."""
    match command:
        case ir.Signal(flag) | ir.Wait(flag):
            if isinstance(command, ir.Wait) and flag.rank != queue.rank:
                return False
            return 0 <= flag.rank < program.world_size and 0 <= flag.index < program.flag_count
        case ir.Copy(dst, src):
            if dst.nbytes != src.nbytes or dst.nbytes <= 0 or queue.engine.kind is not ir.EngineKind.DMA:
                return False
            if isinstance(program.collective, Batch) or (dst.rank == src.rank and dst.buffer == src.buffer):
                return False
            if isinstance(program.collective, Contract) and program.collective.computed + program.collective.used:
                return False  # its callers move
            for span in (dst, src):
                if not 0 <= span.rank < program.world_size or span.offset < 0:
                    return False
                if span.offset + span.nbytes > sizes.of(span.rank, span.buffer):
                    return False
            return True
    return False


def _command(program: ir.Program, sizes: Sizes, queue: ir.Queue, command: ir.Command) -> Iterator[str]:
    yield from dict.fromkeys(problem for span in ir.spans(command) for problem in _span(program, sizes, queue, span))
    match command:
        case ir.Copy(dst, src):
            yield from _same_size((dst, src))
            yield from _disjoint((dst, src))
        case ir.Swap(a, b):
            yield from _same_size((a, b))
            yield from _disjoint((a, b))
        case ir.Broadcast(dsts, src):
            if len(dsts) != 2:
                yield f"a broadcast has two destinations (value={len(dsts)})"
            yield from _same_size((*dsts, src))
            yield from _disjoint((*dsts, src))
        case ir.Reduce():
            yield from _reduce(command)
            adds = program.engines_add and queue.engine.kind is ir.EngineKind.DMA
            if queue.engine.kind is not ir.EngineKind.COMPUTE and not adds:
                yield "only compute engines reduce; copy engines cannot add"
        case ir.Signal(flag):
            yield from _flag(program, flag)
        case ir.Wait(flag):
            yield from _flag(program, flag)
            if flag.rank != queue.rank:
                yield f"waits for a flag of rank {flag.rank}; a queue waits only for flags of its own rank"
        case ir.Stamp(slot):
            if slot < 0:
                yield "the slot is negative"


def _computed(program: ir.Program, queue: ir.Queue, index: int) -> Iterator[str]:
    """Check a command of a caller: a trigger computes (a copy from a ``computed`` buffer stands for that) and then
    signals; an arrival waits and then reads (a copy to a ``used`` buffer stands for that).
    """
    command = queue.commands[index]
    contract = program.collective
    computed, used = (contract.computed, contract.used) if isinstance(contract, Contract) else ((), ())
    touched = [span for span in ir.spans(command) if span.buffer in computed + used]
    if queue.engine.kind is not ir.EngineKind.CALLER:
        if touched:
            what = "compute: only caller engines copy from" if touched[0].buffer in computed else "use: they copy to"
            yield f"{touched[0]} is what callers {what} it"
        return
    if not isinstance(command, ir.MOVES):
        return
    computes = isinstance(command, ir.Copy) and command.src.buffer in computed
    reads = isinstance(command, ir.Copy) and command.dst.buffer in used
    if computes == reads or len(touched) != 1 or any(span.rank != queue.rank for span in ir.spans(command)):
        yield "the caller engine only signals and waits, and copies what its own rank computes, or uses"
    elif computes and any(isinstance(before, ir.Signal) for before in queue.commands[:index]):
        yield "a caller engine computes in front of its signals, which say that it has"
    elif reads and any(isinstance(behind, ir.Wait) for behind in queue.commands[index:]):
        yield "a caller engine reads behind its waits, which say that it may"


def _span(program: ir.Program, sizes: Sizes, queue: ir.Queue, span: Span) -> Iterator[str]:
    if not 0 <= span.rank < program.world_size:
        yield f"{span} names a rank outside of 0..{program.world_size - 1}"
        return
    size = sizes.of(span.rank, span.buffer)
    if span.nbytes <= 0:
        yield f"{span} has {span.nbytes} bytes; commands move at least one"
    elif span.offset < 0 or span.end > size:
        yield f"{span} is out of bounds: {span.buffer}@{span.rank} has {size} bytes"
    elif span.buffer != Buffer.STAGING and isinstance(program.collective, Batch) and not program.collective.holds(span):
        yield f"{span} is out of bounds: it does not lie within one piece of {program.collective}"
    if queue.engine.kind is ir.EngineKind.LOCAL and span.rank != queue.rank:
        yield f"{span} is on another rank; a local engine moves bytes that stay on rank {queue.rank}"


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


def _reduce(command: ir.Reduce) -> Iterator[str]:
    element = command.reduction.element_bytes
    if len(command.srcs) < 2:
        yield f"a reduce has two sources or more (value={len(command.srcs)}); a copy moves one"
    yield from _same_size((command.dst, *command.srcs))
    for span in dict.fromkeys(ir.spans(command)):
        if span.nbytes % element or span.offset % element:
            yield f"{span} does not hold whole {command.reduction.dtype} elements of {element} bytes"
    for src in command.srcs:
        if src != command.dst and _overlap(src, command.dst):
            yield f"operands {command.dst} and {src} overlap; the destination may only be exactly one of the sources"


def _flag(program: ir.Program, flag: ir.Flag) -> Iterator[str]:
    if not 0 <= flag.rank < program.world_size:
        yield f"flag {flag.index} of rank {flag.rank}: the rank is outside of 0..{program.world_size - 1}"
    if not 0 <= flag.index < program.flag_count:
        yield f"flag {flag.index} of rank {flag.rank} is out of range: there are {program.flag_count} flags a rank"


def _stamps(program: ir.Program) -> Iterator[str]:
    slots: dict[tuple[int, int], str] = {}
    for queue in program.queues:
        for index, command in enumerate(queue.commands):
            if isinstance(command, ir.Stamp):
                name = name_command(queue.rank, queue.engine, index, command)
                first = slots.setdefault((queue.rank, command.slot), name)
                if first != name:
                    yield f"{name}: {first} writes the same slot"

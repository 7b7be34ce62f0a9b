"""Programs: frozen data that say which engine of which rank executes which commands in which order.

Programs hold no pointer, stream or device. Operands are spans of symbolic buffers; flags are numbered words in
the memory of a rank. Queues run concurrently; only flags order them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import StrEnum

from sidelane.fields import an, at_least, one_of, plain_text, put, several, switch, validate, whole
from sidelane.program.batch import Batch, Definition
from sidelane.program.collective import Buffer, Collective, Reduction, Span
from sidelane.program.contract import Contract
from sidelane.program.wraparound import WORD_MASK, reached


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Flag:
    """Word ``index`` in the flag memory of ``rank``. It starts at 0 and is 32 bits wide."""

    rank: int
    index: int

    def __init__(self, rank: int, index: int) -> None:
        put(self, "rank", rank)
        put(self, "index", index)
        if not type(rank) is type(index) is int:
            validate(self, rank=whole, index=whole)


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A flag value that may follow the invocation: ``base + per_epoch * epoch``, with epochs counted from 1."""

    base: int
    per_epoch: int = 0

    def __post_init__(self) -> None:
        if not type(self.base) is type(self.per_epoch) is int:
            validate(self, base=whole, per_epoch=whole)

    def at(self, epoch: int) -> int:
        """Return the number that the flag holds or is compared with in invocation ``epoch``."""
        return self.base + self.per_epoch * epoch

    def __str__(self) -> str:
        if not self.per_epoch:
            return str(self.base)
        factor = "epoch" if self.per_epoch == 1 else f"{self.per_epoch}*epoch"
        return f"{factor}+{self.base}" if self.base else factor


EPOCH = Value(base=0, per_epoch=1)

RENEWAL_CALLS = 2**26
"""Calls of a communicator after which it renews its flags, so that none holds an older value: flags are 32-bit words,
and compared values must be less than half of their circle apart. Five minutes of calls of 5 us."""


class SignalOp(StrEnum):
    """Effect of a signal on its flag."""

    SET = "set"
    ADD = "add"


class Comparison(StrEnum):
    """Condition of a wait: the flag equals the value, or is at least the value."""

    EQ = "=="
    GE = ">="

    def holds(self, word: int, value: int) -> bool:
        """Return True if a wait for ``value`` ends while the flag's word is ``word``, as the hardware compares."""
        return word == value & WORD_MASK if self is Comparison.EQ else reached(word, value)


_SPAN, _SPANS, _ONLY_SPANS = an(Span), several(an(Span), Span), frozenset({Span})
_FLAG, _VALUE, _REDUCTION = an(Flag), an(Value), an(Reduction)
_OP, _COMPARISON = one_of(SignalOp), one_of(Comparison)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Copy:
    """Copy ``src`` to ``dst`` (same number of bytes, not overlapping)."""

    dst: Span
    src: Span

    def __init__(self, dst: Span, src: Span) -> None:
        put(self, "dst", dst)
        put(self, "src", src)
        if not type(dst) is type(src) is Span:
            validate(self, dst=_SPAN, src=_SPAN)


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast:
    """Read ``src`` once and write it to two destinations (DMA collectives paper, section 4.1.1)."""

    dsts: tuple[Span, Span]
    src: Span

    def __post_init__(self) -> None:
        validate(self, dsts=_SPANS, src=_SPAN)


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """Exchange the bytes of ``a`` and ``b`` in place (DMA collectives paper, section 4.1.1)."""

    a: Span
    b: Span

    def __post_init__(self) -> None:
        if not type(self.a) is type(self.b) is Span:
            validate(self, a=_SPAN, b=_SPAN)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """Combine ``srcs`` element by element, in their order, into ``dst``. ``dst`` may be one of ``srcs``.

    Runs on compute units: DMA engines cannot add, but for those of programs whose ``engines_add`` says so.
    """

    dst: Span
    srcs: tuple[Span, ...]
    reduction: Reduction

    def __post_init__(self) -> None:
        plain = type(self.dst) is Span and type(self.reduction) is Reduction and type(self.srcs) is tuple
        if not (plain and _ONLY_SPANS.issuperset(map(type, self.srcs))):
            validate(self, dst=_SPAN, srcs=_SPANS, reduction=_REDUCTION)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Signal:
    """Change ``flag`` once every earlier command of the queue has finished and its bytes can be seen by all ranks."""

    flag: Flag
    value: Value
    op: SignalOp = SignalOp.SET

    def __init__(self, flag: Flag, value: Value, op: SignalOp = SignalOp.SET) -> None:
        put(self, "flag", flag)
        put(self, "value", value)
        put(self, "op", op)
        if not (type(flag) is Flag and type(value) is Value and type(op) is SignalOp):
            validate(self, flag=_FLAG, value=_VALUE, op=_OP)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Wait:
    """Hold the queue until ``flag`` (in the memory of the queue's own rank) fulfils the comparison with ``value``."""

    flag: Flag
    value: Value
    comparison: Comparison = Comparison.GE

    def __init__(self, flag: Flag, value: Value, comparison: Comparison = Comparison.GE) -> None:
        put(self, "flag", flag)
        put(self, "value", value)
        put(self, "comparison", comparison)
        if not (type(flag) is Flag and type(value) is Value and type(comparison) is Comparison):
            validate(self, flag=_FLAG, value=_VALUE, comparison=_COMPARISON)


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """Store the time at which every earlier command of the queue has finished in ``slot`` of the queue's rank."""

    slot: int

    def __post_init__(self) -> None:
        validate(self, slot=whole)


Command = Copy | Broadcast | Swap | Reduce | Signal | Wait | Stamp
Move = Copy | Broadcast | Swap
MOVES = (Copy, Broadcast, Swap)
_COMMAND_KINDS = frozenset({Copy, Broadcast, Swap, Reduce, Signal, Wait, Stamp})
_COMMANDS = several(an(*_COMMAND_KINDS), *_COMMAND_KINDS)


class EngineKind(StrEnum):
    """Kind of executor of a queue.

    ``dma``: a copy engine with access to the peers. ``local``: a copy engine used for bytes that stay on their rank.
    ``compute``: compute units. ``caller``: the caller of the collective, in the order of its own work (it fires the
    trigger of a prelaunched program).
    """

    DMA = "dma"
    LOCAL = "local"
    COMPUTE = "compute"
    CALLER = "caller"


_ENGINE_KIND, _NUMBER = one_of(EngineKind), at_least(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """Engine ``index`` of a kind."""

    kind: EngineKind
    index: int = 0

    def __post_init__(self) -> None:
        if not (type(self.kind) is EngineKind and type(self.index) is int and self.index >= 0):
            validate(self, kind=_ENGINE_KIND, index=_NUMBER)

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


_ENGINE = an(Engine)


@dataclasses.dataclass(frozen=True, slots=True)
class Queue:
    """The ordered commands of one engine of one rank."""

    rank: int
    engine: Engine
    commands: tuple[Command, ...]

    def __post_init__(self) -> None:
        plain = type(self.rank) is int and type(self.engine) is Engine and type(self.commands) is tuple
        if not (plain and _COMMAND_KINDS.issuperset(map(type, self.commands))):
            validate(self, rank=whole, engine=_ENGINE, commands=_COMMANDS)


_DEFINITION = an(Collective, Batch, Contract)
_QUEUES, _SIZES = several(an(Queue), Queue), several(whole, int)


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """A collective, or several at once, as commands on engines.

    Attributes:
        collective: specification of the program, collectives or a contract; ``verify`` proves it.
        variant: name of the algorithm, with the transforms applied (``pcpy``, ``b2b+prelaunch``).
        queues: at most one queue for each (rank, engine).
        staging_bytes: size of each rank's staging buffer.
        flag_count: flags in the memory of each rank.
        prelaunched: queues start before the collective is called; triggers fired by the ``caller`` queue hold them.
        alone: the caller has named no computation that runs next to it. Copies that stay on a rank may then take as
            long as the links do, if that keeps the links at their speed.
        engines_add: copy engines may reduce, which no GPU's can (ConCCL paper, VII-A2). Such a program runs between CPU
            ranks and in the simulator only.
    """

    collective: Definition
    variant: str
    queues: tuple[Queue, ...]
    staging_bytes: tuple[int, ...]
    flag_count: int
    prelaunched: bool = False
    alone: bool = False
    engines_add: bool = False

    def __post_init__(self) -> None:
        validate(
            self, collective=_DEFINITION, variant=plain_text, queues=_QUEUES, staging_bytes=_SIZES, flag_count=whole
        )
        validate(self, prelaunched=switch, alone=switch, engines_add=switch)

    @property
    def world_size(self) -> int:
        return self.collective.world_size

    def buffer_bytes(self, rank: int, buffer: str) -> int:
        """Return the size in bytes of ``buffer`` on ``rank`` (0 if the program has no such buffer)."""
        if buffer == Buffer.STAGING:
            return self.staging_bytes[rank]
        return self.collective.buffer_bytes(rank, buffer)

    def queues_of(self, rank: int) -> tuple[Queue, ...]:
        return tuple(queue for queue in self.queues if queue.rank == rank)

    def remote_buffers(self) -> frozenset[str]:
        """Return the buffers that engines of another rank read or write: these must be in symmetric memory."""
        return frozenset(
            span.buffer
            for queue in self.queues
            for command in queue.commands
            for span in spans(command)
            if span.rank != queue.rank
        )

    def __str__(self) -> str:
        lines = [f"{self.collective} {self.variant}: {len(self.queues)} queues, {self.flag_count} flags a rank"]
        for queue in self.queues:
            lines.append(f"  rank {queue.rank} {queue.engine}")
            lines.extend(f"    {index}: {describe(command)}" for index, command in enumerate(queue.commands))
        return "\n".join(lines)


def reads(command: Command) -> tuple[Span, ...]:
    """Return the spans that a command reads."""
    match command:
        case Copy(src=src) | Broadcast(src=src):
            return (src,)
        case Swap(a=a, b=b):
            return (a, b)
        case Reduce(srcs=srcs):
            return srcs
        case _:
            return ()


def writes(command: Command) -> tuple[Span, ...]:
    """Return the spans that a command writes."""
    match command:
        case Copy(dst=dst) | Reduce(dst=dst):
            return (dst,)
        case Broadcast(dsts=dsts):
            return dsts
        case Swap(a=a, b=b):
            return (a, b)
        case _:
            return ()


def spans(command: Command) -> Iterator[Span]:
    """Yield every span that a command touches, reads first."""
    yield from reads(command)
    yield from writes(command)


def has_epochs(program: Program) -> bool:
    """Return True if a signal or wait depends on the invocation; ``transform.freeze`` makes programs without."""
    return any(
        command.value.per_epoch != 0
        for queue in program.queues
        for command in queue.commands
        if isinstance(command, Signal | Wait)
    )


def describe(command: Command) -> str:
    """Return one line of text about a command."""
    match command:
        case Copy(dst, src):
            return f"copy {dst} <- {src}"
        case Broadcast(dsts, src):
            return f"broadcast {', '.join(map(str, dsts))} <- {src}"
        case Swap(a, b):
            return f"swap {a} <-> {b}"
        case Reduce(dst, srcs, reduction):
            return f"reduce {dst} <- {reduction}({', '.join(map(str, srcs))})"
        case Signal(flag, value, op):
            return f"signal rank {flag.rank} flag {flag.index} {op} {value}"
        case Wait(flag, value, comparison):
            return f"wait flag {flag.index} {comparison} {value}"
        case Stamp(slot):
            return f"stamp {slot}"
        case _:
            raise TypeError(f"describe: command (value={command!r}, allowed=a Command)")

"""Collectives said as contracts: the same bytes under other names of buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sidelane.program.collective import REDUCING, Buffer, Collective, Kind, Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import Broadcast, Command, Copy, Program, Reduce, Swap

NAMES = {Buffer.INPUT: "source", Buffer.OUTPUT: "target"}


def renamed(span: Span) -> Span:
    """A span of a program under the names of a contract."""
    if span.buffer == Buffer.STAGING:
        return span
    return dataclasses.replace(span, buffer=next(name for old, name in NAMES.items() if old == span.buffer))


def contract_of(collective: Collective) -> Contract:
    """What a collective defines, chunk by chunk."""
    ranks = range(collective.world_size)
    terms: dict[Span, list[Span]] = {}
    for chunk in collective.chunks():
        src = renamed(collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes))
        for rank in ranks if collective.kind is Kind.ALL_REDUCE else (chunk.dst_rank,):
            dst = renamed(collective.output_span(rank, chunk.dst_offset, chunk.nbytes))
            terms.setdefault(dst, []).append(src)
    reduction = collective.reduction if collective.kind in REDUCING else None
    results = [Result(dst, tuple(srcs), reduction) for dst, srcs in terms.items()]
    sizes = {name: [collective.buffer_bytes(rank, old) for rank in ranks] for old, name in NAMES.items()}
    return Contract.of(str(collective.kind), sizes, results)


def under_contract(program: Program, contract: Contract | None = None) -> Program:
    """The same commands between the buffers of a contract, by default that of the program's collective."""
    if contract is None:
        assert isinstance(program.collective, Collective)
        contract = contract_of(program.collective)
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(map_spans(command, renamed) for command in queue.commands))
        for queue in program.queues
    )
    return dataclasses.replace(program, collective=contract, queues=queues)


def map_spans(command: Command, change: Callable[[Span], Span]) -> Command:
    """A command with other operands."""
    match command:
        case Copy(dst, src):
            return Copy(change(dst), change(src))
        case Broadcast((first, second), src):
            return Broadcast((change(first), change(second)), change(src))
        case Swap(a, b):
            return Swap(change(a), change(b))
        case Reduce(dst, srcs, reduction):
            return Reduce(change(dst), tuple(map(change, srcs)), reduction)
    return command

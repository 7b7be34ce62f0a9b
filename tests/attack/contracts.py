"""Right programs that no collective is: contracts with results anywhere, and who moves what when its ends are free."""

from __future__ import annotations

import random

from sidelane.program.collective import ReduceOp, Reduction, Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Reduce, Signal, Wait

INTS = Reduction(ReduceOp.SUM, "int32")


def own(rng: random.Random, ranks: int) -> Program:
    """Draw a contract and a program that keeps it; buffers have the names that the interpreter knows."""
    sizes = {name: [4 * rng.randrange(1, 12) for _ in range(ranks)] for name in ("input", "output")}
    before: list[list[Command]] = [[] for _ in range(ranks)]
    moves: list[list[Command]] = [[] for _ in range(ranks)]
    after: list[list[Command]] = [[] for _ in range(ranks)]
    results: list[Result] = []
    flags = 0

    def flag(rank: int, by: int, signals: list[list[Command]], waits: list[list[Command]]) -> None:
        nonlocal flags
        if rank != by:
            signals[by].append(Signal(Flag(rank, flags), EPOCH))
            waits[rank].append(Wait(Flag(rank, flags), EPOCH))
            flags += 1

    for dst in _targets(rng, sizes["output"]):
        sums = dst.nbytes % 4 == 0 and dst.offset % 4 == 0 and rng.random() < 0.3
        srcs = tuple(_source(rng, sizes["input"], dst.nbytes, 4 if sums else 1) for _ in range(rng.choice((1, 2, 3))))
        if any(src.nbytes < dst.nbytes for src in srcs):
            continue
        if sums and len(srcs) > 1:
            mover, command = dst.rank, Reduce(dst, srcs, INTS)
            results.append(Result(dst, srcs, INTS))
        else:
            srcs = srcs[:1]
            mover = rng.choice((dst.rank, srcs[0].rank, rng.randrange(ranks)))
            command = Copy(dst, srcs[0])
            results.append(Result(dst, srcs))
        partners = {dst.rank, *(src.rank for src in srcs)} - {mover}
        for partner in partners:
            flag(mover, partner, before, moves)
        moves[mover].append(command)
        for partner in partners:
            flag(partner, mover, moves, after)
    kinds = {rank: _engine(moves[rank]) for rank in range(ranks)}
    queues = [Queue(rank, kinds[rank], (*before[rank], *moves[rank], *after[rank])) for rank in range(ranks)]
    contract = Contract.of("own", sizes, results)
    return Program(contract, "own", tuple(queue for queue in queues if queue.commands), (0,) * ranks, max(1, flags))


def _targets(rng: random.Random, sizes: list[int]) -> list[Span]:
    """Spans of outputs that do not overlap, in any order."""
    found = []
    for rank, size in enumerate(sizes):
        at = 0
        while at < size:
            nbytes = rng.randrange(1, size - at + 1)
            if rng.random() < 0.6:
                found.append(Span(rank, "output", at, nbytes))
            at += nbytes
    rng.shuffle(found)
    return found


def _source(rng: random.Random, sizes: list[int], nbytes: int, alignment: int) -> Span:
    """A span of somebody's input; shorter than asked where the input is."""
    rank = rng.randrange(len(sizes))
    if sizes[rank] < nbytes:
        return Span(rank, "input", 0, sizes[rank])
    return Span(rank, "input", rng.randrange((sizes[rank] - nbytes) // alignment + 1) * alignment, nbytes)


def _engine(commands: list[Command]) -> Engine:
    reduces = any(isinstance(command, Reduce) for command in commands)
    return Engine(EngineKind.COMPUTE if reduces else EngineKind.DMA)

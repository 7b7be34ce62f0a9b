"""A program that callers release slice by slice: every rank computes a shard, whose slices are pushed one by one."""

from __future__ import annotations

from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Value, Wait


def sliced_gather(ranks: int, slices: int, nbytes: int, *, late: int = 0, epochs: int = 1) -> Program:
    """``output`` of every rank holds what all ranks have computed into ``shard``, of ``slices`` times ``nbytes``.

    Args:
        late: by how many triggers the copies come too early.
        epochs: what a flag of a peer grows by from call to call.
    """
    part = slices * nbytes
    queues: list[Queue] = []
    results: list[Result] = []
    value = Value(0, epochs)
    for rank in range(ranks):
        peers = [(rank + turn) % ranks for turn in range(1, ranks)]
        commands: list[Command] = [Signal(Flag(peer, slices + rank), value) for peer in peers]  # my output is free
        commands += [Wait(Flag(rank, slices + peer), value) for peer in peers]
        for number in range(slices):
            commands.append(Wait(Flag(rank, max(0, number - late)), EPOCH))
            src = Span(rank, "shard", number * nbytes, nbytes)
            for peer in (rank, *peers):
                commands.append(Copy(Span(peer, "output", rank * part + number * nbytes, nbytes), src))
            tile = Span(rank, "computed", number * nbytes, nbytes)
            fires = (Copy(src, tile), Signal(Flag(rank, number), EPOCH))
            queues.append(Queue(rank, Engine(EngineKind.CALLER, number), fires))
        commands += [Signal(Flag(peer, slices + ranks + rank), value) for peer in peers]  # all is there
        commands += [Wait(Flag(rank, slices + ranks + peer), value) for peer in peers]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        computed = Span(rank, "computed", 0, part)
        results.append(Result(Span(rank, "shard", 0, part), (computed,)))
        results += [Result(Span(peer, "output", rank * part, part), (computed,)) for peer in range(ranks)]
    sizes = {"computed": [part] * ranks, "shard": [part] * ranks, "output": [ranks * part] * ranks}
    contract = Contract.of("sliced gather", sizes, results, computed=("computed",))
    return Program(contract, "push", tuple(queues), (0,) * ranks, slices + 2 * ranks)

"""Gathers into a ring of buffers, each next to what reads the one before, as FSDP2's: with entries and without."""

from __future__ import annotations

from sidelane.program.collective import Buffer, Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait


def ring_of_gathers(
    ranks: int,
    slots: int,
    nbytes: int,
    *,
    behind: int,
    entries: bool,
    rounds: int = 2,
    reads: int = 1,
    unheard: bool = False,
) -> Program:
    """``rounds`` times around the ring: gather j goes into buffer j mod ``slots``, and is read there when it is in.

    ::

        lane      gather 0 | gather 1 | gather 2 | ...
        compute            | read 0   | read 1   | ...

    Args:
        ranks: that gather a shard of ``nbytes`` each.
        slots: buffers of the ring.
        behind: gather j waits for this rank's own read of gather j - ``behind``. ``slots`` is what the buffer itself
            wants; less makes what a peer hears of this gather say more.
        entries: peers say that their buffer is free before it is written.
        reads: how often a buffer is read: how long the computation takes.
        unheard: a mistake: rank 0 does not wait for the last rank's part.
    """
    count, whole = slots * rounds, ranks * nbytes
    # Flags of a rank, a row for each gather: entries and exits by peer; it is in; it was read.
    row = 2 * ranks + 2

    def flag(rank: int, gather: int, column: int) -> Flag:
        return Flag(rank, gather * row + column)

    def part(rank: int, gather: int, of: int) -> Span:
        return Span(rank, Buffer.STAGING, gather % slots * whole + of * nbytes, nbytes)

    queues, results = [], []
    for rank in range(ranks):
        peers = [(rank + turn) % ranks for turn in range(1, ranks)]
        lane: list[Command] = []
        compute: list[Command] = []
        for number in range(count):
            arrived, read = flag(rank, number, 2 * ranks), flag(rank, number, 2 * ranks + 1)
            if number >= behind:
                lane.append(Wait(flag(rank, number - behind, 2 * ranks + 1), EPOCH))
            own = part(rank, number, rank)
            lane.append(Copy(own, Span(rank, "shards", number * nbytes, nbytes)))
            if entries:
                lane += [Signal(flag(peer, number, rank), EPOCH) for peer in peers]
                lane += [Wait(flag(rank, number, peer), EPOCH) for peer in peers]
            lane += [Copy(part(peer, number, rank), own) for peer in peers]
            lane += [Signal(flag(peer, number, ranks + rank), EPOCH) for peer in peers]
            heard = [peer for peer in peers if not (unheard and rank == 0 and peer == ranks - 1)]
            lane += [Wait(flag(rank, number, ranks + peer), EPOCH) for peer in heard]
            lane.append(Signal(arrived, EPOCH))
            used = Span(rank, "used", number * whole, whole)
            compute += [
                Wait(arrived, EPOCH),
                *([Copy(used, Span(rank, Buffer.STAGING, number % slots * whole, whole))] * reads),
                *([Signal(read, EPOCH)] if number + behind < count else []),  # else the end of the call says it
            ]
            for of in range(ranks):
                shard = Span(of, "shards", number * nbytes, nbytes)
                results.append(Result(Span(rank, "used", number * whole + of * nbytes, nbytes), (shard,)))
        queues += [
            Queue(rank, Engine(EngineKind.DMA), tuple(lane)),
            Queue(rank, Engine(EngineKind.LOCAL), tuple(compute)),
        ]
    sizes = {"shards": [count * nbytes] * ranks, "used": [count * whole] * ranks}
    contract = Contract.of("gathers in a ring", sizes, results)
    return Program(contract, "push", tuple(queues), (slots * whole,) * ranks, count * row)

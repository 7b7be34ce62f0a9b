"""Doubling: in every round a rank passes on all that it has, so that all have everything after log2(n) rounds.

In the round of distance d (1, 2, 4 ...) rank r sends what it has, the d shards from its own on, to rank r - d, as many
of them as are missing there. Rank 0 of 5::

    dma:0    entries for 1, 2 | entry of 4, 0 > 4, exit | 1? entry of 3, 0 1 > 3, exit | 2 3? 0 > 1, exit | 4?

Shards that follow each other are one copy. (J. Bruck et al., "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE TPDS 8(11), 1997; for powers of two it has the rounds of recursive doubling.)
``b2b`` has one handshake instead of log2(n); this one has as many messages, where these are what costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.builders.flags import FlagPlan
from sidelane.program.builders.registry import Algorithm, register
from sidelane.program.builders.transport import Transport
from sidelane.program.collective import Chunk, Collective, Kind, Span
from sidelane.program.ir import Command, Copy, Engine, EngineKind, Program, Queue
from sidelane.program.shape import CallShape


def doubling(collective: Collective, transport: Transport = Transport.PUSH) -> Program:
    """Build an all_gather.

    Args:
        collective: made by ``all_gather``.
        transport: ``push``: every rank writes into the outputs of others.

    Raises:
        ValueError: another collective or transport.
    """
    if collective.kind is not Kind.ALL_GATHER:
        raise ValueError(f"doubling: collective (value={collective.kind}, allowed=all_gather)")
    if transport is not Transport.PUSH:
        raise ValueError(f"doubling: transport (value={transport}, allowed=push: ranks write into others' outputs)")
    n = collective.world_size
    flags = FlagPlan(n, phases=1)
    chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}
    queues: list[Queue] = []
    for rank in range(n):
        commands: list[Command] = []
        movers = {d: (rank + d) % n for d in distances(n) if _sent(chunks, (rank + d) % n, d, n)}
        commands += [
            flags.signal_entry(partner=rank, mover=mover) for d, mover in movers.items() if not _has_begun(chunks, d, n)
        ]
        heard: list[int] = []
        for d in distances(n):
            sent = _sent(chunks, rank, d, n)
            if sent:
                # What it sends came in the rounds before.
                commands += [flags.wait_exit(partner=rank, mover=mover) for mover in heard]
                heard = []
                partner = (rank - d) % n
                if not _has_begun(chunks, d, n):
                    commands.append(flags.wait_entry(partner=partner, mover=rank))
                commands += _copies(collective, rank, sent)
                commands.append(flags.signal_exit(partner=partner, mover=rank))
            heard += [movers[d]] if d in movers else []
        commands += [flags.wait_exit(partner=rank, mover=mover) for mover in heard]
        if commands:
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        own = chunks.get((rank, rank))
        if own and not collective.in_place:
            queues.append(Queue(rank, Engine(EngineKind.LOCAL), tuple(_copies(collective, rank, [own]))))
    return Program(collective, "doubling", tuple(queues), (0,) * n, flags.handshakes)


def distances(world_size: int) -> Iterator[int]:
    """Of the rounds.

    >>> list(distances(5)), list(distances(8)), list(distances(1))
    ([1, 2, 4], [1, 2, 4], [])
    """
    d = 1
    while d < world_size:
        yield d
        d *= 2


def _sent(chunks: dict[tuple[int, int], Chunk], rank: int, d: int, n: int) -> list[Chunk]:
    """What ``rank`` sends in a round: of the shards from its own on, those that the other rank still misses."""
    owners = ((rank + step) % n for step in range(min(d, n - d)))
    found = (chunks.get((owner, (rank - d) % n)) for owner in owners)
    return [chunk for chunk in found if chunk is not None]


def _has_begun(chunks: dict[tuple[int, int], Chunk], d: int, n: int) -> bool:
    """In the round of distance d, what a rank has tells it that whom it sends to is in this call, too.

    It has the shards of d ranks, each sent behind its rank's entries; the other rank is one of them if n < 2 d.
    """
    return n < 2 * d and len({owner for owner, _ in chunks}) == n


def _copies(collective: Collective, rank: int, sent: list[Chunk]) -> list[Copy]:
    """Shards from where they lie at ``rank``, which has its own in its input; neighbours in one piece."""
    copies: list[Copy] = []
    for chunk in sent:
        dst = collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)
        src = collective.output_span(rank, chunk.dst_offset, chunk.nbytes)
        if chunk.src_rank == rank:
            src = collective.input_span(rank, chunk.src_offset, chunk.nbytes)
        last = copies[-1] if copies else None
        if last is not None and _follows(last.dst, dst) and _follows(last.src, src):
            copies[-1] = Copy(_joined(last.dst, dst), _joined(last.src, src))
        else:
            copies.append(Copy(dst, src))
    return copies


def _follows(first: Span, second: Span) -> bool:
    return (first.rank, first.buffer, first.end) == (second.rank, second.buffer, second.offset)


def _joined(first: Span, second: Span) -> Span:
    return Span(first.rank, first.buffer, first.offset, first.nbytes + second.nbytes)


def _no_doubling(shape: CallShape) -> str:
    return "has no second round" if shape.world_size <= 2 else ""


register(
    Algorithm(
        name="doubling",
        kinds=(Kind.ALL_GATHER,),
        preference=40,
        assemble=doubling,
        into_outputs=True,
        merges=False,
        objection=_no_doubling,
    )
)

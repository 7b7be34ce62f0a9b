"""Pulls from where a peer's bytes were expected, which count once their owner has confirmed the place.

A rank reads its peers' bytes at addresses that it did not hear of in this call (``collectives/ahead.py``). An owner
whose bytes lie there says so at once, together with its entry::

    owner    entry, confirmed |                                  wait exit
    reader                    wait entry | copy <- owner | exit |           wait confirmed

An owner whose bytes lie elsewhere lets the readers read, since they cannot be called back, and then writes the right
bytes over what they have read, where each of them offers its output for this call::

    owner    entry |                                  wait exit | copy -> reader | confirmed
    reader         wait entry | copy <- elsewhere | exit |                          wait confirmed

A reader that waits for its peers' posts anyway knows whose bytes lie elsewhere: it takes them from their staging.

Every rank runs a program of its own: who waits for nobody does not know what the others do. What it runs is the same
in all programs of a collective, which ``verify`` proves for every set of ranks that is looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from sidelane.program.builders.beside import beside
from sidelane.program.builders.flags import CONFIRMATIONS, FlagPlan
from sidelane.program.builders.moving import rotation
from sidelane.program.collective import REDUCING, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Program, Queue, Signal, Wait

CONFIRMED = "confirmed"

NOBODY: frozenset[int] = frozenset()


def can_be_confirmed(collective: Collective) -> bool:
    """True where ranks can pull from each other: in place an all_to_all would overwrite what is still to be read."""
    in_turn = collective.in_place and collective.kind is Kind.ALL_TO_ALL
    return (
        collective.kind not in REDUCING and not in_turn and any(c.src_rank != c.dst_rank for c in collective.chunks())
    )


def confirmed(
    collective: Collective, changed: Set[int] = NOBODY, waiting: Set[int] = NOBODY, *, elsewhere: bool = False
) -> Program:
    """Build the program of a call.

    Args:
        collective: what to do; see :func:`can_be_confirmed`.
        changed: ranks whose bytes are not where they are expected; they are among ``waiting``.
        waiting: ranks that know of all others what they have posted.
        elsewhere: for a proof: have readers take what does not lie where they look from other memory in truth. (To
            run, they have the address of that memory for the owner's input.)
    """
    if not changed <= waiting or not can_be_confirmed(collective):
        raise ValueError(f"confirmed: {collective}, changed={sorted(changed)}, waiting={sorted(waiting)}")
    n = collective.world_size
    flags = FlagPlan(n, phases=1)
    chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}
    room = [collective.input_bytes(rank) for rank in range(n)]

    def place(chunk: Chunk) -> Span:
        if chunk.src_rank not in changed or (chunk.dst_rank not in waiting and not elsewhere):
            return collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)
        old = 0 if chunk.dst_rank in waiting else room[chunk.src_rank]
        return Span(chunk.src_rank, Buffer.STAGING, old + chunk.src_offset, chunk.nbytes)

    queues: list[Queue] = []
    for rank in range(n):
        readers = [peer for peer in rotation(rank, n) if (rank, peer) in chunks]
        owners = [peer for peer in rotation(rank, n) if (peer, rank) in chunks]
        late = [peer for peer in readers if rank in changed and peer not in waiting]
        staged = [chunks[rank, peer] for peer in readers if rank in changed and peer in waiting]
        commands: list[Command] = [Copy(dst, src) for dst, src in dict.fromkeys(_staged(collective, c) for c in staged)]
        commands += [flags.signal_entry(partner=rank, mover=peer) for peer in readers]
        commands += [_confirms(rank, peer) for peer in readers if peer not in late]
        commands += [flags.wait_entry(partner=peer, mover=rank) for peer in owners]
        commands += [Copy(_output(collective, chunks[peer, rank]), place(chunks[peer, rank])) for peer in owners]
        commands += [flags.signal_exit(partner=peer, mover=rank) for peer in owners]
        commands += [flags.wait_exit(partner=rank, mover=peer) for peer in readers]
        pushed = [chunks[rank, peer] for peer in late]
        commands += [Copy(_output(collective, c), collective.input_span(rank, c.src_offset, c.nbytes)) for c in pushed]
        commands += [_confirms(rank, peer) for peer in late]
        commands += [Wait(flags.confirmed(owner=peer, reader=rank), EPOCH) for peer in owners]
        if commands:
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        own = chunks.get((rank, rank))
        if own is not None:
            dst, src = _output(collective, own), collective.input_span(rank, own.src_offset, own.nbytes)
            if dst != src:
                queues.append(Queue(rank, Engine(EngineKind.LOCAL), (Copy(dst, src),)))
    staging = tuple(size * (1 + elsewhere) for size in room)
    program = beside(Program(collective, CONFIRMED, tuple(queues), staging, flags.handshakes))
    return dataclasses.replace(program, flag_count=CONFIRMATIONS + n)


def _staged(collective: Collective, chunk: Chunk) -> tuple[Span, Span]:
    to = Span(chunk.src_rank, Buffer.STAGING, chunk.src_offset, chunk.nbytes)
    return to, collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)


def _output(collective: Collective, chunk: Chunk) -> Span:
    return collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)


def _confirms(owner: int, reader: int) -> Signal:
    return Signal(FlagPlan.confirmed(owner=owner, reader=reader), EPOCH)

"""Pulls from where a peer's bytes were expected, which count once their owner has confirmed the place.

A rank reads its peers' bytes at addresses that it did not hear of in this call (``collectives/learning``). An owner
whose bytes lie there says so at once, together with its entry::

    owner    entry, confirmed |                                  wait exit
    reader                    wait entry | copy <- owner | exit |           wait confirmed

An owner whose bytes lie elsewhere lets the readers read, since they cannot be called back, and then writes the right
bytes over what they have read, where each of them offers its output for this call::

    owner    entry |                                  wait exit | copy -> reader | confirmed
    reader         wait entry | copy <- elsewhere | exit |                          wait confirmed

Such an owner *misses*. It waits for its peers' posts, to know where they offer their outputs. So does a rank whose
output is new to its peers. Ranks that miss know of each other, and take each other's bytes from staging. A reader that
knows of an owner that it has freed the memory where its bytes were expected leaves out the read.

Of a batch, a rank hits with all of its tensors or misses with all of them: one entry, one exit and one confirmation.

Every rank runs a program of its own: who waits for nobody does not know what the others do. What it runs is the same
in all programs of a collective, which ``verify`` proves for every set of ranks that is looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import NamedTuple

from sidelane.program.batch import Batch, lay_out, parts_of
from sidelane.program.builders.beside import beside
from sidelane.program.builders.flags import CONFIRMATIONS, FlagPlan
from sidelane.program.builders.moving import rotation
from sidelane.program.collective import REDUCING, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Program, Queue, Signal, Wait

CONFIRMED = "confirmed"

NOBODY: frozenset[int] = frozenset()


class _Move(NamedTuple):
    """One chunk of one part: where it goes and where it lies, as the program has it; and where in staging."""

    to: Span
    source: Span
    staged_at: int


def can_be_confirmed(definition: Collective | Batch) -> bool:
    """True where ranks can pull from each other: in place an all_to_all would overwrite what is still to be read."""
    parts = [part for part, _ in parts_of(definition)]
    in_turn = any(part.in_place and part.kind is Kind.ALL_TO_ALL for part in parts)
    reduces = any(part.kind in REDUCING for part in parts)
    return not (reduces or in_turn) and any(c.src_rank != c.dst_rank for part in parts for c in part.chunks())


def confirmed(
    collective: Collective | Batch,
    missing: Set[int] = NOBODY,
    *,
    elsewhere: bool = False,
    unread: Set[int] = NOBODY,
) -> Program:
    """Build the program of a call.

    Args:
        collective: what to do; see :func:`can_be_confirmed`.
        missing: ranks whose bytes may not be where they are expected. They know of each other.
        elsewhere: for a proof: have readers take what does not lie where they look from other memory in truth. (To
            run, they have the address of that memory for the owner's input.)
        unread: of those that miss, ranks of which readers that do not miss read nothing.
    """
    if not unread <= missing or not can_be_confirmed(collective):
        raise ValueError(f"confirmed: {collective}, missing={sorted(missing)}, unread={sorted(unread)}")
    n = collective.world_size
    flags = FlagPlan(n, phases=1)
    moves, room = _moves(collective)

    def pulled(move: _Move) -> list[Copy]:
        owner, reader = move.source.rank, move.to.rank
        is_late = owner in missing and reader not in missing
        if is_late and owner in unread:
            return []
        if owner not in missing or (is_late and not elsewhere):
            return [Copy(move.to, move.source)]
        old = room[owner] if is_late else 0
        return [Copy(move.to, Span(owner, Buffer.STAGING, old + move.staged_at, move.to.nbytes))]

    def commands_of(rank: int) -> list[Command]:
        readers = [peer for peer in rotation(rank, n) if (rank, peer) in moves]
        owners = [peer for peer in rotation(rank, n) if (peer, rank) in moves]
        late = [peer for peer in readers if rank in missing and peer not in missing]
        staged = [_staged(move) for peer in readers if {rank, peer} <= missing for move in moves[rank, peer]]
        return [
            *dict.fromkeys(staged),
            *(flags.signal_entry(partner=rank, mover=peer) for peer in readers),
            *(_confirms(rank, peer) for peer in readers if peer not in late),
            *(flags.wait_entry(partner=peer, mover=rank) for peer in owners),
            *(copy for peer in owners for move in moves[peer, rank] for copy in pulled(move)),
            *(flags.signal_exit(partner=peer, mover=rank) for peer in owners),
            *(flags.wait_exit(partner=rank, mover=peer) for peer in readers),
            *(Copy(move.to, move.source) for peer in late for move in moves[rank, peer]),
            *(_confirms(rank, peer) for peer in late),
            *(Wait(flags.confirmed(owner=peer, reader=rank), EPOCH) for peer in owners),
        ]

    queues: list[Queue] = []
    for rank in range(n):
        commands = commands_of(rank)
        if commands:
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        own = tuple(Copy(move.to, move.source) for move in moves.get((rank, rank), ()) if move.to != move.source)
        if own:
            queues.append(Queue(rank, Engine(EngineKind.LOCAL), own))
    staging = tuple(size * (1 + elsewhere) for size in room)
    program = beside(Program(collective, CONFIRMED, tuple(queues), staging, flags.handshakes))
    return dataclasses.replace(program, flag_count=CONFIRMATIONS + n)


def _moves(definition: Collective | Batch) -> tuple[dict[tuple[int, int], list[_Move]], list[int]]:
    """Bytes that go from rank to rank, and the staging that holds the inputs of each rank."""
    parts = [*parts_of(definition)]
    laid = [lay_out([part.input_bytes(rank) for part, _ in parts]) for rank in range(definition.world_size)]
    moves: dict[tuple[int, int], list[_Move]] = {}
    for number, (part, placed) in enumerate(parts):
        for chunk in part.chunks():
            starts, _ = laid[chunk.src_rank]
            move = _move(part, placed, chunk, starts[number])
            moves.setdefault((chunk.src_rank, chunk.dst_rank), []).append(move)
    return moves, [max(ends, default=0) for _, ends in laid]


def _move(part: Collective, placed: Callable[[Span], Span], chunk: Chunk, start: int) -> _Move:
    to = part.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)
    source = part.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)
    return _Move(placed(to), placed(source), start + chunk.src_offset)


def _staged(move: _Move) -> Copy:
    return Copy(Span(move.source.rank, Buffer.STAGING, move.staged_at, move.source.nbytes), move.source)


def _confirms(owner: int, reader: int) -> Signal:
    return Signal(FlagPlan.confirmed(owner=owner, reader=reader), EPOCH)

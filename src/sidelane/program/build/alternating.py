"""One handshake instead of two: every rank copies what it sends into a slot of its own, and two slots take turns.

A call copies its input into the slot of its turn (0, 1, 0, 1 ...), tells all peers that it is ready, waits until all of
them are, and pulls their parts straight into its output. Nothing of the caller's is touched by a peer, and nobody waits
for the end of a pull. Rank r, three calls; ``s`` copies into a slot, ``R`` signals ready, ``.`` waits, ``p`` pulls::

    slot 0  s R . p p p                                  s R . p p p
    slot 1                s R . p p p

*Why slot 0 is free again in the third call.* Rank r begins it when it has seen every peer ready in the second. A peer
said so after its pulls of the first, since an engine executes its queue in order. So every rank must signal every other
one in every call, whether bytes travel between them or not. (In a program of turn 0 right behind one of turn 0 a fast
rank overwrites what a slow one still pulls: ``verify`` refuses that, and accepts the two in turn.)

*Flags.* The two turns have flags of their own, so that a frozen program may reset them: the next signal of a turn comes
two calls later, behind a ready of this rank that its reset precedes.

*Graphs* repeat what they hold, and two calls of one turn could meet where the last call of a replay is followed by the
first of the next. An ``opening`` program of turn 0 has an entry handshake in front: it may follow anything. Turn 1 is
next. Calls of graphs have slots and flags that eager calls do not use.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.build.beside import beside
from sidelane.program.build.moving import rotation
from sidelane.program.collective import REDUCING, Buffer, Collective, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.transform import freeze
from sidelane.program.verify import Verification, verify_sequence

ALTERNATING = "alternating"
"""Name of the variant."""

TURNS = 2

SLOT_BYTES = 4 << 20
"""Most bytes that a rank sends in one call. All programs must have the same slots, so their size is fixed; from here on
a handshake is a tenth of the time of a collective or less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternation:
    """The programs of one call, of which each invocation runs one.

    Attributes:
        turns: for slot 0 and slot 1.
        opening: for the first call in a graph; None for eager calls.
    """

    turns: tuple[Program, Program]
    opening: Program | None = None

    @property
    def collective(self) -> Collective:
        collective = self.turns[0].collective
        assert isinstance(collective, Collective), "what takes turns is one collective"
        return collective

    def verify(self) -> Verification:
        """Prove the programs in every order in which they may follow each other.

        Raises:
            ProgramError: as ``program.verify.verify``.
        """
        even, odd = self.turns
        first = self.opening
        if first is None:
            return verify_sequence((even, odd))
        # One round, since it holds every step from one program to the next.
        return verify_sequence((even, odd, first, first, odd, even, first), rounds=1)


def alternation(collective: Collective, *, frozen: bool, opened: bool, slot_bytes: int = SLOT_BYTES) -> Alternation:
    """Build the programs of a call.

    Args:
        collective: one that only moves bytes.
        frozen: without epochs.
        opened: with an ``opening``, for calls in a caller's graph.
        slot_bytes: size of a slot.

    Raises:
        ValueError: a reduction, or more bytes than a slot holds.
    """
    even, odd = (alternating(collective, turn, slot_bytes=slot_bytes) for turn in range(TURNS))
    first = alternating(collective, 0, slot_bytes=slot_bytes, opening=True) if opened else None
    if frozen:
        even, odd, first = freeze(even), freeze(odd), freeze(first) if first is not None else None
    return Alternation((even, odd), first)


def alternating(collective: Collective, turn: int, *, slot_bytes: int = SLOT_BYTES, opening: bool = False) -> Program:
    """Build the program of one turn. Alone, one behind the other, it is wrong: see :class:`Alternation`.

    Args:
        collective: one that only moves bytes. Input and output may be ordinary memory.
        turn: 0 or 1: the slot that it uses.
        slot_bytes: size of a slot; slot 1 lies behind slot 0.
        opening: with an entry handshake in front.

    Raises:
        ValueError: a reduction, another turn, or more bytes than a slot holds.
    """
    if collective.kind in REDUCING:
        raise ValueError(f"{ALTERNATING}: collective (value={collective.kind}, allowed=those that only move bytes)")
    if turn not in range(TURNS):
        raise ValueError(f"{ALTERNATING}: turn (value={turn}, allowed=0, 1)")
    n = collective.world_size
    sent = [_sent(collective, rank) for rank in range(n)]
    most = max(end for _, end in sent)
    if most > slot_bytes:
        raise ValueError(
            f"{ALTERNATING}: bytes that a rank sends in {collective.kind} (value={most}, allowed=..{slot_bytes})"
        )
    queues = []
    for rank in range(n):
        peers = list(rotation(rank, n))
        commands: list[Command] = []
        if opening:
            commands += [Signal(Flag(peer, TURNS * n + rank), EPOCH) for peer in peers]
            commands += [Wait(Flag(rank, TURNS * n + peer), EPOCH) for peer in peers]
        start, end = sent[rank]
        if end > start:
            slot = Span(rank, Buffer.STAGING, turn * slot_bytes + start, end - start)
            commands.append(Copy(slot, collective.input_span(rank, start, end - start)))
        commands += [Signal(Flag(peer, turn * n + rank), EPOCH) for peer in peers]
        commands += [Wait(Flag(rank, turn * n + peer), EPOCH) for peer in peers]
        commands += _pulls(collective, rank, turn * slot_bytes)
        own = _own(collective, rank)
        if commands:
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        if own:
            queues.append(Queue(rank, Engine(EngineKind.LOCAL), tuple(own)))
    program = Program(
        collective=collective,
        variant=f"{ALTERNATING}+opening" if opening else ALTERNATING,
        queues=tuple(queues),
        staging_bytes=(TURNS * slot_bytes,) * n if n > 1 else (0,),
        flag_count=(TURNS + 1) * n,
    )
    return beside(program)


def flags_of(world_size: int) -> int:
    """Flags of a rank: a set for each turn and one for the entry handshake, with a flag for every peer, and one between
    its own engines (``beside``).

    >>> flags_of(4)
    13
    """
    return (TURNS + 1) * world_size + 1


def _sent(collective: Collective, rank: int) -> tuple[int, int]:
    """Bytes of the input of ``rank`` from the first to the last that a peer needs; its own part may lie in between."""
    chunks = [chunk for chunk in collective.chunks() if chunk.src_rank == rank != chunk.dst_rank]
    if not chunks:
        return 0, 0
    return min(chunk.src_offset for chunk in chunks), max(chunk.src_offset + chunk.nbytes for chunk in chunks)


def _own(collective: Collective, rank: int) -> list[Command]:
    copies: list[Command] = []
    for chunk in collective.chunks():
        if chunk.src_rank == chunk.dst_rank == rank:
            src = collective.input_span(rank, chunk.src_offset, chunk.nbytes)
            dst = collective.output_span(rank, chunk.dst_offset, chunk.nbytes)
            if src != dst:
                copies.append(Copy(dst, src))
    return copies


def _pulls(collective: Collective, rank: int, slot: int) -> list[Command]:
    """One copy from each peer that sends something, in rotated order: at every step each rank serves another one."""
    by_source = {chunk.src_rank: chunk for chunk in collective.chunks() if chunk.dst_rank == rank}
    return [
        Copy(
            collective.output_span(rank, chunk.dst_offset, chunk.nbytes),
            Span(peer, Buffer.STAGING, slot + chunk.src_offset, chunk.nbytes),
        )
        for peer in rotation(rank, collective.world_size)
        if (chunk := by_source.get(peer)) is not None
    ]

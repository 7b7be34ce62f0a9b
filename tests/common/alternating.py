"""Programs that alternate: a double buffer with one handshake, on which the proof of sequences is tried.

A call copies its input into the slot of its turn (0, 1, 0, 1 ...), tells all peers that it is ready, waits until all of
them are, and pulls their parts straight into its output. Peers touch none of the caller's buffers, and no rank waits
for the end of a pull. Rank r, three calls; ``s`` copies into a slot, ``R`` signals ready, ``.`` waits, ``p`` pulls::

    slot 0  s R . p p p                                  s R . p p p
    slot 1                s R . p p p

*Why slot 0 is free again in the third call.* Rank r begins it when it has seen every peer ready in the second. A peer
said so after its pulls of the first, since an engine executes its queue in order. So every rank must signal every other
one in every call, whether bytes travel between them or not. (In a program of turn 0 right behind one of turn 0 a fast
rank overwrites what a slow one still pulls: ``verify`` refuses that, and accepts the two in turn.)

*Flags.* The two turns have flags of their own, so that a frozen program may reset them: the next signal of a turn comes
two calls later, behind a ready of this rank that its reset precedes. So the resets are not urgent: they run
beside the pulls.

*Graphs* replay their calls, and two calls of one turn could meet where the last call of a replay is followed by the
first of the next. An ``opening`` program of turn 0 has an entry handshake in front: it may follow anything. Turn 1 is
next. Calls of graphs have slots and flags that eager calls do not use.
"""

from __future__ import annotations

import dataclasses

from sidelane.program import ir
from sidelane.program.builders.moving import rotation
from sidelane.program.builders.registry import beside
from sidelane.program.collective import REDUCING, Buffer, Collective, Span
from sidelane.program.transform import LOWERED, RAISED, freeze
from sidelane.program.verify import Verification, verify_sequence

ALTERNATING = "alternating"
"""Name of the variant."""

TURNS = 2

SLOT_BYTES = 4 << 20
"""Largest number of bytes that a rank sends in one call. All programs need the same slots, so their size is fixed;
above it a handshake is a tenth of the time of a collective or less."""

SPARE_BYTES = 256
"""Bytes behind the slots that no peer reads; a copy there has no effect."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternation:
    """The programs of one call, of which each invocation runs one.

    Attributes:
        turns: programs for slot 0 and slot 1.
        opening: program for the first call in a graph; None for eager calls.
    """

    turns: tuple[ir.Program, ir.Program]
    opening: ir.Program | None = None

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


def alternation(collective: Collective, *, frozen: bool, slot_bytes: int = SLOT_BYTES) -> Alternation:
    """Build the programs of a call.

    Args:
        collective: collective that only moves bytes.
        frozen: build for calls in a caller's graph: without epochs, and with an ``opening``.
        slot_bytes: size of a slot.

    Raises:
        ValueError: a reduction, or more bytes than a slot holds.
    """
    even, odd = (alternating(collective, turn, slot_bytes=slot_bytes, frozen=frozen) for turn in range(TURNS))
    first = alternating(collective, 0, slot_bytes=slot_bytes, opening=True, frozen=True) if frozen else None
    return Alternation((even, odd), first)


def alternating(
    collective: Collective, turn: int, *, slot_bytes: int = SLOT_BYTES, opening: bool = False, frozen: bool = False
) -> ir.Program:
    """Build the program of one turn. Repeated by itself it has a race; see :class:`Alternation` for the safe order.

    Args:
        collective: collective that only moves bytes. Input and output may be ordinary memory.
        turn: number of the slot that the program uses, 0 or 1.
        slot_bytes: size of a slot; slot 1 lies behind slot 0.
        opening: begin with an entry handshake.
        frozen: build without epochs.

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
        commands: list[ir.Command] = []
        if opening:
            commands += [ir.Signal(ir.Flag(peer, TURNS * n + rank), ir.EPOCH) for peer in peers]
            commands += [ir.Wait(ir.Flag(rank, TURNS * n + peer), ir.EPOCH) for peer in peers]
        start, end = sent[rank]
        if end > start:
            slot = Span(rank, Buffer.STAGING, turn * slot_bytes + start, end - start)
            commands.append(ir.Copy(slot, collective.input_span(rank, start, end - start)))
        commands += [ir.Signal(ir.Flag(peer, turn * n + rank), ir.EPOCH) for peer in peers]
        commands += [ir.Wait(ir.Flag(rank, turn * n + peer), ir.EPOCH) for peer in peers]
        pulls = _pulls(collective, rank, turn * slot_bytes)
        commands += pulls
        own = _own(collective, rank)
        if end > start and pulls and not own and not frozen:
            own = [_spare_copy(rank, TURNS * slot_bytes, slot)]
        if commands:
            queues.append(ir.Queue(rank, ir.Engine(ir.EngineKind.DMA), tuple(commands)))
        if own:
            queues.append(ir.Queue(rank, ir.Engine(ir.EngineKind.LOCAL), tuple(own)))
    program = ir.Program(
        collective=collective,
        variant=f"{ALTERNATING}+opening" if opening else ALTERNATING,
        queues=tuple(queues),
        staging_bytes=(staging_of(slot_bytes),) * n if n > 1 else (0,),
        flag_count=(TURNS + 1) * n,
    )
    program = beside(program)
    return resets_beside(freeze(program)) if frozen else program


def staging_of(slot_bytes: int) -> int:
    """Return the bytes of staging that programs with such slots need."""
    return TURNS * slot_bytes + SPARE_BYTES


def flags_of(world_size: int) -> int:
    """Return the number of flags of a rank: a set for each turn and one for the entry handshake, with a flag for every
    peer, and two between its own engines (``beside``, ``resets_beside``).

    >>> flags_of(4)
    14
    """
    return (TURNS + 1) * world_size + 2


def _sent(collective: Collective, rank: int) -> tuple[int, int]:
    """Return the range of the input of ``rank`` that peers need, from the first byte to the last; its own part may lie
    in between.
    """
    chunks = [chunk for chunk in collective.chunks() if chunk.src_rank == rank and chunk.dst_rank != rank]
    if not chunks:
        return 0, 0
    return min(chunk.src_offset for chunk in chunks), max(chunk.src_offset + chunk.nbytes for chunk in chunks)


def _own(collective: Collective, rank: int) -> list[ir.Command]:
    copies: list[ir.Command] = []
    for chunk in collective.chunks():
        if chunk.src_rank == chunk.dst_rank == rank:
            src = collective.input_span(rank, chunk.src_offset, chunk.nbytes)
            dst = collective.output_span(rank, chunk.dst_offset, chunk.nbytes)
            if src != dst:
                copies.append(ir.Copy(dst, src))
    return copies


def _spare_copy(rank: int, spare: int, slot: Span) -> ir.Copy:
    """Return a copy inside the GPU that runs beside the pulls if no other local copy does.

    Without it, the next call's copy into its slot would follow the pulls directly: the change from peer copies to a
    copy inside the GPU costs a stream 7 us of 28 there, and nothing behind a join (results/notes/probes.md).
    """
    nbytes = min(slot.nbytes, SPARE_BYTES)
    return ir.Copy(Span(rank, Buffer.STAGING, spare, nbytes), Span(rank, Buffer.STAGING, slot.offset, nbytes))


def _pulls(collective: Collective, rank: int, slot: int) -> list[ir.Command]:
    """Return one copy from each sending peer, in rotated order: at every step each rank serves another one."""
    by_source = {chunk.src_rank: chunk for chunk in collective.chunks() if chunk.dst_rank == rank}
    n = collective.world_size
    return [
        ir.Copy(
            collective.output_span(rank, chunk.dst_offset, chunk.nbytes),
            Span(peer, Buffer.STAGING, slot + chunk.src_offset, chunk.nbytes),
        )
        for peer in rotation(rank, n)
        if (chunk := by_source.get(peer)) is not None
    ]


def resets_beside(program: ir.Program) -> ir.Program:
    """Move resets behind the last signal to a peer from each rank's first DMA queue to a queue beside its last moves.

    Only for a frozen program whose peers signal those flags again behind a later signal of this rank; ``verify``
    checks that.
    """
    mark = program.flag_count
    queues: list[ir.Queue] = []
    marked = False
    for rank in range(program.world_size):
        given = program.queues_of(rank)
        first = next((queue for queue in given if queue.engine.kind is ir.EngineKind.DMA), None)
        resets = _late_resets(first) if first is not None else []
        if first is None or not resets:
            queues += given
            continue
        commands = [command for command in first.commands if command not in resets]
        own = next((queue for queue in given if queue.engine.kind is ir.EngineKind.LOCAL), None)
        if own is None:
            flag, marked = ir.Flag(rank, mark), True
            waits = [index for index, command in enumerate(commands) if isinstance(command, ir.Wait)]
            commands.insert(waits[-1] + 1, ir.Signal(flag, RAISED))
            own = ir.Queue(
                rank,
                ir.Engine(ir.EngineKind.LOCAL),
                (ir.Wait(flag, RAISED, ir.Comparison.EQ), ir.Signal(flag, LOWERED)),
            )
            given = (*given, own)
        changed = {
            first.engine: dataclasses.replace(first, commands=tuple(commands)),
            own.engine: dataclasses.replace(own, commands=(*own.commands, *resets)),
        }
        queues += [changed.get(queue.engine, queue) for queue in given]
    return dataclasses.replace(program, queues=tuple(queues), flag_count=mark + marked)


def _late_resets(queue: ir.Queue) -> list[ir.Command]:
    """Return the resets between the last signal to a peer and a move."""
    sent = max(
        (i for i, c in enumerate(queue.commands) if isinstance(c, ir.Signal) and c.flag.rank != queue.rank), default=0
    )
    behind = queue.commands[sent:]
    moves = [index for index, command in enumerate(behind) if isinstance(command, ir.MOVES)]
    before = behind[: moves[0]] if moves else ()
    waited = {command.flag for command in before if isinstance(command, ir.Wait)}
    return [command for command in before if isinstance(command, ir.Signal) and command.flag in waited]

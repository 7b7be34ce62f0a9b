"""One handshake instead of two: every rank copies its input into a slot of its own, and calls alternate two slots.

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

*Rows.* Small parts in a graph are all pulled by one pitched copy: those of all ranks lie equally far apart, this rank's
own included, and in the output one part apart. So the own part comes out of the slot as well.

*Graphs* replay their calls, and two calls of one turn could meet where the last call of a replay is followed by the
first of the next. An ``opening`` program of turn 0 has an entry handshake in front: it may follow anything. Turn 1 is
next. Calls of graphs have slots and flags that eager calls do not use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sidelane.config import COMPUTE
from sidelane.program.builders.beside import beside
from sidelane.program.builders.moving import MOVING, copy_own, output_of, rotation
from sidelane.program.builders.registry import Algorithm, register
from sidelane.program.collective import REDUCING, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.shape import CallShape
from sidelane.program.transform.freeze import LOWERED, RAISED, freeze
from sidelane.program.verify import Verification, verify_sequence

ALTERNATING = "alternating"
"""Name of the variant."""

TURNS = 2

SLOT_BYTES = 4 << 20
"""Largest number of bytes that a rank sends in one call. All programs need the same slots, so their size is fixed;
above it a handshake is a tenth of the time of a collective or less."""

ROW_BYTES = 128 << 10
"""Largest part that is pulled as a row. On four H200s a pitched copy of four rows of 256 bytes takes 3.5 us and three
copies 9; rows of 64 KB take 5 us less than the copies, and rows of 256 KB take 3 us more: it moves 90 GB/s."""

THUMB_BYTES = 1 << 20
"""Bytes of a call below which one handshake is taken if the machine has no measurements."""

SPARE_BYTES = 256
"""Bytes behind the slots that no peer reads; a copy there has no effect."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternation:
    """The programs of one call, of which each invocation runs one.

    Attributes:
        turns: programs for slot 0 and slot 1.
        opening: program for the first call in a graph; None for eager calls.
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
) -> Program:
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
    n, chunks = collective.world_size, list(collective.chunks())
    rows = frozen and n > 1 and _fits_rows(collective)
    sent = [_sent(chunks, rank, own=rows) for rank in range(n)]
    most = max(end for _, end in sent)
    if most > slot_bytes:
        raise ValueError(
            f"{ALTERNATING}: bytes that a rank sends in {collective.kind} (value={most}, allowed=..{slot_bytes})"
        )
    queues: list[Queue] = []
    for rank, (start, end) in enumerate(sent):
        commands = _handshake(rank, n, TURNS) if opening else []
        slot = Span(rank, Buffer.STAGING, turn * slot_bytes + start, end - start)
        if slot.nbytes:
            commands.append(Copy(slot, collective.input_span(rank, start, slot.nbytes)))
        commands += _handshake(rank, n, turn)
        coming = {chunk.src_rank: chunk for chunk in chunks if chunk.dst_rank == rank}
        pulls = _pulls(collective, rank, coming, turn * slot_bytes, rows=rows)
        own = copy_own(collective, coming[rank]) if rank in coming and not rows else []
        if slot.nbytes and pulls and not (own or frozen):
            own = [_spare_copy(rank, TURNS * slot_bytes, slot)]
        queues += [
            Queue(rank, Engine(EngineKind.DMA), (*commands, *pulls)),
            Queue(rank, Engine(EngineKind.LOCAL), tuple(own)),
        ]
    program = Program(
        collective=collective,
        variant=f"{ALTERNATING}+opening" if opening else ALTERNATING,
        queues=tuple(queue for queue in queues if queue.commands),
        staging_bytes=(staging_of(slot_bytes),) * n if n > 1 else (0,),
        flag_count=(TURNS + 1) * n,
    )
    program = beside(program)
    return _resets_beside(freeze(program), turn) if frozen else program


def staging_of(slot_bytes: int) -> int:
    """Return the bytes of staging that programs with such slots need."""
    return TURNS * slot_bytes + SPARE_BYTES


def flags_of(world_size: int) -> int:
    """Return the number of flags of a rank: a set for each turn and one for the entry handshake, with a flag for every
    peer, and two between its own engines (``beside``, ``_resets_beside``).

    >>> flags_of(4)
    14
    """
    return (TURNS + 1) * world_size + 2


def _fits_rows(collective: Collective) -> bool:
    parts = {nbytes for row in collective.counts for nbytes in row}
    rows = collective.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) and collective.copies_own
    return rows and len(parts) == 1 and 0 < parts.pop() <= ROW_BYTES


def _sent(chunks: Sequence[Chunk], rank: int, *, own: bool) -> tuple[int, int]:
    """Return the range of the input of ``rank`` that peers need, from the first byte to the last; its own part may lie
    in between. With ``own``, bytes that the rank needs itself count too.
    """
    needed = [chunk for chunk in chunks if chunk.src_rank == rank and (own or chunk.dst_rank != rank)]
    ends = (chunk.src_offset + chunk.nbytes for chunk in needed)
    return min((chunk.src_offset for chunk in needed), default=0), max(ends, default=0)


def _handshake(rank: int, n: int, number: int) -> list[Command]:
    """Return the signals to all peers and the waits for theirs, with the set of flags of that number."""
    peers = list(rotation(rank, n))
    signals = [Signal(Flag(peer, number * n + rank), EPOCH) for peer in peers]
    return [*signals, *(Wait(Flag(rank, number * n + peer), EPOCH) for peer in peers)]


def _pulls(collective: Collective, rank: int, coming: Mapping[int, Chunk], slot: int, *, rows: bool) -> list[Copy]:
    """Return one copy from each sending peer, in rotated order: at every step each rank serves another one.
    With ``rows``, one copy from this rank is added, and all are in the order of the ranks.
    """
    n = collective.world_size
    return [
        Copy(output_of(collective, chunk), Span(peer, Buffer.STAGING, slot + chunk.src_offset, chunk.nbytes))
        for peer in (range(n) if rows else rotation(rank, n))
        if (chunk := coming.get(peer)) is not None
    ]


def _spare_copy(rank: int, spare: int, slot: Span) -> Copy:
    """Return a copy inside the GPU that runs beside the pulls if no other local copy does.

    Without it, the next call's copy into its slot would follow the pulls directly: the change from peer copies to a
    copy inside the GPU costs a stream 7 us of 28 there, and nothing behind a join (docs/lab/probes.md).
    """
    nbytes = min(slot.nbytes, SPARE_BYTES)
    return Copy(Span(rank, Buffer.STAGING, spare, nbytes), Span(rank, Buffer.STAGING, slot.offset, nbytes))


def _resets_beside(program: Program, turn: int) -> Program:
    """Move the resets of a turn's flags to the local engine, behind its copies: beside the pulls, if there are any."""
    n, mark, marked = program.world_size, program.flag_count, False
    queues: list[Queue] = []
    for rank in range(n):
        given = {queue.engine.kind: queue for queue in program.queues_of(rank)}
        dma, local = given.get(EngineKind.DMA), given.get(EngineKind.LOCAL)
        if dma is None or not isinstance(dma.commands[-1], Copy):
            queues += given.values()
            continue
        resets = [Signal(Flag(rank, turn * n + peer), LOWERED) for peer in rotation(rank, n)]
        commands = [command for command in dma.commands if command not in resets]
        if local is None:
            flag, marked = Flag(rank, mark), True
            last = max(index for index, command in enumerate(commands) if isinstance(command, Wait))
            commands.insert(last + 1, Signal(flag, RAISED))
            wait: tuple[Command, ...] = (Wait(flag, RAISED, Comparison.EQ), Signal(flag, LOWERED))
            local = Queue(rank, Engine(EngineKind.LOCAL), wait)
        queues.append(dataclasses.replace(dma, commands=tuple(commands)))
        queues.append(dataclasses.replace(local, commands=(*local.commands, *resets)))
    return dataclasses.replace(program, queues=tuple(queues), flag_count=mark + marked)


def _no_alternation(shape: CallShape) -> str:
    # An uneven all_gather might send it all from one rank.
    gathers_evenly = shape.kind is Kind.ALL_GATHER and shape.even
    most = shape.nbytes // shape.world_size if gathers_evenly else shape.nbytes
    if most > SLOT_BYTES:
        return f"copies what a rank sends into a slot of {SLOT_BYTES >> 20} MiB"
    # Other programs need this copy as well for outputs in ordinary memory, and for an all_to_all in place.
    copies_anyway = not shape.symmetric or (shape.kind is Kind.ALL_TO_ALL and shape.in_place)
    if shape.beside == COMPUTE and not copies_anyway:
        return "begins with a copy inside the rank, which may wait for what runs beside it"
    return ""


def _thumb(shape: CallShape) -> str:
    return f"one handshake below {THUMB_BYTES >> 20} MiB" if shape.nbytes < THUMB_BYTES else ""


register(
    Algorithm(
        name=ALTERNATING,
        kinds=MOVING,
        preference=95,
        merges=False,
        in_turns=True,
        objection=_no_alternation,
        thumb=_thumb,
    )
)

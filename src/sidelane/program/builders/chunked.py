"""Build programs that move bytes through staging in pieces, on two engines: one out of the rank, one into it.

They are for staging in host memory, which every byte passes twice. ``out`` copies piece after piece of a rank's input
into a ring of slots, and ``in`` fetches the pieces of the peers at the same time. Two slots, one peer::

    dma:0    copy 0 | entry 0 | copy 1 | entry 1 | wait exit 0 | copy 2 | entry 2 | ... | wait last exits
    dma:1    wait entry 0 | fetch 0 | exit 0 | wait entry 1 | fetch 1 | exit 1 | ...

Where the ranks add, compute units fetch: a reduction reads the slots of all ranks. An all_reduce sends each result on,
one piece later, so that no rank waits for a sum while it could copy::

    dma:0    parts 0 | parts 1 | wait for sum 0: result 0 | parts 2 | wait for sum 1: result 1 | ...
    compute  wait for parts 0: sum 0 | wait for parts 1: sum 1 | ...

Every piece has a step, the same on all ranks, and every engine goes by steps. A piece waits for fetches of pieces of
earlier steps only, and a fetch for its own piece: so ranks never wait for each other in a circle. Where a rank has
several pieces for a peer, the peer first says that it has begun the call, since only then flags of later phases may be
set (``registry``).

What an all_to_all in place fetches overwrites bytes that are to be sent: between two ranks a piece is fetched after the
own piece that lay there was copied out, among more ranks after all of them, and each has a slot of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from sidelane.program.batch import Batch, parts_of
from sidelane.program.builders.moving import copy_own, output_of, rotation
from sidelane.program.builders.registry import Algorithm, FlagPlan, Transport, register
from sidelane.program.collective import REDUCING, Buffer, Kind, Reduction, Span
from sidelane.program.collective import Collective as Call
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Program, Queue, Reduce, Signal, Wait
from sidelane.program.shape import CallShape

SLOTS = 4
"""Slots of a rank: pieces that may be under way."""

PIECE_COST_BYTES = 256 << 10
"""Bytes that pass in the time that a further piece takes for its copies and flags, 7 us at 40 GB/s. Pieces of the
square root of this times a call's bytes were best from 1 to 256 MiB, out of an H200 and back
(results/notes/no-peers.md)."""

MOST_BYTES = 16 << 20
"""Largest size in bytes of a piece that is chosen by itself; larger ones gain nothing."""

MOST_FLAGS = 500
"""Flags of a rank that a program takes: with those of transforms, all are read to explain a stall."""

ALIGNMENT = 256
"""Alignment in bytes of a part in its slot, a multiple of every element size."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes that go to some receivers.

    Attributes:
        source: where they lie.
        targets: where each receiver puts them.
        reduction: operation, if the receiver adds them up with those of the other ranks.
        results: where the other ranks put the sum; empty if they do not get it.
    """

    source: Span
    targets: Mapping[int, Span]
    reduction: Reduction | None = None
    results: Mapping[int, Span] = dataclasses.field(default_factory=dict)

    def on(self, change: Callable[[Span], Span]) -> _Segment:
        """Return the same segment on other spans."""
        targets, results = ({to: change(span) for to, span in of.items()} for of in (self.targets, self.results))
        return dataclasses.replace(self, source=change(self.source), targets=targets, results=results)

    def cut(self, begin: int, nbytes: int) -> _Segment:
        return self.on(lambda span: dataclasses.replace(span, offset=span.offset + begin, nbytes=nbytes))


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Segments that one slot of the sender holds, each at its offset.

    Attributes:
        sender: rank that copies it out.
        step: its place in the order of all ranks.
        segments: offsets in the slot, and segments.
        number: number of the sum among those of a receiver, for a part of it or for its result; -1 for moves.
        is_result: it is the result of that sum.
    """

    sender: int
    step: tuple[int, int]
    segments: tuple[tuple[int, _Segment], ...]
    number: int = -1
    is_result: bool = False

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(self.segments[0][1].targets)

    @property
    def is_summed(self) -> bool:
        return self.number >= 0 and not self.is_result


def chunked(
    definition: Call | Batch, transport: Transport = Transport.STAGED, piece_bytes: int = 0, slots: int = SLOTS
) -> Program:
    """Build a program that moves everything through staging in pieces.

    Args:
        definition: collective, or several at once.
        transport: not used: staging is what peers read, whatever memory the tensors are in.
        piece_bytes: size of a piece, a multiple of ``ALIGNMENT``; 0 to choose it by the size of the call.
        slots: least number of slots of a rank, 1 or more; sums take more.
    """
    return _Chunked(definition, piece_bytes, slots).program()


class _Chunked:
    def __init__(self, definition: Call | Batch, piece_bytes: int, slots: int) -> None:
        self.definition = definition
        self.world_size = n = definition.world_size
        self.own: dict[int, list[Copy]] = {rank: [] for rank in range(n)}
        self.moved: dict[tuple[int, tuple[int, ...]], list[_Segment]] = {}  # by sender and receivers
        self.added: dict[tuple[int, int], list[_Segment]] = {}  # by sender, which may be the receiver itself, and that
        self.overwrites = False
        for call, placed in parts_of(definition):
            self.overwrites |= call.in_place and call.kind is Kind.ALL_TO_ALL and n > 1
            for sender, unplaced in _segments(call):
                segment = unplaced.on(placed)
                receivers = tuple(segment.targets)
                if segment.reduction is not None and n > 1:
                    self.added.setdefault((sender, receivers[0]), []).append(segment)
                elif receivers != (sender,):
                    self.moved.setdefault((sender, receivers), []).append(segment)
                elif segment.targets[sender] != segment.source:
                    self.own[sender].append(Copy(segment.targets[sender], segment.source))
        self.piece_bytes = piece_bytes or self._worthwhile_bytes()
        self.pieces = self._cut()
        self.in_pairs = n == 2 and not isinstance(definition, Batch)
        if self.overwrites and not self.in_pairs:
            slots = max(slots, *map(len, self.pieces))
        self.slots = max(itertools.starmap(self._slots, itertools.product(self.pieces, [slots])))
        self.phases: dict[tuple[int, int, int], int] = {}  # by sender, number of the piece, receiver
        counts: dict[tuple[int, int], int] = {}
        for sender, pieces in enumerate(self.pieces):
            for number, piece in enumerate(pieces):
                for to in piece.receivers:
                    self.phases[sender, number, to] = counts[sender, to] = counts.get((sender, to), -1) + 1
        self.pairs = counts.keys()
        self.meets = int(max(counts.values(), default=0) > 0)
        self.sums = 1 + max((piece.number for pieces in self.pieces for piece in pieces), default=-1)
        self.flags = FlagPlan(n, phases=1 + self.meets + max(counts.values(), default=0))  # a trigger is no entry

    def program(self) -> Program:
        queues: list[Queue] = []
        for rank in range(self.world_size):
            work = {
                Engine(EngineKind.DMA, 0): self._out(rank),
                Engine(EngineKind.DMA, 1): self._fetched(rank),
                Engine(EngineKind.COMPUTE): self._added(rank),
            }
            senders = [peer for peer in rotation(rank, self.world_size) if (peer, rank) in self.pairs]
            begun = [self.flags.signal_entry(partner=rank, mover=peer) for peer in senders if self.meets]
            for engine, commands in work.items():
                if commands:
                    queues.append(Queue(rank, engine, (*begun, *commands)))
                    begun = []
            if self.own[rank]:
                queues.append(Queue(rank, Engine(EngineKind.LOCAL), tuple(self.own[rank])))
        staging = tuple(min(self.slots, len(pieces)) * self.piece_bytes for pieces in self.pieces)
        local = self.sums + (max(map(len, self.pieces)) if self.overwrites else 0)
        return Program(self.definition, CHUNKED, tuple(queues), staging, self.flags.handshakes + local)

    def _worthwhile_bytes(self) -> int:
        """Return the size of the pieces, which are few enough for the flags, and as long as the longest stream."""
        sizes: dict[int, list[int]] = {}
        streams: dict[tuple[int, int], int] = {}  # of each pair of ranks
        added = {(sender, (to,)): segments for (sender, to), segments in self.added.items() if sender != to}
        for (sender, receivers), segments in (*self.moved.items(), *added.items()):
            sizes.setdefault(sender, []).append(sum(_room(segment.source.nbytes) for segment in segments))
            for to in receivers:
                streams[sender, to] = streams.get((sender, to), 0) + 1
        longest = max(itertools.chain.from_iterable(sizes.values()), default=1)
        whole = longest if added else max(map(sum, sizes.values()), default=1)
        wanted = min(math.isqrt(whole * PIECE_COST_BYTES), MOST_BYTES)
        most = max(streams.values(), default=1) + bool(added)  # with results
        pieces = (MOST_FLAGS - 4 * self.world_size) // (2 * self.world_size * most + 2)
        return _room(min(max(wanted, -(-longest // max(1, pieces))), longest))

    def _slots(self, pieces: Sequence[_Piece], slots: int) -> int:
        """Return the slots of a sender: a piece goes where one lay that is read at an earlier step.

        Sums take twice as many, so that parts of the next one are copied while one is added.
        """
        for least in itertools.count(1):
            # Receivers have read a piece when engines come to the later one: sums wait for all of a step.
            last = [(piece.step[0], self.world_size) if piece.is_summed else piece.step for piece in pieces]
            if all(step < piece.step for step, piece in zip(last, pieces[least:], strict=False)):
                return max(slots, 2 * least if any(piece.is_summed for piece in pieces) else least)
        raise AssertionError("a sender has a slot for each piece")

    def _cut(self) -> list[list[_Piece]]:
        """Return the pieces of each sender, in the order of their steps."""
        n = self.world_size
        found: list[list[_Piece]] = [[] for _ in range(n)]
        for (sender, receivers), segments in self.moved.items():
            place = (receivers[0] - sender) % n if len(receivers) == 1 else 0
            packed = enumerate(_packed(segments, self.piece_bytes))
            found[sender] += [_Piece(sender, (2 * number, place), piece) for number, piece in packed]
        for (sender, to), segments in self.added.items():
            for number, piece in enumerate(_packed(segments, self.piece_bytes)):
                if sender != to:
                    found[sender].append(_Piece(sender, (2 * number, (to - sender) % n), piece, number))
                    continue
                results = [
                    (offset, _Segment(segment.targets[to], segment.results))
                    for offset, segment in piece
                    if segment.results
                ]
                if results:
                    found[to].append(_Piece(to, (2 * number + 3, 0), tuple(results), number, is_result=True))
        return [sorted(pieces, key=lambda piece: (*piece.step, piece.number)) for pieces in found]

    def _slot(self, sender: int, number: int, offset: int, nbytes: int) -> Span:
        return Span(sender, Buffer.STAGING, number % self.slots * self.piece_bytes + offset, nbytes)

    def _entry(self, sender: int, to: int, phase: int, command: type[Signal | Wait]) -> Signal | Wait:
        """Return the signal that a piece of a pair is in its slot, or the wait for it."""
        flag = self.flags.signal_entry(partner=sender, mover=to, phase=phase + self.meets).flag
        return command(flag, EPOCH)

    def _exits(self, rank: int, number: int) -> Iterator[Wait]:
        for to in self.pieces[rank][number].receivers:
            yield self.flags.wait_exit(partner=rank, mover=to, phase=self.phases[rank, number, to])

    def _has_exit(self, sender: int, number: int) -> bool:
        """Return False for a part whose slot the call uses no more: its sum's result says that it was read."""
        pieces = self.pieces[sender]
        has_result = pieces[number].is_summed and bool(pieces[number].segments[0][1].results)
        return number < len(pieces) - self.slots or not has_result

    def _out(self, rank: int) -> list[Command]:
        commands: list[Command] = []
        pieces, flags = self.pieces[rank], self.flags
        for number, piece in enumerate(pieces):
            if piece.is_result:
                commands.append(Wait(flags.local(rank, piece.number), EPOCH))
            if number >= self.slots:
                commands += self._exits(rank, number - self.slots)
            for offset, segment in piece.segments:
                commands.append(Copy(self._slot(rank, number, offset, segment.source.nbytes), segment.source))
            phases = {to: self.phases[rank, number, to] for to in piece.receivers}
            first = [to for to, phase in phases.items() if self.meets and not phase]
            commands += [flags.wait_entry(partner=to, mover=rank) for to in first]
            if self.overwrites and (self.in_pairs or number == len(pieces) - 1):
                commands.append(Signal(flags.local(rank, self.sums + number * self.in_pairs), EPOCH))
            commands += [self._entry(rank, to, phase, Signal) for to, phase in phases.items()]
        for number in range(max(0, len(pieces) - self.slots), len(pieces)):
            commands += self._exits(rank, number) if self._has_exit(rank, number) else ()
        return commands

    def _to(self, rank: int) -> Iterator[tuple[int, _Piece]]:
        """Yield the pieces for a rank, with their numbers, by steps."""
        all_pieces = itertools.chain.from_iterable(map(enumerate, self.pieces))
        found = [(number, piece) for number, piece in all_pieces if rank in piece.receivers]
        yield from sorted(found, key=lambda item: (*item[1].step, (rank - item[1].sender) % self.world_size))

    def _fetched(self, rank: int) -> list[Command]:
        commands: list[Command] = []
        if self.overwrites and self.pieces[rank] and not self.in_pairs:
            commands.append(Wait(self.flags.local(rank, self.sums), EPOCH))
        for number, piece in self._to(rank):
            if piece.is_summed:
                continue
            phase = self.phases[piece.sender, number, rank]
            commands.append(self._entry(piece.sender, rank, phase, Wait))
            if self.overwrites and self.in_pairs:  # its own piece of that number lay there
                commands.append(Wait(self.flags.local(rank, self.sums + number), EPOCH))
            for offset, segment in piece.segments:
                slot = self._slot(piece.sender, number, offset, segment.source.nbytes)
                commands.append(Copy(segment.targets[rank], slot))
            commands.append(self.flags.signal_exit(partner=piece.sender, mover=rank, phase=phase))
        return commands

    def _added(self, rank: int) -> list[Command]:
        commands: list[Command] = []
        came = [(number, piece) for number, piece in self._to(rank) if piece.is_summed]
        own = self.added.get((rank, rank), ())
        for place, mine in enumerate(_packed(own, self.piece_bytes)):
            parts = {piece.sender: (number, piece) for number, piece in came if piece.number == place}
            phases = {sender: self.phases[sender, number, rank] for sender, (number, _) in parts.items()}
            for sender, phase in phases.items():
                commands.append(self._entry(sender, rank, phase, Wait))
            for offset, segment in mine:
                assert segment.reduction is not None
                srcs = tuple(
                    segment.source if src == rank else self._slot(src, parts[src][0], offset, segment.source.nbytes)
                    for src in range(self.world_size)
                )
                commands.append(Reduce(segment.targets[rank], srcs, segment.reduction))
            if any(segment.results for _, segment in mine):
                commands.append(Signal(self.flags.local(rank, place), EPOCH))
            for sender, phase in phases.items():
                if self._has_exit(sender, parts[sender][0]):
                    commands.append(self.flags.signal_exit(partner=sender, mover=rank, phase=phase))
        return commands


def _segments(call: Call) -> Iterator[tuple[int, _Segment]]:
    """Yield the bytes that a collective moves, by their senders: those that several ranks receive once."""
    shared: dict[tuple[int, int, int], dict[int, Span]] = {}
    for chunk in call.chunks():
        source = call.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)
        target = output_of(call, chunk)
        if call.kind in REDUCING:
            peers = rotation(chunk.dst_rank, call.world_size) if call.kind is Kind.ALL_REDUCE else ()
            results = {to: call.output_span(to, chunk.dst_offset, chunk.nbytes) for to in peers}
            yield chunk.src_rank, _Segment(source, {chunk.dst_rank: target}, call.reduction, results)
        elif chunk.src_rank == chunk.dst_rank:
            for copy in copy_own(call, chunk):
                yield chunk.src_rank, _Segment(copy.src, {chunk.src_rank: copy.dst})
        else:
            key = chunk.src_rank, chunk.src_offset, chunk.nbytes
            shared.setdefault(key, {})[chunk.dst_rank] = target
    for (sender, offset, nbytes), targets in shared.items():
        yield sender, _Segment(call.input_span(sender, offset, nbytes), targets)


def _packed(segments: Sequence[_Segment], piece_bytes: int) -> list[tuple[tuple[int, _Segment], ...]]:
    """Pack segments into pieces one behind the other, each at its offset, and cut those that do not fit.

    >>> from sidelane.program.collective import Buffer
    >>> spans = [Span(0, Buffer.INPUT, 0, 300), Span(0, Buffer.INPUT, 300, 400)]
    >>> pieces = _packed([_Segment(span, {}) for span in spans], 512)
    >>> [[(offset, segment.source.nbytes) for offset, segment in piece] for piece in pieces]
    [[(0, 300)], [(0, 400)]]
    """
    pieces: list[list[tuple[int, _Segment]]] = [[]]
    used = 0
    for segment in segments:
        begin = 0
        while begin < segment.source.nbytes:
            if used >= piece_bytes:
                pieces.append([])
                used = 0
            nbytes = min(segment.source.nbytes - begin, piece_bytes - used)
            pieces[-1].append((used, segment.cut(begin, nbytes)))
            begin, used = begin + nbytes, _room(used + nbytes)
    return [tuple(piece) for piece in pieces if piece]


def _room(nbytes: int) -> int:
    """Return the bytes that so many take in a slot."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


CHUNKED = "chunked"
"""Name of the variant."""


def _default_rule(shape: CallShape) -> str:
    return "copy engines in pieces, out and in at once" if shape.nbytes >= 4 * PIECE_COST_BYTES else ""


register(
    Algorithm(
        name=CHUNKED,
        kinds=tuple(Kind),
        preference=95,
        assemble=chunked,
        whole=chunked,
        whole_batch=chunked,
        default_rule=_default_rule,
        through_host=True,
    )
)

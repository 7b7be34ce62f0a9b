"""Build hybrid programs for the collectives that add: copy engines move the bytes, compute units reduce them.

A rank's peers push their chunks of its shard into slots of its staging buffer; its compute queue waits for all of them
and reduces in the order of the ranks, so that the result does not depend on the order of arrival (DMA collectives
paper, 6.1, sketches this half). An all_reduce goes on with the results: pushed into the peers' outputs if these are
symmetric, else left in staging, from where the peers pull them.

Large shards travel in pieces, so that reducing one hides behind the copies of the next. One rank, two pieces, b2b::

    reduce_scatter
    dma:0    entries | copies, exits of piece 0 | copies, exits of piece 1
    compute            wait for all exits of piece 0: reduce      | wait: reduce

    all_reduce
    dma:0    entries | copies of piece 0 | copies of piece 1, exits of piece 1 |      | results of 0 | results of 1
    local:0            wait for those ^  : exits of piece 0
    compute            wait for all exits of piece 0: reduce      | wait: reduce

In a reduce_scatter the exits of a piece stand between its copies and those of the next, 5 us of hundreds. In a stream
of their own they come late where that shares a hardware channel with the copies, and nothing overlaps: 2,480 us for
1 GiB in a graph, not 2,230. An all_reduce has them there all the same: with exits between the copies a captured one
took 5,650 us, not 4,450 (results/notes/probes.md).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from sidelane.program.builders.moving import copy_own, rotation
from sidelane.program.builders.registry import Algorithm, FlagPlan, Transport, register
from sidelane.program.collective import REDUCING, SLOT_ALIGNMENT, Buffer, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Reduce, Signal, Wait

PIECES_FROM = (32 << 20, 64 << 20, 256 << 20)
"""Bytes of a shard from which two, three and four pieces are faster on four H200s. In a reduce_scatter only the last
piece's reduction shows, so each is smaller than the one before it; the results of an all_reduce's first half hide the
second's, and more pieces would only let the ranks fall out of step (results/notes/probes.md)."""


def reduce(
    collective: Collective,
    variant: str = "b2b",
    transport: Transport = Transport.PUSH,
    pieces: Sequence[int] | None = None,
) -> Program:
    """Build a reduce_scatter or all_reduce.

    Args:
        collective: made by ``reduce_scatter`` or ``all_reduce``. The input may be ordinary memory.
        variant: ``pcpy`` (an engine for each peer) or ``b2b`` (one engine a rank).
        transport: ``push`` writes into the outputs of an all_reduce, which must be symmetric; any other leaves its
            results in staging. A reduce_scatter is the same with all.
        pieces: relative sizes of the pieces of a shard; None for :func:`worthwhile_pieces`.

    Raises:
        ValueError: the collective or the variant is another one, or there are no pieces.
    """
    if collective.kind not in REDUCING or collective.reduction is None:
        raise ValueError(f"reduce: collective (value={collective.kind}, allowed={', '.join(REDUCING)})")
    if variant not in ("pcpy", "b2b"):
        raise ValueError(f"reduce: variant (value={variant!r}, allowed='pcpy', 'b2b')")
    if pieces is None:
        pieces = worthwhile_pieces(collective)
    if not pieces or min(pieces) < 1:
        raise ValueError(f"reduce: pieces (value={tuple(pieces)}, allowed=relative sizes of 1 or more)")
    if collective.world_size == 1:
        copies = [copy for chunk in collective.chunks() for copy in copy_own(collective, chunk)]
        queues = (Queue(0, Engine(EngineKind.LOCAL), tuple(copies)),) if copies else ()
        return Program(collective, variant, queues, (0,), 0)
    return _Reducing(collective, variant, pieces, pushes=transport is Transport.PUSH).program()


def worthwhile_pieces(collective: Collective) -> tuple[int, ...]:
    """Return the relative sizes of the pieces of a shard."""
    pieces = 1 + bisect.bisect_right(PIECES_FROM, max(collective.counts[0]))
    return (1,) * min(pieces, 2) if collective.kind is Kind.ALL_REDUCE else tuple(range(pieces, 0, -1))


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a shard, and the phase of their handshakes."""

    phase: int
    offset: int
    nbytes: int


class _Reducing:
    def __init__(self, collective: Collective, variant: str, pieces: Sequence[int], *, pushes: bool) -> None:
        self.collective = collective
        self.variant = variant
        gathers = collective.kind is Kind.ALL_REDUCE
        self.pushes, self.pulls = gathers and pushes, gathers and not pushes
        self.shards = collective.counts[0]
        self.pieces = [list(_cut(nbytes, pieces)) for nbytes in self.shards]
        self.phases = max(map(len, self.pieces))
        self.announced = max(0, self.phases - 1) if gathers else 0
        # The second half has exits once; entries for each piece where peers pull it.
        second_half = self.phases if self.pulls else 1 if self.pushes else 0
        self.flags = FlagPlan(collective.world_size, phases=self.phases + second_half)
        self.chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}

    def program(self) -> Program:
        world_size = self.collective.world_size
        queues: list[Queue] = []
        for rank in range(world_size):
            peers = list(rotation(rank, world_size))
            groups = [[peer] for peer in peers] if self.variant == "pcpy" else [peers]
            dma = [self._dma(rank, number, group) for number, group in enumerate(groups)]
            queues += [
                Queue(rank, Engine(EngineKind.DMA, number), tuple(commands))
                for number, commands in enumerate(commands for commands in dma if commands)
            ]
            if announced := self._announce(rank, groups):
                queues.append(Queue(rank, Engine(EngineKind.LOCAL), tuple(announced)))
            if self.shards[rank]:
                queues.append(Queue(rank, Engine(EngineKind.COMPUTE), tuple(self._compute(rank, len(groups)))))
        slots = world_size if self.pulls else world_size - 1
        staging = tuple(self._slot(rank, slots) for rank in range(world_size))
        local_flags = world_size * (self.announced + (self.phases if self.pushes else 0))
        return Program(self.collective, self.variant, tuple(queues), staging, self.flags.handshakes + local_flags)

    def _dma(self, rank: int, number: int, group: Sequence[int]) -> list[Command]:
        flags = self.flags
        reducers = [peer for peer in group if self.shards[peer]]
        commands: list[Command] = []
        if self.shards[rank]:
            commands += [flags.signal_entry(partner=rank, mover=peer) for peer in group]
        commands += [flags.wait_entry(partner=peer, mover=rank) for peer in reducers]
        for phase in range(self.phases):
            moved = [(peer, piece) for peer in reducers for piece in self.pieces[peer] if piece.phase == phase]
            commands += [Copy(self._slot_span(peer, rank, p), self.input_span(rank, peer, p)) for peer, p in moved]
            if phase >= self.announced:
                commands += [flags.signal_exit(partner=peer, mover=rank, phase=phase) for peer, _ in moved]
            elif moved:
                commands.append(Signal(self._sent(rank, number, phase), EPOCH))
        if self.pushes:
            commands += self._push_results(rank, number, group)
        elif self.pulls:
            commands += self._pull_results(rank, group)
        return commands

    def _announce(self, rank: int, groups: Sequence[Sequence[int]]) -> list[Command]:
        """Return the exits that an all_reduce has in a stream of their own."""
        commands: list[Command] = []
        for phase in range(self.announced):
            for number, group in enumerate(groups):
                told = [peer for peer in group if any(piece.phase == phase for piece in self.pieces[peer])]
                if told:
                    commands.append(Wait(self._sent(rank, number, phase), EPOCH))
                    commands += [self.flags.signal_exit(partner=peer, mover=rank, phase=phase) for peer in told]
        return commands

    def _compute(self, rank: int, engines: int) -> list[Command]:
        collective, flags = self.collective, self.flags
        assert collective.reduction is not None
        peers = list(rotation(rank, collective.world_size))
        commands: list[Command] = []
        own: list[Command] = []
        for piece in self.pieces[rank]:
            commands += [flags.wait_exit(partner=rank, mover=peer, phase=piece.phase) for peer in peers]
            srcs = tuple(
                self.input_span(rank, rank, piece) if src == rank else self._slot_span(rank, src, piece)
                for src in range(collective.world_size)
            )
            output = Reduce(self.output_span(rank, rank, piece), srcs, collective.reduction)
            if not self.pulls:
                commands.append(output)
                if self.pushes:
                    commands += [Signal(self._reduced(rank, number, piece.phase), EPOCH) for number in range(engines)]
                continue
            phase = self.phases + piece.phase
            commands.append(Reduce(self._result_span(rank, piece), srcs, collective.reduction))
            commands += [flags.signal_entry(partner=rank, mover=peer, phase=phase) for peer in peers]
            own.append(output)
        # Reducing once more takes as long as a copy out of staging, and leaves the engines to the peers' pulls.
        return [*commands, *own]

    def _push_results(self, rank: int, number: int, group: Sequence[int]) -> list[Command]:
        """Send the own results to the peers of one engine.

        The peers' outputs may be written without an entry: each peer has sent its part of the reduced bytes, so it is
        in this call and no longer reads that part of its input, which in place is the destination of the result.
        """
        flags = self.flags
        commands: list[Command] = []
        for piece in self.pieces[rank]:
            commands.append(Wait(self._reduced(rank, number, piece.phase), EPOCH))
            result = self.output_span(rank, rank, piece)
            commands += [Copy(self.output_span(rank, peer, piece), result) for peer in group]
        if self.shards[rank]:
            commands += [flags.signal_exit(partner=peer, mover=rank, phase=self.phases) for peer in group]
        return commands + [
            flags.wait_exit(partner=rank, mover=peer, phase=self.phases) for peer in group if self.shards[peer]
        ]

    def _pull_results(self, rank: int, group: Sequence[int]) -> list[Command]:
        """Fetch the results of the peers of one engine, and signal them that their staging may be used again."""
        flags = self.flags
        commands: list[Command] = []
        for phase in range(self.phases):
            ready = [(peer, piece) for peer in group for piece in self.pieces[peer] if piece.phase == phase]
            commands += [flags.wait_entry(partner=peer, mover=rank, phase=self.phases + phase) for peer, _ in ready]
            commands += [
                Copy(self.output_span(peer, rank, piece), self._result_span(peer, piece)) for peer, piece in ready
            ]
        commands += [
            flags.signal_exit(partner=peer, mover=rank, phase=self.phases) for peer in group if self.shards[peer]
        ]
        if self.shards[rank]:
            commands += [flags.wait_exit(partner=rank, mover=peer, phase=self.phases) for peer in group]
        return commands

    def _sent(self, rank: int, number: int, phase: int) -> Flag:
        """Return the flag that engine ``number`` sets after it has moved its pieces of ``phase``."""
        return self.flags.local(rank, phase * self.collective.world_size + number)

    def _reduced(self, rank: int, number: int, phase: int) -> Flag:
        """Return the flag that says that the result of ``phase``'s piece is ready for engine ``number`` to send."""
        return self.flags.local(rank, (self.announced + phase) * self.collective.world_size + number)

    def _slot(self, rank: int, index: int) -> int:
        """Return the offset of staging slot ``index`` on ``rank``."""
        return index * -(-self.shards[rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def _slot_span(self, rank: int, src_rank: int, piece: _Piece) -> Span:
        """Return the slot for ``src_rank``'s bytes: slots are in the order of ranks without the reducing one."""
        index = src_rank - (src_rank > rank)
        return Span(rank, Buffer.STAGING, self._slot(rank, index) + piece.offset, piece.nbytes)

    def _result_span(self, rank: int, piece: _Piece) -> Span:
        offset = self._slot(rank, self.collective.world_size - 1) + piece.offset
        return Span(rank, Buffer.STAGING, offset, piece.nbytes)

    def input_span(self, rank: int, shard: int, piece: _Piece) -> Span:
        offset = self.chunks[rank, shard].src_offset + piece.offset
        return self.collective.input_span(rank, offset, piece.nbytes)

    def output_span(self, shard: int, rank: int, piece: _Piece) -> Span:
        offset = self.chunks[shard, shard].dst_offset + piece.offset
        return self.collective.output_span(rank, offset, piece.nbytes)


def _cut(nbytes: int, pieces: Sequence[int]) -> Iterator[_Piece]:
    """Cut a shard into consecutive pieces of about these relative sizes, none of them empty.

    >>> [(piece.offset, piece.nbytes) for piece in _cut(3000, (2, 1))]
    [(0, 2048), (2048, 952)]
    """
    start = phase = 0
    for upto in itertools.accumulate(pieces):
        end = min(nbytes, -(-nbytes * upto // (sum(pieces) * SLOT_ALIGNMENT)) * SLOT_ALIGNMENT)
        if end > start:
            yield _Piece(phase, start, end - start)
            start, phase = end, phase + 1


def _register(variant: str, preference: int) -> None:
    def part(collective: Collective, transport: Transport) -> Program:
        # In one piece: phases of different parts would not be about the same flags. Results are pulled: they have the
        # entries of the second half, of which there is one for all parts.
        return reduce(collective, variant, Transport.STAGED, pieces=(1,))

    def whole(collective: Collective, transport: Transport) -> Program:
        return reduce(collective, variant, transport)

    register(Algorithm(name=variant, kinds=tuple(sorted(REDUCING)), preference=preference, assemble=part, whole=whole))


_register("b2b", 0)
_register("pcpy", 90)

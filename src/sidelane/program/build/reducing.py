"""Hybrid programs for the collectives that add: copy engines move the bytes, compute units reduce them.

A rank's peers push their chunks of its shard into slots of its staging buffer; its compute queue waits for all of them
and reduces in the order of the ranks, so that the result does not depend on who came first (paper 003, section 6.1,
sketches this half). An all_reduce leaves the result in staging, from where the peers pull it into their outputs.
(Pushing it there needs one handshake less and was slower: ranks whose reductions end at different times get in each
other's way; docs/performance.md.)

Large shards travel in pieces, so that reducing one hides behind the copies of the next. One rank, two pieces, b2b::

    dma:0    entries | copies of piece 0 | copies of piece 1, exits of piece 1 |         | results ...
    local:0            wait for those ^  : exits of piece 0
    compute            wait for all exits of piece 0: reduce      | wait: reduce

The exits of all pieces but the last have a queue of their own: nothing stands between the copies of an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from sidelane.program.build.flags import FlagPlan
from sidelane.program.build.moving import rotation
from sidelane.program.collective import REDUCING, SLOT_ALIGNMENT, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Reduce, Signal, Wait

PIECE_BYTES = 32 << 20
"""Smallest piece worth its price: on four H200s each costs some 20 us, as much as reducing 16 MiB from every rank."""

MOST_PIECES = 4
"""Only the last piece's reduction shows; more of them cost more than they hide."""


def reduce(collective: Collective, variant: str = "b2b", pieces: int | None = None) -> Program:
    """Build a reduce_scatter or all_reduce.

    Args:
        collective: made by ``reduce_scatter`` or ``all_reduce``. Input and output may be ordinary memory.
        variant: ``pcpy`` (an engine for each peer) or ``b2b`` (one engine a rank).
        pieces: into how many a shard is cut; None takes as many as have ``PIECE_BYTES``, up to ``MOST_PIECES``.

    Raises:
        ValueError: another collective or variant, or no pieces.
    """
    if collective.kind not in REDUCING or collective.reduction is None:
        raise ValueError(f"reduce: collective (value={collective.kind}, allowed={', '.join(REDUCING)})")
    if variant not in ("pcpy", "b2b"):
        raise ValueError(f"reduce: variant (value={variant!r}, allowed='pcpy', 'b2b')")
    if pieces is None:
        pieces = min(MOST_PIECES, max(collective.counts[0]) // PIECE_BYTES) or 1
    if pieces < 1:
        raise ValueError(f"reduce: pieces (value={pieces}, allowed=1 or more)")
    if collective.world_size == 1:
        return Program(collective, variant, tuple(_copy_alone(collective)), (0,), 0)
    return _Reducing(collective, variant, pieces).program()


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a shard, and the phase of the handshakes that are about them."""

    phase: int
    offset: int
    nbytes: int


class _Reducing:
    def __init__(self, collective: Collective, variant: str, pieces: int) -> None:
        self.collective = collective
        self.variant = variant
        self.gathers = collective.kind is Kind.ALL_REDUCE
        self.shards = collective.counts[0]
        self.pieces = [list(_cut(nbytes, pieces)) for nbytes in self.shards]
        self.phases = max(map(len, self.pieces))
        # The second half has entries for each piece, and exits once.
        self.flags = FlagPlan(collective.world_size, phases=2 * self.phases if self.gathers else self.phases)
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
                queues.append(Queue(rank, Engine(EngineKind.COMPUTE), tuple(self._compute(rank))))
        slots = world_size if self.gathers else world_size - 1
        staging = tuple(self._slot(rank, slots) for rank in range(world_size))
        local_flags = max(0, self.phases - 1) * world_size
        return Program(self.collective, self.variant, tuple(queues), staging, self.flags.handshakes + local_flags)

    def _dma(self, rank: int, number: int, group: Sequence[int]) -> list[Command]:
        flags = self.flags
        reducers = [peer for peer in group if self.shards[peer]]
        commands: list[Command] = []
        if self.shards[rank]:
            commands += [flags.signal_entry(partner=rank, mover=peer) for peer in group]
        commands += [flags.wait_entry(partner=peer, mover=rank) for peer in reducers]
        last = self.phases - 1
        for phase in range(self.phases):
            moved = [(peer, piece) for peer in reducers for piece in self.pieces[peer] if piece.phase == phase]
            commands += [Copy(self._slot_span(peer, rank, p), self._input_span(rank, peer, p)) for peer, p in moved]
            if phase < last:
                if moved:
                    commands.append(Signal(self._sent(rank, number, phase), EPOCH))
            else:
                commands += [flags.signal_exit(partner=peer, mover=rank, phase=phase) for peer, _ in moved]
        if self.gathers:
            commands += self._pull_results(rank, group)
        return commands

    def _announce(self, rank: int, groups: Sequence[Sequence[int]]) -> list[Command]:
        """The exits of every piece but the last."""
        commands: list[Command] = []
        for phase in range(self.phases - 1):
            for number, group in enumerate(groups):
                told = [peer for peer in group if any(piece.phase == phase for piece in self.pieces[peer])]
                if told:
                    commands.append(Wait(self._sent(rank, number, phase), EPOCH))
                    commands += [self.flags.signal_exit(partner=peer, mover=rank, phase=phase) for peer in told]
        return commands

    def _compute(self, rank: int) -> list[Command]:
        collective, flags = self.collective, self.flags
        assert collective.reduction is not None
        peers = list(rotation(rank, collective.world_size))
        commands: list[Command] = []
        own: list[Command] = []
        for piece in self.pieces[rank]:
            commands += [flags.wait_exit(partner=rank, mover=peer, phase=piece.phase) for peer in peers]
            srcs = tuple(
                self._input_span(rank, rank, piece) if src == rank else self._slot_span(rank, src, piece)
                for src in range(collective.world_size)
            )
            output = Reduce(self._output_span(rank, rank, piece), srcs, collective.reduction)
            if not self.gathers:
                commands.append(output)
                continue
            phase = self.phases + piece.phase
            commands.append(Reduce(self._result_span(rank, piece), srcs, collective.reduction))
            commands += [flags.signal_entry(partner=rank, mover=peer, phase=phase) for peer in peers]
            own.append(output)
        # Reducing once more takes what a copy out of staging would, and leaves the engines to the peers' pulls.
        return [*commands, *own]

    def _pull_results(self, rank: int, group: Sequence[int]) -> list[Command]:
        """Fetch the results of the peers of one engine, and tell them when their staging may be used again."""
        flags = self.flags
        commands: list[Command] = []
        for phase in range(self.phases):
            ready = [(peer, piece) for peer in group for piece in self.pieces[peer] if piece.phase == phase]
            commands += [flags.wait_entry(partner=peer, mover=rank, phase=self.phases + phase) for peer, _ in ready]
            commands += [
                Copy(self._output_span(peer, rank, piece), self._result_span(peer, piece)) for peer, piece in ready
            ]
        commands += [
            flags.signal_exit(partner=peer, mover=rank, phase=self.phases) for peer in group if self.shards[peer]
        ]
        if self.shards[rank]:
            commands += [flags.wait_exit(partner=rank, mover=peer, phase=self.phases) for peer in group]
        return commands

    def _sent(self, rank: int, number: int, phase: int) -> Flag:
        """Engine ``number`` has moved its pieces of ``phase``."""
        return self.flags.local(rank, phase * self.collective.world_size + number)

    def _slot(self, rank: int, index: int) -> int:
        """Offset of staging slot ``index`` on ``rank``."""
        return index * -(-self.shards[rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def _slot_span(self, rank: int, src_rank: int, piece: _Piece) -> Span:
        """Where ``src_rank``'s bytes land: slots go by rank and leave out the reducing rank itself."""
        index = src_rank - (src_rank > rank)
        return Span(rank, Buffer.STAGING, self._slot(rank, index) + piece.offset, piece.nbytes)

    def _result_span(self, rank: int, piece: _Piece) -> Span:
        offset = self._slot(rank, self.collective.world_size - 1) + piece.offset
        return Span(rank, Buffer.STAGING, offset, piece.nbytes)

    def _input_span(self, rank: int, shard: int, piece: _Piece) -> Span:
        offset = self.chunks[rank, shard].src_offset + piece.offset
        return self.collective.input_span(rank, offset, piece.nbytes)

    def _output_span(self, shard: int, rank: int, piece: _Piece) -> Span:
        offset = self.chunks[shard, shard].dst_offset + piece.offset
        return self.collective.output_span(rank, offset, piece.nbytes)


def _cut(nbytes: int, pieces: int) -> Iterator[_Piece]:
    """Consecutive pieces of a shard, none of them empty.

    >>> [(piece.offset, piece.nbytes) for piece in _cut(1000, 3)]
    [(0, 512), (512, 488)]
    """
    step = -(-nbytes // (pieces * SLOT_ALIGNMENT)) * SLOT_ALIGNMENT
    for phase, offset in enumerate(range(0, nbytes, step or 1)):
        yield _Piece(phase, offset, min(step, nbytes - offset))


def _copy_alone(collective: Collective) -> Iterator[Queue]:
    chunk: Chunk | None = next(iter(collective.chunks()), None)
    if chunk is not None and not collective.in_place:
        src = collective.input_span(0, chunk.src_offset, chunk.nbytes)
        dst = collective.output_span(0, chunk.dst_offset, chunk.nbytes)
        yield Queue(0, Engine(EngineKind.LOCAL), (Copy(dst, src),))

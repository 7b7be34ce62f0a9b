"""Build relays: a broadcast in which every rank passes each chunk on to the next rank, on two engines.

Rank 0 is the root; ``0>1`` copies a chunk from rank 0 to rank 1::

    rank 0   dma:0   entry of 1, mark | 0>1, its exit | 0>1, its exit ...
             dma:1   mark?            | 0>1, its exit | 0>1, its exit ...
    rank 1   dma:0   entry for 0 | entry of 2, mark | chunk? 1>2, its exit | chunk? 1>2, its exit ...
             dma:1                 mark?            | chunk? ...
    rank 3   dma:0   entry for 2 | chunk? chunk? ...

So the bytes leave every rank once, where the other variants send them once to each peer, and every link has one writing
rank. When every peer gave a part of its own to all others, four H200s took 5.5 ms for 1 GiB, not 3.3: two
ranks that write to a third one have half of its link each, and wait for each other's parts. The engines take turns, one
chunk each, so that one copies while the other signals and waits.

The floor is ``S / B`` for S bytes over a link of B, plus ``n - 2`` times the time of a chunk; without relays
``(n - 1) S / B``. The algorithm is our own; kernels relay over all links at once (``kernels/broadcast.py``).
"""

from __future__ import annotations

import dataclasses

from sidelane.program.builders.moving import copy_own, rotation
from sidelane.program.builders.registry import Algorithm, FlagPlan, Transport, register
from sidelane.program.collective import Collective, Kind
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Program, Queue, Signal, Wait
from sidelane.program.shape import CallShape

RELAY = "relay"
"""Name of the variant."""

CHUNK_ALIGNMENT = 256
"""Alignment of chunks in bytes."""

CHUNK_BYTES, MOST_ROUNDS = 4 << 20, 16
"""Smallest size of a chunk in bytes, and the largest number of chunks of an engine. Each costs 4 to 5 us, although the
other engine copies meanwhile: four H200s take 356 us for 64 MiB in chunks of 2 MiB and 277 in chunks of 4."""

SAVES_BYTES = 16 << 20
"""Bytes saved by the root from which copy engines relay a broadcast, 8 MiB of message among four: on H200s 4 MiB take
55 us either way, 8 MiB 80 and not 95 (simulated), 16 MiB 105 and not 149."""

LANES = 2
"""Number of engines of a rank."""

MOST_FLAGS = 480
"""Largest number of flags of a program: a host must be able to read them all to explain a stall."""


def relay(collective: Collective, transport: Transport = Transport.PUSH, *, rounds: int | None = None) -> Program:
    """Build a broadcast.

    Args:
        collective: collective made by ``broadcast``.
        transport: ``push``: every rank writes into the next one's output.
        rounds: number of chunks of each engine; None for :func:`worthwhile_rounds`.

    Raises:
        ValueError: the collective or the transport is another one, or there are no rounds.
    """
    if collective.kind is not Kind.BROADCAST:
        raise ValueError(f"{RELAY}: collective (value={collective.kind}, allowed=broadcast)")
    if transport is not Transport.PUSH:
        raise ValueError(f"{RELAY}: transport (value={transport}, allowed=push): ranks write into each other's outputs")
    if rounds is None:
        rounds = worthwhile_rounds(collective)
    if rounds < 1:
        raise ValueError(f"{RELAY}: rounds (value={rounds}, allowed=1 and more)")
    return _Relay(collective, rounds).program()


def worthwhile_rounds(collective: Collective) -> int:
    """Return the number of chunks of an engine: chunks of ``CHUNK_BYTES``, within bounds.

    >>> from sidelane.program.collective import broadcast
    >>> [worthwhile_rounds(broadcast(nbytes << 20, 4, 0)) for nbytes in (1, 16, 64, 1024)]
    [1, 2, 8, 16]
    """
    most = min(MOST_ROUNDS, MOST_FLAGS // (2 * collective.world_size * LANES))
    return max(1, min(most, collective.largest_buffer // (LANES * CHUNK_BYTES)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    number: int
    offset: int
    nbytes: int


class _Relay:
    def __init__(self, collective: Collective, rounds: int) -> None:
        assert collective.root is not None
        self.collective, self.root = collective, collective.root
        self.ranks = [self.root, *rotation(self.root, collective.world_size)]
        self.flags = FlagPlan(collective.world_size, phases=rounds * LANES)
        self.chunks = _cut(collective.largest_buffer, rounds * LANES)

    def program(self) -> Program:
        queues = [self._lane(place, lane) for place in range(len(self.ranks)) for lane in range(LANES)]
        own = [
            copy
            for chunk in self.collective.chunks()
            if chunk.dst_rank == self.root
            for copy in copy_own(self.collective, chunk)
        ]
        queues.insert(LANES, Queue(self.root, Engine(EngineKind.LOCAL), tuple(own)))
        filled = tuple(queue for queue in queues if queue.commands)
        return Program(self.collective, RELAY, filled, (0,) * self.collective.world_size, self.flags.handshakes + 1)

    def _lane(self, place: int, lane: int) -> Queue:
        """Return the queue of an engine at the rank that the chunks reach ``place``-th."""
        flags, rank = self.flags, self.ranks[place]
        before = self.ranks[place - 1] if place else None
        behind = self.ranks[place + 1] if place + 1 < len(self.ranks) else None
        commands: list[Command] = []
        if lane == 0 and self.chunks:
            commands += [flags.signal_entry(rank, before)] if before is not None else []
            commands += [flags.wait_entry(behind, rank)] if behind is not None else []
        # One entry releases both engines: nothing comes before it, so it has phase 0 (see ``flags``).
        if behind is not None and self.chunks[1:]:
            mark = flags.local(rank, 0)
            commands.append(Signal(mark, EPOCH) if lane == 0 else Wait(mark, EPOCH))
        for chunk in self.chunks[lane::LANES]:
            if before is not None:
                commands.append(flags.wait_exit(rank, before, chunk.number))
            if behind is not None:
                commands += [self._copy(rank, behind, chunk), flags.signal_exit(behind, rank, chunk.number)]
        return Queue(rank, Engine(EngineKind.DMA, lane), tuple(commands))

    def _copy(self, rank: int, behind: int, chunk: _Chunk) -> Copy:
        """Return a copy from the root's input, or from the output into which the rank before has stored the chunk."""
        source = self.collective.input_span if rank == self.root else self.collective.output_span
        target = self.collective.output_span(behind, chunk.offset, chunk.nbytes)
        return Copy(target, source(rank, chunk.offset, chunk.nbytes))


def _cut(nbytes: int, count: int) -> list[_Chunk]:
    """Cut a buffer into chunks of about the same size, none of them empty.

    >>> [(chunk.number, chunk.offset, chunk.nbytes) for chunk in _cut(1000, 3)]
    [(0, 0, 512), (1, 512, 256), (2, 768, 232)]
    """
    step = count * CHUNK_ALIGNMENT
    ends = [min(nbytes, -(-nbytes * upto // step) * CHUNK_ALIGNMENT) for upto in range(count + 1)]
    chunks = [_Chunk(number, ends[number], ends[number + 1] - ends[number]) for number in range(count)]
    return [chunk for chunk in chunks if chunk.nbytes]


def _no_relay(shape: CallShape) -> str:
    return "has no third rank to relay to" if shape.world_size <= 2 else ""


def _default_rule(shape: CallShape) -> str:
    saves = shape.nbytes * (shape.world_size - 2) >= SAVES_BYTES
    return "copy engines, relayed from rank to rank" if saves else ""


register(
    Algorithm(
        name=RELAY,
        kinds=(Kind.BROADCAST,),
        preference=20,
        assemble=relay,
        into_outputs=True,
        merges=False,
        objection=_no_relay,
        default_rule=_default_rule,
    )
)

"""Programs for the collectives that only move bytes, in the variants of the DMA collectives paper, section 4.2.

=======  ==============================================================================================
variant  commands
=======  ==============================================================================================
pcpy     one copy and one engine for every pair of ranks: n(n-1) of each (4.2.1)
bcst     one command writes to two ranks, half the commands and engines; all_gather and broadcast (4.2.2)
swap     one command exchanges two chunks, half the commands; all_to_all with equal pairs (4.2.3)
b2b      all copies of a rank back to back on one engine (4.2.4)
=======  ==============================================================================================

The counts of the paper are for transfers between ranks. Bytes that stay on their rank go through a ``local`` engine
(``beside``), and so do those that peers fetch from staging.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from sidelane.program.builders.flags import FlagPlan
from sidelane.program.builders.registry import Algorithm, register
from sidelane.program.builders.transport import Transport
from sidelane.program.collective import REDUCING, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.ir import (
    EPOCH,
    Broadcast,
    Command,
    Copy,
    Engine,
    EngineKind,
    Program,
    Queue,
    Signal,
    Swap,
    Wait,
)
from sidelane.program.shape import CallShape

MOVING = tuple(kind for kind in Kind if kind not in REDUCING)


def pcpy(collective: Collective, transport: Transport = Transport.PUSH) -> Program:
    """Build a program with one engine for each pair of ranks (DMA collectives paper, 4.2.1)."""
    return _Moving(collective, transport, "pcpy").program(lambda peers: [[peer] for peer in peers])


def b2b(collective: Collective, transport: Transport = Transport.PUSH) -> Program:
    """Build a program with one engine a rank: rank r serves r+1 first (DMA collectives paper, 4.2.4)."""
    return _Moving(collective, transport, "b2b").program(lambda peers: [list(peers)] if peers else [])


def bcst(collective: Collective, transport: Transport = Transport.PUSH) -> Program:
    """Build broadcasts to two destinations, and a copy for a peer left over (DMA collectives paper, 4.2.2)."""
    if collective.kind not in (Kind.ALL_GATHER, Kind.BROADCAST):
        raise ValueError(f"bcst: collective (value={collective.kind}, allowed=all_gather, broadcast)")
    if transport is not Transport.PUSH:
        raise ValueError(f"bcst: transport (value={transport}, allowed=push: the command writes to its destinations)")
    return _Moving(collective, transport, "bcst").program(
        lambda peers: [list(peers[i : i + 2]) for i in range(0, len(peers), 2)]
    )


def swap(collective: Collective, transport: Transport = Transport.PUSH) -> Program:
    """Exchange chunks in pairs inside the output, where an input is copied first (DMA collectives paper, 4.2.3)."""
    counts = collective.counts
    if collective.kind is not Kind.ALL_TO_ALL:
        raise ValueError(f"swap: collective (value={collective.kind}, allowed=all_to_all)")
    if any(counts[i][j] != counts[j][i] for i in range(len(counts)) for j in range(i)):
        raise ValueError("swap: all_to_all must exchange equal counts between each two ranks")
    if transport is not Transport.PUSH:
        raise ValueError(f"swap: transport (value={transport}, allowed=push: both chunks are exchanged in the output)")
    if not collective.copies_own:
        raise ValueError(f"swap: {_SWAP_COPIES_ALL}")
    return _swap(collective)


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    src: Span
    dst: Span
    mover: int
    partner: int


class _Moving:
    """Assembler of queues: variants differ only in the way in which peers share engines."""

    def __init__(self, collective: Collective, transport: Transport, variant: str) -> None:
        if collective.in_place and collective.kind is Kind.ALL_TO_ALL and transport is not Transport.STAGED:
            raise ValueError(
                f"{variant}: an all_to_all in place overwrites bytes that are still to be sent "
                f"(transport={transport}, allowed=staged, or the variant swap)"
            )
        self.collective = collective
        self.transport = transport
        self.variant = variant
        self.flags = FlagPlan(collective.world_size, phases=1)
        self.local_flags = 0
        self.own = [chunk for chunk in collective.chunks() if chunk.src_rank == chunk.dst_rank]
        self.transfers = [self._transfer(chunk) for chunk in collective.chunks() if chunk.src_rank != chunk.dst_rank]
        self.active = {(transfer.mover, transfer.partner): transfer for transfer in self.transfers}

    def program(self, share_engines: Callable[[Sequence[int]], list[list[int]]]) -> Program:
        """Make the program; ``share_engines`` splits a rank's peers, in rotated order, into a list for each engine."""
        queues: list[Queue] = []
        for rank in range(self.collective.world_size):
            groups = share_engines(
                [peer for peer in rotation(rank, self.collective.world_size) if (rank, peer) in self.active]
            )
            dma = self._dma_queues(rank, groups)
            local: list[list[Command]] = []
            if self.transport is Transport.STAGED:
                local.append([*self._staging_commands(rank), *self._releases(rank, dma)])
            local.append(self._own_copies(rank))
            queues += dma
            filled: list[tuple[Command, ...]] = [tuple(commands) for commands in local if commands]
            queues += [Queue(rank, Engine(EngineKind.LOCAL, index), commands) for index, commands in enumerate(filled)]
        return Program(
            collective=self.collective,
            variant=self.variant,
            queues=tuple(queues),
            staging_bytes=tuple(self._staging_bytes(rank) for rank in range(self.collective.world_size)),
            flag_count=self.flags.handshakes + self.local_flags,
        )

    def _releases(self, rank: int, dma: list[Queue]) -> list[Command]:
        """Hold ``dma`` queues that overwrite the input until it is staged; return the signals that release them."""
        if not self._overwrites_own_input:
            return []
        flags = [self.flags.local(rank, index) for index in range(len(dma))]
        self.local_flags = max(self.local_flags, len(flags))
        dma[:] = [_preceded(queue, Wait(flag, EPOCH)) for queue, flag in zip(dma, flags, strict=True)]
        return [Signal(flag, EPOCH) for flag in flags]

    def _dma_queues(self, rank: int, groups: list[list[int]]) -> list[Queue]:
        movers = [peer for peer in rotation(rank, self.collective.world_size) if (peer, rank) in self.active]
        if movers and not groups:
            groups = [[]]
        queues = []
        for index, group in enumerate(groups):
            # A mover that this rank does not serve itself is answered by the first queue.
            answered = [peer for peer in movers if peer in group or (index == 0 and not any(peer in g for g in groups))]
            commands: list[Command] = []
            if self.transport is not Transport.STAGED:
                commands += [self.flags.signal_entry(partner=rank, mover=peer) for peer in answered]
            commands += self._moves(rank, group)
            commands += [self.flags.wait_exit(partner=rank, mover=peer) for peer in answered]
            queues.append(Queue(rank, Engine(EngineKind.DMA, index), tuple(commands)))
        return queues

    def _moves(self, rank: int, group: Sequence[int]) -> list[Command]:
        waits = [self.flags.wait_entry(partner=peer, mover=rank) for peer in group]
        exits = [self.flags.signal_exit(partner=peer, mover=rank) for peer in group]
        transfers = [self.active[rank, peer] for peer in group]
        if self.variant == "bcst" and len(group) == 2:
            first, second = transfers
            return [*waits, Broadcast((first.dst, second.dst), first.src), *exits]
        # Nothing stands between the copies of an engine: a signal or wait there would keep it from overlapping the end
        # of one with the beginning of the next (docs/lab/probes.md has the difference).
        return [*waits, *(Copy(transfer.dst, transfer.src) for transfer in transfers), *exits]

    def _own_copies(self, rank: int) -> list[Command]:
        spans = [(self._output_span(c), self._input_span(c)) for c in self.own if c.src_rank == rank]
        return [Copy(dst, src) for dst, src in spans if src != dst]

    def _staging_commands(self, rank: int) -> list[Command]:
        """Copy the bytes that peers will fetch, neighbours in one piece, and signal the peers."""
        movers = [peer for peer in rotation(rank, self.collective.world_size) if (peer, rank) in self.active]
        pieces: list[tuple[int, int]] = []
        for start, end in sorted({(span.offset, span.end) for span in (self.active[m, rank].src for m in movers)}):
            if pieces and pieces[-1][1] == start:
                start, _ = pieces.pop()
            pieces.append((start, end))
        copies = [
            Copy(Span(rank, Buffer.STAGING, start, end - start), self.collective.input_span(rank, start, end - start))
            for start, end in pieces
        ]
        return [*copies, *(self.flags.signal_entry(partner=rank, mover=mover) for mover in movers)]

    def _transfer(self, chunk: Chunk) -> _Transfer:
        src, dst = self._input_span(chunk), self._output_span(chunk)
        if self.transport is Transport.PUSH:
            return _Transfer(src, dst, mover=chunk.src_rank, partner=chunk.dst_rank)
        if self.transport is Transport.STAGED:
            src = Span(chunk.src_rank, Buffer.STAGING, chunk.src_offset, chunk.nbytes)
        return _Transfer(src, dst, mover=chunk.dst_rank, partner=chunk.src_rank)

    def _staging_bytes(self, rank: int) -> int:
        return max((transfer.src.end for transfer in self.transfers if transfer.src.rank == rank), default=0) * (
            self.transport is Transport.STAGED
        )

    @property
    def _overwrites_own_input(self) -> bool:
        return self.collective.in_place and self.collective.kind is Kind.ALL_TO_ALL

    def _input_span(self, chunk: Chunk) -> Span:
        return self.collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)

    def _output_span(self, chunk: Chunk) -> Span:
        return self.collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)


def _preceded(queue: Queue, command: Command) -> Queue:
    return dataclasses.replace(queue, commands=(command, *queue.commands))


def rotation(rank: int, world_size: int) -> Iterable[int]:
    """Return the peers of a rank, in an order in which at every step each rank serves another one.

    >>> list(rotation(2, 4))
    [3, 0, 1]
    """
    return ((rank + step) % world_size for step in range(1, world_size))


def swap_issuer(i: int, j: int, world_size: int) -> int:
    """Return the rank of two that executes their swap, so that the ranks share the work evenly.

    Each rank serves the half of the circle that follows it; two ranks opposite to each other take turns by parity.

    >>> [swap_issuer(0, j, 5) for j in range(1, 5)]
    [0, 0, 3, 4]
    """
    low, high = min(i, j), max(i, j)
    distance = high - low
    if 2 * distance == world_size:
        return low if low % 2 == 0 else high
    return low if 2 * distance < world_size else high


def _swap(collective: Collective) -> Program:
    world_size = collective.world_size
    flags = FlagPlan(world_size, phases=1)
    chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}
    queues: list[Queue] = []
    local_flags = 0
    for rank in range(world_size):
        peers = [peer for peer in rotation(rank, world_size) if (rank, peer) in chunks]
        issued = [peer for peer in peers if swap_issuer(rank, peer, world_size) == rank]
        answered = [peer for peer in peers if peer not in issued]
        entries = [flags.signal_entry(partner=rank, mover=peer) for peer in answered]
        exits = [flags.wait_exit(partner=rank, mover=peer) for peer in answered]
        dma: list[list[Command]] = [
            [
                flags.wait_entry(partner=peer, mover=rank),
                Swap(_output_span_of(chunks[peer, rank], collective), _output_span_of(chunks[rank, peer], collective)),
                flags.signal_exit(partner=peer, mover=rank),
            ]
            for peer in issued
        ]
        if peers and not dma:
            dma = [[]]
        if dma:
            dma[0] += exits
        if collective.in_place:
            if dma:
                dma[0] = [*entries, *dma[0]]
        elif collective.input_bytes(rank):
            # Out of place: the swaps of this rank and its peers may begin once the input has been copied to the output.
            local_flags = max(local_flags, len(issued))
            dma = [
                [Wait(flags.local(rank, index), EPOCH), *commands] if index < len(issued) else commands
                for index, commands in enumerate(dma)
            ]
            nbytes = collective.input_bytes(rank)
            copy = Copy(Span(rank, Buffer.OUTPUT, 0, nbytes), Span(rank, Buffer.INPUT, 0, nbytes))
            releases = [Signal(flags.local(rank, index), EPOCH) for index in range(len(issued))]
            queues.append(Queue(rank, Engine(EngineKind.LOCAL), (copy, *entries, *releases)))
        queues += [Queue(rank, Engine(EngineKind.DMA, index), tuple(commands)) for index, commands in enumerate(dma)]
    return Program(collective, "swap", tuple(queues), (0,) * world_size, flags.handshakes + local_flags)


def _output_span_of(chunk: Chunk, collective: Collective) -> Span:
    return collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)


def _no_swap(shape: CallShape) -> str:
    if not shape.copies_own:
        return _SWAP_COPIES_ALL
    return "" if shape.even else "needs equal counts between all ranks"


_SWAP_COPIES_ALL = "copies all of an input into its output first, own parts too"


register(Algorithm(name="b2b", kinds=MOVING, preference=0, assemble=b2b))
register(Algorithm(name="pcpy", kinds=MOVING, preference=90, assemble=pcpy))
register(
    Algorithm(name="bcst", kinds=(Kind.ALL_GATHER, Kind.BROADCAST), preference=30, assemble=bcst, into_outputs=True)
)
register(
    Algorithm(
        name="swap", kinds=(Kind.ALL_TO_ALL,), preference=30, assemble=swap, into_outputs=True, objection=_no_swap
    )
)

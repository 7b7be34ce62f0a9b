"""Programs for the collectives that only move bytes, in the variants of the DMA collectives paper, section 4.2.

=======  ==============================================================================================
variant  commands
=======  ==============================================================================================
pcpy     one copy and one engine for every pair of ranks: n(n-1) of each (4.2.1)
bcst     one command writes to two ranks, half the commands and engines; all_gather and broadcast (4.2.2)
swap     one command exchanges two chunks, half the commands; all_to_all with equal pairs (4.2.3)
b2b      all copies of a rank back to back on one engine (4.2.4)
striped  as b2b, with one half of every copy on a second engine; not in the paper
=======  ==============================================================================================

The counts of the paper are for transfers between ranks. Bytes that stay on their rank go through a ``local`` engine
(``beside``), and so do those that peers fetch from staging.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from sidelane.program import ir
from sidelane.program.builders.registry import Algorithm, FlagPlan, Transport, beside, register
from sidelane.program.collective import REDUCING, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.shape import CallShape

MOVING = tuple(kind for kind in Kind if kind not in REDUCING)

STRIPED = "striped"
"""Name of the variant."""

STRIPE_ALIGNMENT = 256
"""Alignment in bytes of the place at which a copy is cut in two."""


def pcpy(collective: Collective, transport: Transport = Transport.PUSH) -> ir.Program:
    """Build a program with one engine for each pair of ranks (DMA collectives paper, 4.2.1)."""
    return _moving(collective, transport, "pcpy", _an_engine_each)


def b2b(collective: Collective, transport: Transport = Transport.PUSH) -> ir.Program:
    """Build a program with one engine a rank: rank r serves r+1 first (DMA collectives paper, 4.2.4)."""
    return _moving(collective, transport, "b2b", lambda peers: [peers] if peers else [])


def bcst(collective: Collective, transport: Transport = Transport.PUSH) -> ir.Program:
    """Build broadcasts to two destinations, and a copy for a peer left over (DMA collectives paper, 4.2.2)."""
    if collective.kind not in (Kind.ALL_GATHER, Kind.BROADCAST):
        raise ValueError(f"bcst: collective (value={collective.kind}, allowed=all_gather, broadcast)")
    if transport is not Transport.PUSH:
        raise ValueError(f"bcst: transport (value={transport}, allowed=push: the command writes to its destinations)")
    return _moving(collective, transport, "bcst", lambda peers: [peers[i : i + 2] for i in range(0, len(peers), 2)])


def swap(collective: Collective, transport: Transport = Transport.PUSH) -> ir.Program:
    """Exchange chunks in pairs inside the output, where an input is copied first (DMA collectives paper, 4.2.3)."""
    counts, n = collective.counts, collective.world_size
    if collective.kind is not Kind.ALL_TO_ALL:
        raise ValueError(f"swap: collective (value={collective.kind}, allowed=all_to_all)")
    if any(counts[i][j] != counts[j][i] for i in range(n) for j in range(i)):
        raise ValueError("swap: all_to_all must exchange equal counts between each two ranks")
    if transport is not Transport.PUSH:
        raise ValueError(f"swap: transport (value={transport}, allowed=push): both chunks are exchanged in the output")
    if not collective.copies_own:
        raise ValueError(f"swap: {_SWAP_COPIES_ALL}")
    outputs = {(chunk.src_rank, chunk.dst_rank): output_of(collective, chunk) for chunk in collective.chunks()}
    moves: MovesByPair = {
        (rank, peer): ir.Swap(outputs[peer, rank], span)
        for (rank, peer), span in outputs.items()
        if rank != peer and swap_issuer(rank, peer, n) == rank
    }
    first: dict[int, list[ir.Copy]] = {}
    for rank, row in enumerate(counts if not collective.in_place else ()):
        nbytes = sum(row)
        copy = ir.Copy(Span(rank, Buffer.OUTPUT, 0, nbytes), Span(rank, Buffer.INPUT, 0, nbytes))
        first[rank] = [copy] if nbytes else []
    handshake = _Handshake(collective, "swap", moves, first, holds=True)
    queues: list[ir.Queue] = []
    for rank in range(n):
        dma, local = handshake.queues(rank, _an_engine_each)
        queues += [*local, *dma]
    return handshake.program(queues, (0,) * n)


MovesByPair = Mapping[tuple[int, int], ir.Copy | ir.Swap]
"""Command by its mover and partner."""

Sharing = Callable[[Sequence[int]], list[Sequence[int]]]
"""Function that splits the peers of a rank, in rotated order, into those of each engine."""


def _an_engine_each(peers: Sequence[int]) -> list[Sequence[int]]:
    return [[peer] for peer in peers]


def _moving(collective: Collective, transport: Transport, variant: str, share_engines: Sharing) -> ir.Program:
    overwrites = collective.in_place and collective.kind is Kind.ALL_TO_ALL
    if overwrites and transport is not Transport.STAGED:
        raise ValueError(
            f"{variant}: an all_to_all in place overwrites bytes that are still to be sent "
            f"(transport={transport}, allowed=staged, or the variant swap)"
        )
    n = collective.world_size
    moves: dict[tuple[int, int], ir.Copy | ir.Swap] = {}
    staged: list[set[tuple[int, int]]] = [set() for _ in range(n)]
    own: dict[int, list[ir.Copy]] = {}
    for chunk in collective.chunks():
        sender, receiver = chunk.src_rank, chunk.dst_rank
        if sender == receiver:
            own[sender] = copy_own(collective, chunk)
            continue
        source = collective.input_span(sender, chunk.src_offset, chunk.nbytes)
        if transport is Transport.STAGED:
            source = Span(sender, Buffer.STAGING, chunk.src_offset, chunk.nbytes)
            staged[sender].add((source.offset, source.end))
        pair = (sender, receiver) if transport is Transport.PUSH else (receiver, sender)
        moves[pair] = ir.Copy(output_of(collective, chunk), source)
    first = {rank: _stage(collective, rank, staged[rank]) for rank in range(n) if transport is Transport.STAGED}
    handshake = _Handshake(collective, variant, moves, first, holds=overwrites)
    queues: list[ir.Queue] = []
    for rank in range(n):
        dma, local = handshake.queues(rank, share_engines)
        queues += [*dma, *local]
        if copies := own.get(rank):
            queues.append(ir.Queue(rank, ir.Engine(ir.EngineKind.LOCAL, len(local)), tuple(copies)))
    return handshake.program(queues, tuple(max((end for _, end in pieces), default=0) for pieces in staged))


def _stage(collective: Collective, rank: int, pieces: Iterable[tuple[int, int]]) -> list[ir.Copy]:
    """Return copies of a rank's input into its staging: pieces from start to end, neighbours as one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        if merged and merged[-1][1] == start:
            start, _ = merged.pop()
        merged.append((start, end))
    return [
        ir.Copy(Span(rank, Buffer.STAGING, start, end - start), collective.input_span(rank, start, end - start))
        for start, end in merged
    ]


class _Handshake:
    """Queues of moves between ranks, with the signals and waits around them.

    Args:
        collective: collective of the program.
        variant: name of the variant; ``bcst`` joins the copies of an engine.
        moves: commands between ranks.
        first: copies inside each rank that come before its peers may move: its ``local`` engine then tells the peers.
            Empty if there are none: the engines that move tell them.
        holds: the moves of a rank wait for these copies, too.
    """

    def __init__(
        self,
        collective: Collective,
        variant: str,
        moves: MovesByPair,
        first: Mapping[int, Sequence[ir.Copy]],
        *,
        holds: bool,
    ) -> None:
        self._collective, self._variant = collective, variant
        self._moves, self._first, self._holds = moves, first, holds and bool(first)
        self._flags, self._local_flags = FlagPlan(collective.world_size, phases=1), 0

    def program(self, queues: Sequence[ir.Queue], staging: tuple[int, ...]) -> ir.Program:
        """Return the program of these queues."""
        flag_count = self._flags.handshakes + self._local_flags
        return ir.Program(self._collective, self._variant, tuple(queues), staging, flag_count)

    def queues(self, rank: int, share_engines: Sharing) -> tuple[list[ir.Queue], list[ir.Queue]]:
        """Return the DMA queues of a rank, and the local queue of its first copies."""
        flags, n = self._flags, self._collective.world_size
        peers = [peer for peer in rotation(rank, n) if (rank, peer) in self._moves]
        movers = [peer for peer in rotation(rank, n) if (peer, rank) in self._moves]
        groups = share_engines(peers) or ([[]] if movers else [])
        held = [flags.local(rank, index) for index in range(len(groups)) if self._holds and peers]
        self._local_flags = max(self._local_flags, len(held))
        dma = []
        for index, group in enumerate(groups):
            # A mover that this rank does not serve itself is answered by the first queue.
            answered = [peer for peer in movers if peer in group or (index == 0 and peer not in peers)]
            commands: list[ir.Command] = [ir.Wait(flag, ir.EPOCH) for flag in held[index : index + 1]]
            if not self._first:
                commands += [flags.signal_entry(partner=rank, mover=peer) for peer in answered]
            commands += self._moved(rank, group)
            commands += [flags.wait_exit(partner=rank, mover=peer) for peer in answered]
            dma.append(ir.Queue(rank, ir.Engine(ir.EngineKind.DMA, index), tuple(commands)))
        if not self._first:
            return dma, []
        entries = [flags.signal_entry(partner=rank, mover=peer) for peer in movers]
        signals: tuple[ir.Command, ...] = (*self._first[rank], *entries, *(ir.Signal(flag, ir.EPOCH) for flag in held))
        return dma, [ir.Queue(rank, ir.Engine(ir.EngineKind.LOCAL), signals)] if signals else []

    def _moved(self, rank: int, group: Sequence[int]) -> list[ir.Command]:
        moves: list[ir.Command] = [self._moves[rank, peer] for peer in group]
        if self._variant == "bcst" and len(moves) == 2:
            (to, source), (other, _) = ((move.dst, move.src) for move in moves if isinstance(move, ir.Copy))
            moves = [ir.Broadcast((to, other), source)]
        # Nothing stands between the copies of an engine: a signal or wait there would keep it from overlapping the end
        # of one with the beginning of the next (results/notes/probes.md has the difference).
        waits = [self._flags.wait_entry(partner=peer, mover=rank) for peer in group]
        exits = [self._flags.signal_exit(partner=peer, mover=rank) for peer in group]
        return [*waits, *moves, *exits]


def copy_own(collective: Collective, chunk: Chunk) -> list[ir.Copy]:
    """Return the copy of a chunk that stays on its rank; none if it lies in its place already."""
    source = collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)
    target = output_of(collective, chunk)
    return [ir.Copy(target, source)] if source != target else []


def output_of(collective: Collective, chunk: Chunk) -> Span:
    """Return the span of a chunk in its destination's output."""
    return collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)


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


def stripe(program: ir.Program) -> ir.Program:
    """Use two engines a rank, each with one half of every copy: one starts a copy while the other ends one.

        dma:0    entries | wait for entries | mark | first halves  | wait | exits | wait for exits
        dma:1                                 wait | second halves | mark

    Both go round in the order of ``b2b``. On four H200s that saves 3 us of 23 for small copies, and 5 of 161 for 64 MiB
    in all; from 64 MiB a peer on it is slower (results/notes/probes.md). The algorithm is our own.

    Args:
        program: a program that has one DMA queue a rank, with its copies behind each other.
    """
    start, end = program.flag_count, program.flag_count + 1
    queues = [part for queue in program.queues for part in _stripes(queue, start, end)]
    return dataclasses.replace(program, variant=STRIPED, queues=tuple(queues), flag_count=program.flag_count + 2)


def _stripes(queue: ir.Queue, start: int, end: int) -> list[ir.Queue]:
    """Return the queue with the first halves of its copies, and one with the second halves, if there are any."""
    halves = [_halves(command) for command in queue.commands if isinstance(command, ir.Copy)]
    second = [copy for _, copy in halves if copy is not None]
    if queue.engine.kind is not ir.EngineKind.DMA or not second:
        return [queue]
    assert queue.engine.index == 0, "the other engine of the rank is taken"
    place = next(index for index, command in enumerate(queue.commands) if isinstance(command, ir.Copy))
    begin, ended = ir.Flag(queue.rank, start), ir.Flag(queue.rank, end)
    commands: tuple[ir.Command, ...] = (
        *queue.commands[:place],
        ir.Signal(begin, ir.EPOCH),
        *(copy for copy, _ in halves),
        ir.Wait(ended, ir.EPOCH),
        *queue.commands[place + len(halves) :],
    )
    other: tuple[ir.Command, ...] = (ir.Wait(begin, ir.EPOCH), *second, ir.Signal(ended, ir.EPOCH))
    return [dataclasses.replace(queue, commands=commands), ir.Queue(queue.rank, ir.Engine(ir.EngineKind.DMA, 1), other)]


def _halves(copy: ir.Copy) -> tuple[ir.Copy, ir.Copy | None]:
    """Return both halves of a copy, cut at a multiple of ``STRIPE_ALIGNMENT``; None for a second one without bytes.

    >>> from sidelane.program.collective import Buffer
    >>> source, target = Span(0, Buffer.INPUT, 0, 1000), Span(1, Buffer.OUTPUT, 0, 1000)
    >>> [half.src.nbytes for half in _halves(ir.Copy(target, source))]
    [512, 488]
    """
    nbytes = copy.src.nbytes
    first = -(-nbytes // (2 * STRIPE_ALIGNMENT)) * STRIPE_ALIGNMENT
    if first >= nbytes:
        return copy, None

    def part(span: Span, begin: int, end: int) -> Span:
        return dataclasses.replace(span, offset=span.offset + begin, nbytes=end - begin)

    return (
        ir.Copy(part(copy.dst, 0, first), part(copy.src, 0, first)),
        ir.Copy(part(copy.dst, first, nbytes), part(copy.src, first, nbytes)),
    )


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
register(
    Algorithm(name=STRIPED, kinds=MOVING, preference=10, assemble=b2b, finish=lambda program: stripe(beside(program)))
)

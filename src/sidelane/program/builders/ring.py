"""A ring: every rank passes on to the next one what it got from the one before, so that every link carries one copy.

Rank r of n; ``s`` is its own shard, ``s-1`` that of the rank before, and so on::

    dma:0    entry for r-1 | entry of r+1 | s > r+1, exit | s-1? s-1 > r+1, exit | ... | s+1?

``n - 1`` steps, each of them behind the one before, where ``b2b`` has one handshake for all. It is for nodes whose
links join neighbours only; behind a switch it gains nothing.
"""

from __future__ import annotations

from sidelane.program.builders.flags import FlagPlan
from sidelane.program.builders.registry import Algorithm, register
from sidelane.program.builders.transport import Transport
from sidelane.program.collective import Chunk, Collective, Kind
from sidelane.program.ir import Command, Copy, Engine, EngineKind, Program, Queue
from sidelane.program.shape import CallShape


def ring(collective: Collective, transport: Transport = Transport.PUSH) -> Program:
    """Build an all_gather.

    Args:
        collective: made by ``all_gather``.
        transport: ``push``: every rank writes into the next one's output.

    Raises:
        ValueError: another collective or transport.
    """
    if collective.kind is not Kind.ALL_GATHER:
        raise ValueError(f"ring: collective (value={collective.kind}, allowed=all_gather)")
    if transport is not Transport.PUSH:
        raise ValueError(f"ring: transport (value={transport}, allowed=push: ranks write into each other's outputs)")
    n = collective.world_size
    flags = FlagPlan(n, phases=max(1, n - 1))
    chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}
    queues: list[Queue] = []
    for rank in range(n):
        before, behind = (rank - 1) % n, (rank + 1) % n
        given = [chunks.get(((rank - step) % n, behind)) for step in range(n - 1)]
        taken = [chunks.get(((before - step) % n, rank)) for step in range(n - 1)]
        commands: list[Command] = []
        if any(taken):
            commands.append(flags.signal_entry(partner=rank, mover=before))
        if any(given):
            commands.append(flags.wait_entry(partner=behind, mover=rank))
        for step, chunk in enumerate(given):
            if step and taken[step - 1]:
                commands.append(flags.wait_exit(partner=rank, mover=before, phase=step - 1))
            if chunk:
                commands += [_pass_on(collective, rank, chunk), flags.signal_exit(behind, rank, step)]
        if taken and taken[-1]:
            commands.append(flags.wait_exit(partner=rank, mover=before, phase=n - 2))
        own = chunks.get((rank, rank))
        if commands:
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        if own and not collective.in_place:
            queues.append(Queue(rank, Engine(EngineKind.LOCAL), (_pass_on(collective, rank, own),)))
    return Program(collective, "ring", tuple(queues), (0,) * n, flags.handshakes)


def _pass_on(collective: Collective, rank: int, chunk: Chunk) -> Copy:
    """A shard from where it lies at ``rank``, which has its own in its input."""
    target = collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)
    if chunk.src_rank == rank:
        return Copy(target, collective.input_span(rank, chunk.src_offset, chunk.nbytes))
    return Copy(target, collective.output_span(rank, chunk.dst_offset, chunk.nbytes))


def _no_ring(shape: CallShape) -> str:
    return "has no third rank to pass anything on to" if shape.world_size <= 2 else ""


register(
    Algorithm(
        name="ring",
        kinds=(Kind.ALL_GATHER,),
        preference=50,
        assemble=ring,
        into_outputs=True,
        merges=False,
        objection=_no_ring,
    )
)

"""All_gather programs for many ranks, to plan and to measure the simulator with.

    ring          every rank passes on to its right neighbour what came from the left: n-1 steps
    two levels    the ranks of a node exchange their shards directly; then every rank takes part in a ring over the
                  nodes with its namesakes, which passes on whole nodes' shards

Both are in place: shard r lies at ``r * part`` of every output. One engine a rank in the ring; in two levels one more
queue serves the peers inside the node.
"""

from __future__ import annotations

from sidelane.program.collective import Buffer, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait


def ring_all_gather(ranks: int, part: int) -> Program:
    """Ring over all ranks. ``part``: bytes of a shard."""
    queues = []
    for rank in range(ranks):
        right = (rank + 1) % ranks
        commands = _ring_steps(rank, right, ranks, [((rank - step) % ranks) * part for step in range(ranks - 1)], part)
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    return Program(_collective(ranks, part), "ring", tuple(queues), (0,) * ranks, ranks)


def two_level_all_gather(nodes: int, gpus: int, part: int) -> Program:
    """Direct inside nodes of ``gpus`` ranks, then a ring over ``nodes``. ``part``: bytes of a shard."""
    ranks, block = nodes * gpus, gpus * part
    arrived = nodes  # flags behind those of the ring: one for each peer inside the node
    queues = []
    for rank in range(ranks):
        node, local = divmod(rank, gpus)
        inside: list[Command] = []
        for step in range(1, gpus):
            peer = node * gpus + (local + step) % gpus
            inside.append(Copy(_output(peer, rank * part, part), _output(rank, rank * part, part)))
            inside.append(Signal(Flag(peer, arrived + local), EPOCH))
        waits: list[Command] = [Wait(Flag(rank, arrived + other), EPOCH) for other in range(gpus) if other != local]
        queues.append(Queue(rank, Engine(EngineKind.DMA, 0), tuple(inside)))
        if nodes > 1:
            right = ((node + 1) % nodes) * gpus + local
            offsets = [((node - step) % nodes) * block for step in range(nodes - 1)]
            waits += _ring_steps(rank, right, nodes, offsets, block)
        queues.append(Queue(rank, Engine(EngineKind.DMA, 1), tuple(waits)))
    return Program(_collective(ranks, part), "two levels", tuple(queues), (0,) * ranks, nodes + gpus)


def _ring_steps(rank: int, right: int, length: int, offsets: list[int], nbytes: int) -> list[Command]:
    """Pass on the own bytes, then what came from the left; at last wait for the last that comes."""
    commands: list[Command] = []
    for step, offset in enumerate(offsets):
        if step:
            commands.append(Wait(Flag(rank, step - 1), EPOCH))
        commands.append(Copy(_output(right, offset, nbytes), _output(rank, offset, nbytes)))
        commands.append(Signal(Flag(right, step), EPOCH))
    commands.append(Wait(Flag(rank, length - 2), EPOCH))
    return commands


def _output(rank: int, offset: int, nbytes: int) -> Span:
    return Span(rank, Buffer.OUTPUT, offset, nbytes)


def _collective(ranks: int, part: int) -> Collective:
    row = (part,) * ranks
    return Collective(Kind.ALL_GATHER, ranks, (row,) * ranks, in_place=True)

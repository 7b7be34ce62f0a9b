"""Programs of the vendor library's collectives among all ranks of several nodes: flat rings, exchanges and trees.

There are as many rings as a node has GPUs, each with its share of the bytes. A ring goes through all GPUs of a node,
enters it by the NIC of one of them, leaves it by that of another, and enters the next node by the NIC of the same
place. The ways of a node's rings pass each of its links once. Trees have such a way inside each node, and a binary tree
among the GPUs at its begins; an all-reduce has two, with half of the bytes each, so that all nodes send alike (NCCL's
double binary tree).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from sidelane.program import collective as define
from sidelane.program.collective import Buffer, Kind, Span
from sidelane.program.ir import Copy, Engine, EngineKind, Flag
from sidelane_lab.machines.spec import Machine, Topology
from sidelane_lab.model import rings
from sidelane_lab.model.world import (
    CHUNK_BYTES,
    ITEM,
    SUM,
    NodesProgram,
    World,
    chunks_of,
    library_kernel,
    nic_speed,
    passed_share,
    whole_collective,
)
from sidelane_lab.sim import Fold, fold_of

MOST_CHUNKS = 1 << 14
"""Chunks of a chain or a tree, times ranks and channels that are simulated: those of larger programs are larger."""

TREES = (Kind.ALL_REDUCE, Kind.BROADCAST)
"""Collectives that have a tree."""


def flat(machine: Machine, kind: Kind, nbytes: int, fold: Fold | None = None) -> NodesProgram | None:
    """Build the program of rings among all ranks; of a direct exchange for an all-to-all.

    Args:
        machine: one or more nodes.
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, or broadcast (from rank 0).
        nbytes: gathered bytes of an all_gather, the local buffer of the others; rounded up to whole elements of each
            rank and ring.
        fold: ranks to build, which stand for all others; None for as few as can.

    Returns:
        The program; None for a broadcast that would need more chunks to fill its chain than are simulated.
    """
    if kind is Kind.ALL_TO_ALL:
        return _flat_exchange(machine, nbytes, fold)
    gpus, ranks = machine.gpus, machine.world_size
    parts = gpus if kind is Kind.BROADCAST else gpus * ranks
    part = -(-nbytes // (parts * ITEM)) * ITEM
    if kind is Kind.BROADCAST:
        fold = Fold.whole(machine)
        wanted, chunks = -(-part // CHUNK_BYTES), chunks_of(part, MOST_CHUNKS // (ranks * gpus))
        if len(chunks) < min(wanted, 2 * ranks):
            return None
    if kind is Kind.ALL_GATHER:
        collective = define.all_gather([part * gpus] * ranks, in_place=True)
    else:
        collective = whole_collective(kind, part * (parts if kind in TREES else gpus), ranks)
    world = World(machine, collective, fold or _ring_fold(machine))
    kernel = library_kernel(machine, kind, _bytes_us(machine, kind, nbytes))
    world.room(gpus * (ranks - 1) * part if kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE) else 0)
    orders = [_order(machine, ring) for ring in range(gpus)]
    ats = [{rank: at for at, rank in enumerate(order)} for order in orders]
    for rank in world.ranks:
        for channel in range(gpus):
            number = (rank + channel) % gpus
            order, at = orders[number], ats[number][rank]

            def flag(of: int, purpose: object, number: int = number) -> Flag:
                return world.flag(of, ((number - of) % gpus, purpose))

            def block(of: int, place: int, number: int = number, order: list[int] = order) -> Span:
                return Span(of, Buffer.OUTPUT, (order[place] * gpus + number) * part, part)

            def given(of: int, place: int, number: int = number, order: list[int] = order) -> Span:
                return Span(of, Buffer.INPUT, (order[place] * gpus + number) * part, part)

            def slot(of: int, step: int, number: int = number) -> Span:
                return Span(of, Buffer.STAGING, (number * (ranks - 1) + step) * part, part)

            ring = rings.RingPosition(order, at, flag)
            if kind is Kind.ALL_GATHER:
                commands = rings.ring_gather(ring, block(rank, at), block)
            elif kind is Kind.REDUCE_SCATTER:
                result = Span(rank, Buffer.OUTPUT, number * part, part)
                commands = rings.ring_reduce(ring, given, slot, result, SUM)
            elif kind is Kind.ALL_REDUCE:
                commands = rings.ring_all_reduce(ring, block, slot, SUM)
            else:
                first = order.index(0)
                turned = rings.RingPosition([*order[first:], *order[:first]], (at - first) % ranks, flag)

                def whole(of: int, number: int = number) -> Span:
                    return Span(of, Buffer.OUTPUT, number * part, part)

                commands = rings.chain(turned, chunks, whole)
            if kind is not Kind.BROADCAST:
                commands = itertools.chain(ring.begin(), commands)
            world.run(rank, _channel(channel), channel, commands, kernel)
        world.join(rank, range(gpus))
    return world.program("flat rings")


def _channel(number: int) -> Engine:
    """Return the queue of a channel of the library's kernel."""
    return Engine(EngineKind.COMPUTE, 1 + number)


def _way(machine: Machine, first: int) -> list[int]:
    """Return the places of a node in the order of a ring that enters it at one: zigzag, so that the ways of all rings
    pass each link once.

    >>> from sidelane_lab.machines.load import named
    >>> _way(named("h100x8"), 0)
    [0, 1, 7, 2, 6, 3, 5, 4]
    """
    gpus = machine.gpus
    return [(first + (-(step // 2) if step % 2 == 0 else step // 2 + 1)) % gpus for step in range(gpus)]


def _order(machine: Machine, ring: int) -> list[int]:
    """Return all ranks in the order of a ring."""
    found: list[int] = []
    first = ring
    for node in range(machine.nodes):
        way = _way(machine, first)
        found += (node * machine.gpus + place for place in way)
        first = way[-1]
    return found


def _ring_fold(machine: Machine) -> Fold:
    period = machine.gpus // math.gcd(_way(machine, 0)[-1], machine.gpus)
    if machine.nodes % period and machine.nodes > 1:
        return Fold.whole(machine)  # the last node is left by another place than the first is entered
    return fold_of(machine, ((1, 0),), nodes=period if machine.nodes > 1 else 1, places=1)


def _bytes_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Return the time of the bytes of all rings where nothing is in their way: by NICs, and inside a node."""
    gpus, ranks = machine.gpus, machine.world_size
    figures = Kind.ALL_GATHER if kind is Kind.BROADCAST else kind
    gbps = float(getattr(machine.library, f"{figures}_gbps"))
    links = max(1, gpus - 1) if machine.links.topology is Topology.MESH else 1
    if kind is Kind.ALL_TO_ALL:
        inside, outside = nbytes / ranks * (gpus - 1) / links, nbytes / ranks * (ranks - gpus)
    else:
        passed = passed_share(kind, ranks) * nbytes
        inside, outside = passed * (gpus - 1) / gpus / links, passed / gpus
    network_us = outside / nic_speed(machine) if machine.nodes > 1 else 0.0
    return max(inside / (gbps * 1e3), network_us)


def _flat_exchange(machine: Machine, nbytes: int, fold: Fold | None) -> NodesProgram:
    gpus, ranks, nodes = machine.gpus, machine.world_size, machine.nodes
    part = -(-nbytes // (ranks * ITEM)) * ITEM
    shifts = tuple((by, across) for by in range(1, nodes) for across in range(min(gpus, 2)))
    fold = fold or fold_of(machine, shifts, places=1)
    world = World(machine, whole_collective(Kind.ALL_TO_ALL, part, ranks), fold)
    kernel = library_kernel(machine, Kind.ALL_TO_ALL, _bytes_us(machine, Kind.ALL_TO_ALL, nbytes))
    outside = [(by, across) for by in range(1, nodes) for across in range(gpus)]
    inside = [(0, across) for across in range(1, gpus)]
    for rank in world.ranks:
        node, place = divmod(rank, gpus)

        def given(to: int, rank: int = rank) -> Span:
            return Span(rank, Buffer.INPUT, to * part, part)

        def came(to: int, of: int) -> Span:
            return Span(to, Buffer.OUTPUT, of * part, part)

        def moved(by: int, across: int, node: int = node, place: int = place) -> int:
            return (node + by) % nodes * gpus + (place + across) % gpus

        channels = [rounds for rounds in (outside, inside) if rounds]
        for channel, rounds in enumerate(channels):
            named = [((by, across), moved(by, across), moved(-by, -across)) for by, across in rounds]
            own = [Copy(came(rank, rank), given(rank))] if channel == len(channels) - 1 else []
            commands = itertools.chain(own, rings.exchange(rank, named, world.flag, given, came))
            world.run(rank, _channel(channel), channel, commands, kernel)
        world.join(rank, range(len(channels)))
    return world.program("flat exchange")


def tree(machine: Machine, kind: Kind, nbytes: int, fold: Fold | None = None) -> NodesProgram:
    """Build the program of a tree: the double binary tree of an all-reduce, a binary tree of a broadcast from rank 0.

    Args:
        machine: one or more nodes.
        kind: one of :data:`TREES`.
        nbytes: bytes of the buffer; rounded up to whole elements of each tree and ring.
        fold: ranks to build, which stand for all others; None for as few as can.

    Raises:
        ValueError: another kind.
    """
    if kind not in TREES:
        raise ValueError(f"tree: kind (value={kind}, allowed={', '.join(TREES)})")
    gpus, ranks, nodes = machine.gpus, machine.world_size, machine.nodes
    reduces = kind is Kind.ALL_REDUCE
    trees = 2 if reduces else 1
    part = -(-nbytes // (trees * gpus * ITEM)) * ITEM
    if not reduces:
        fold = Fold.whole(machine)
    elif fold is None:
        shifts = {(by, 0) for twin in range(2) for by in _shifts(nodes, twin)}
        fold = fold_of(machine, tuple(sorted(shifts)), nodes=nodes, places=1)
    world = World(machine, whole_collective(kind, part * gpus * trees, ranks), fold)
    chunks = chunks_of(part, MOST_CHUNKS // (len(world.ranks) * gpus * trees))
    world.room(3 * trees * gpus * part if reduces else 0)
    kernel = library_kernel(machine, kind, _bytes_us(machine, kind, nbytes))
    found = [[_tree(machine, number, twin, rooted=not reduces) for number in range(gpus)] for twin in range(trees)]
    for rank in world.ranks:
        channels = 0
        for twin in range(trees):
            for place in range(gpus):
                number = (rank + place) % gpus
                begin = (twin * gpus + number) * part

                def flag(of: int, purpose: object, twin: int = twin, number: int = number) -> Flag:
                    return world.flag(of, (twin, (number - of) % gpus, purpose))

                def slot(of: int, child: int, at: int, begin: int = begin) -> Span:
                    return Span(of, Buffer.STAGING, 3 * begin + child * part + chunks[at][0], chunks[at][1])

                def chunk(offset: int, nbytes: int, begin: int = begin) -> Callable[[int], Span]:
                    return lambda of: Span(of, Buffer.OUTPUT, begin + offset, nbytes)

                spans = [chunk(*each) for each in chunks]
                here = found[twin][number]
                ways = [rings.tree_down(here, rank, flag, spans, behind_up=reduces)]
                if reduces:
                    ways.insert(0, rings.tree_up(here, rank, flag, [span(rank) for span in spans], slot, SUM))
                for way, commands in enumerate(ways):
                    channel = (place * trees + twin) * len(ways) + way
                    world.run(rank, _channel(channel), channel, commands, kernel)
                    channels += 1
        world.join(rank, range(channels))
    return world.program("double binary tree" if reduces else "binary tree")


def _tree(machine: Machine, number: int, twin: int, *, rooted: bool) -> rings.Tree:
    """Return the tree of a channel; ``rooted``: rank 0 is its root, and gives to the GPU at its begin in that node."""
    parents: dict[int, int] = {}
    gpus = machine.gpus
    for node in range(machine.nodes):
        way = [node * gpus + place for place in _way(machine, number)]
        if rooted and node == 0:
            way = [0, *(rank for rank in way if rank)]
        parents |= {rank: before for before, rank in itertools.pairwise(way)}
        up = _node_parent(machine.nodes, node, twin)
        if up is not None:
            parents[node * gpus + number] = up * gpus + number
    return rings.Tree.of(parents)


def _node_parent(nodes: int, node: int, twin: int) -> int | None:
    """Return the parent of a node; the leaves of one twin are inside of the other one, but for one node."""
    if not twin:
        return rings.tree_parent(nodes, node)
    turned = (node - 1) % nodes if nodes % 2 else nodes - 1 - node
    up = rings.tree_parent(nodes, turned)
    if up is None:
        return None
    return (up + 1) % nodes if nodes % 2 else nodes - 1 - up


def _shifts(nodes: int, twin: int) -> Iterator[int]:
    for node in range(nodes):
        up = _node_parent(nodes, node, twin)
        if up is not None:
            yield (up - node) % nodes
            yield (node - up) % nodes

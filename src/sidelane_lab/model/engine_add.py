"""Reductions by copy engines that add, on what-if machines (ConCCL paper, VII-A2): next to what runs on real ones.

A description whose ``[dma]`` has ``add_gbps`` has such engines. Their programs (:func:`reduce_on_engines`) are proved
like all others and run in virtual time; flags between engines of a rank take no time, as in ``model.collectives``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from sidelane.program.builders.moving import rotation
from sidelane.program.builders.reducing import reduce
from sidelane.program.builders.registry import FlagPlan
from sidelane.program.collective import REDUCING, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Program, Queue, Reduce, Signal, Wait
from sidelane.program.transform import freeze
from sidelane.sizes import format_bytes
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.machines.spec import Machine, Topology
from sidelane_lab.model.collectives import collective_of, dependencies, executed_run, library_us
from sidelane_lab.sim import simulate

ENGINE_ADD = "engine_add"
"""Name of the variant for engines that add. It is not registered: no communicator chooses it."""

HYBRIDS = ("b2b", "pcpy")
"""Variants, of which the faster counts: by one engine, or by an engine for each peer."""

SIZES = tuple(1 << power for power in range(14, 33, 2))
"""Bytes of the local buffer, 16 KiB to 4 GiB."""


def reduce_on_engines(collective: Collective, variant: str = "b2b") -> Program:
    """Build a reduce_scatter or all_reduce for copy engines that add, which no GPU has (ConCCL paper, VII-A2).

    One engine of each rank reads its shard of everyone's input and writes the sum. In an all_reduce that engine, or one
    for each peer, then copies it to the peers. Nothing is staged, and no compute unit is used. Under ``pcpy``::

        dma:0    entries | reduce | all_reduce: result to the first peer | exits
        dma:1                wait ^ result to the second peer, exit

    Args:
        collective: made by ``reduce_scatter`` or ``all_reduce``.
        variant: ``pcpy`` (results of an all_reduce go by an engine for each peer) or ``b2b`` (by one engine).

    Raises:
        ValueError: the collective or the variant is another one.
    """
    if collective.kind not in REDUCING or collective.reduction is None:
        raise ValueError(f"reduce_on_engines: collective (value={collective.kind}, allowed={', '.join(REDUCING)})")
    if variant not in HYBRIDS:
        raise ValueError(f"reduce_on_engines: variant (value={variant!r}, allowed='b2b', 'pcpy')")
    world_size, shards = collective.world_size, collective.counts[0]
    if world_size == 1:
        return dataclasses.replace(reduce(collective), variant=ENGINE_ADD, engines_add=True)
    gathers = collective.kind is Kind.ALL_REDUCE
    chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}

    def summed(shard: int, rank: int) -> Span:
        return collective.output_span(rank, chunks[shard, shard].dst_offset, shards[shard])

    flags, queues = FlagPlan(world_size, phases=1), []
    for rank in range(world_size):
        peers = list(rotation(rank, world_size))
        movers = [peer for peer in peers if shards[peer]]
        adding: list[Command] = [flags.signal_entry(partner=rank, mover=peer) for peer in movers]
        if shards[rank]:
            adding += [flags.wait_entry(partner=peer, mover=rank) for peer in peers]
            srcs = tuple(
                collective.input_span(src, chunks[src, rank].src_offset, shards[rank]) for src in range(world_size)
            )
            result = summed(rank, rank)
            adding.append(Reduce(result, srcs, collective.reduction))
            ends: list[list[Command]] = [[flags.signal_exit(partner=peer, mover=rank)] for peer in peers]
            if gathers:
                for commands, peer in zip(ends, peers, strict=True):
                    commands.insert(0, Copy(summed(rank, peer), result))
            if gathers and variant == "pcpy":
                for number, commands in enumerate(ends[1:], 1):
                    added = flags.local(rank, number)
                    adding.append(Signal(added, EPOCH))
                    queues.append(Queue(rank, Engine(EngineKind.DMA, number), (Wait(added, EPOCH), *commands)))
                ends = ends[:1]
            adding += itertools.chain.from_iterable(ends)
        adding += [flags.wait_exit(partner=rank, mover=peer) for peer in movers]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(adding)))
    count = flags.handshakes + (world_size if gathers else 0)
    return Program(collective, ENGINE_ADD, tuple(queues), (0,) * world_size, count, engines_add=True)


@functools.lru_cache(maxsize=256)
def engine_add_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Return the time of a reduce_scatter or all_reduce by engines that add, of the faster variant.

    Raises:
        ValueError: another collective, several nodes, or engines that do not add.
    """
    machine.refuse_nodes("engine_add_us")
    collective = collective_of(kind, nbytes, machine.gpus)
    programs = [freeze(reduce_on_engines(collective, variant)) for variant in HYBRIDS]
    return min(simulate(program, machine, edges=dependencies(program)).time_us for program in programs)


def least_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Return the bound of bandwidth of such a collective: what a rank's links and engines must carry.

    A rank's engine reads its shard of everyone's input; in an all_reduce engines then write the sum to all peers, which
    begins once the sum is whole.
    """
    ranks, links, dma = machine.gpus, machine.links, machine.dma
    shard = nbytes / ranks
    passed = shard if links.topology is Topology.MESH else shard * (ranks - 1)  # by the fullest link or port
    carried_us = max(passed / links.usable_gbps, shard / dma.engine_gbps) / 1e3
    read_us = max(carried_us, shard * ranks / dma.add_gbps / 1e3)
    return read_us + (carried_us if kind is Kind.ALL_REDUCE else 0.0)


def engine_add_tables(machine: Machine) -> list[Table]:
    """Make a table of each collective that adds, by size; none where engines do not add."""
    if not machine.dma.add_gbps or machine.nodes > 1 or machine.gpus < 2:
        return []
    tables = []
    for kind in sorted(REDUCING):
        lines = []
        for nbytes in SIZES:
            hybrid = min(executed_run(machine, kind, nbytes, variant, False).time_us for variant in HYBRIDS)
            times = library_us(machine, kind, nbytes), hybrid, engine_add_us(machine, kind, nbytes)
            cells = [f"{us:.1f}" + ("*" if us == min(times) else " ") for us in times]
            lines.append(Line((format_bytes(nbytes), *cells, f"{least_us(machine, kind, nbytes):.1f}")))
        title = f"{kind} on {machine.title}, whose engines add: time in us, predicted (* fastest)"
        columns = ("bytes", "library", "engines move,\nunits add", ENGINE_ADD, "bound of\nbandwidth")
        tables.append(Table(title, columns, tuple(lines)))
    return tables

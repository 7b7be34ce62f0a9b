"""Reductions by copy engines that add, on what-if machines (ConCCL paper, VII-A2): next to what runs on real ones.

A description whose ``[dma]`` has ``add_gbps`` has such engines. Their programs are those of
``program.builders.reducing.reduce_on_engines``, in virtual time; flags between engines of a rank take no time, as in
``model.collectives``.
"""

from __future__ import annotations

import functools

from sidelane.cli.table import Line, Table
from sidelane.program.builders.reducing import ENGINE_ADD, reduce_on_engines
from sidelane.program.collective import REDUCING, Kind
from sidelane.program.transform import freeze
from sidelane.sizes import format_bytes
from sidelane_lab.machines.spec import Machine, Topology
from sidelane_lab.model.collectives import collective_of, dependencies, executed_run, library_us
from sidelane_lab.sim import simulate

HYBRIDS = ("b2b", "pcpy")
"""Variants, of which the faster counts: by one engine, or by an engine for each peer."""

SIZES = tuple(1 << power for power in range(14, 33, 2))
"""Bytes of the local buffer, 16 KiB to 4 GiB."""


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

"""Collectives among all GPUs of a machine as kernels of the device model: of one node, or of several.

Among several nodes the library runs flat rings, one kernel each. A process group's steps run within the node on copy
engines, and between nodes as the library's kernels on rails:

    far    [piece 0, on compute units][piece 1      ]
    near   [0, before]    [1, before][0, after][1, after]     on copy engines; what adds up, on compute units

What the group would not cut into steps is the library's. Not modelled: near steps by kernels; and far steps' kernels
on fewer units than the library's default, since nothing says how many it takes between nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sidelane.integrations.nodes.topology import FLAT
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import default_units
from sidelane_lab.model.device import Gang, run_device
from sidelane_lab.model.kernels import DMA_TRAFFIC, dma_gangs, library_gang
from sidelane_lab.model.node_steps import Far, Join, Near
from sidelane_lab.model.nodes import NodesTimes, least_us, nodes_times, ring_us, tree_us

DTYPE = "bfloat16"
"""Type of the elements of collectives among nodes, as :func:`nodes_times` has it."""
NEAR = 1.02
"""Factor of the least time of a collective up to which a ring is taken without a look at trees."""
NOTHING_US = 1e-6
"""Microseconds of a mark that stands for the end of all parts of a collective."""


def library_gangs(
    machine: Machine, kind: Kind, nbytes: int, *, units: int | None = None, reserved: bool = False, priority: int = 0
) -> tuple[Gang, ...]:
    """Return the vendor library's collective; its arguments are those of :func:`library_gang`.

    Raises:
        ValueError: units of its own among several nodes.
    """
    if machine.nodes == 1:
        return (library_gang(machine, kind, nbytes, units=units, reserved=reserved, priority=priority),)
    if units is not None:
        raise ValueError(f"library_gangs: units among the nodes of {machine.name} (value={units}, allowed=the default)")
    ring = _ring(machine, kind, nbytes, flat_us(machine, kind, nbytes))
    return (dataclasses.replace(ring, priority=priority),)


def engine_gangs(machine: Machine, kind: Kind, nbytes: int, *, write_back: bool = False) -> tuple[Gang, ...]:
    """Return the collective on copy engines, as far as these reach; arguments are those of :func:`dma_gangs`."""
    if machine.nodes == 1:
        return dma_gangs(machine, kind, nbytes, write_back=write_back)
    times = nodes_times(machine, kind, nbytes, beside=True)
    if times.hierarchical_us is None or times.choice.name == FLAT:
        return (_ring(machine, kind, nbytes, flat_us(machine, kind, nbytes)),)
    return _plan_gangs(machine, kind, nbytes, times)


def rails_gang(machine: Machine, kind: Kind, nbytes: int) -> Gang:
    """Return the library's collective on each rail of several nodes at once: among ranks of one number in their nodes.

    Args:
        machine: several nodes.
        kind: kind of the collective.
        nbytes: bytes of a rank, as studies count them.
    """
    links = machine.links
    shared = min(1.0, float(links.nics_per_gpu))  # ranks that share a NIC have a part of it each
    rail = dataclasses.replace(machine, gpus=1).with_value("links.network_gbps", links.network_gbps * shared)
    rail = rail.with_value("links.nics_per_gpu", max(1.0, float(links.nics_per_gpu)))
    return dataclasses.replace(_far(rail, kind, flat_us(rail, kind, nbytes)), name="collective")


def flat_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Return the time of the library's ring, its tree or its exchange among all ranks of several nodes.

    No tree is simulated where the ring is so near to the least that any way takes that a tree could not gain.
    """
    ring = ring_us(machine, kind, nbytes)
    if ring is not None and ring <= NEAR * least_us(machine, kind, nbytes):
        return ring
    return min(us for us in (ring, tree_us(machine, kind, nbytes)) if us is not None)


def gangs_us(machine: Machine, gangs: tuple[Gang, ...]) -> float:
    """Return the time of a collective alone."""
    return run_device(machine, gangs).time_us


def _ring(machine: Machine, kind: Kind, nbytes: int, alone_us: float) -> Gang:
    """Return the library's kernel among all ranks, in a time that is known."""
    library, ranks = machine.library, machine.world_size
    exchange = kind is Kind.ALL_TO_ALL
    passed = nbytes * (ranks - 1) / ranks * (2 if kind is Kind.ALL_REDUCE else 1)
    traffic = library.all_to_all_traffic if exchange else library.traffic
    need = float(library.all_to_all_need if exchange else library.all_gather_need)
    memory = passed / alone_us / 1e3 * traffic
    return Gang("collective", alone_us, memory, default_units(library, kind), need)


def _plan_gangs(machine: Machine, kind: Kind, nbytes: int, times: NodesTimes) -> tuple[Gang, ...]:
    """Return the steps of the first rank's plan; the last gang ends when all have."""
    node = dataclasses.replace(machine, nodes=1)
    gpus = machine.gpus
    near_us = sum(one.end_us - one.begin_us for one in times.steps if not isinstance(one.step, Far | Join))
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    moving = DMA_TRAFFIC * rounds * nbytes * (gpus - 1) / gpus / max(near_us, NOTHING_US) / 1e3
    found: list[Gang] = []
    near: tuple[str, ...] = ()
    fars: list[str] = []
    for number, one in enumerate(times.steps):
        took, name = max(NOTHING_US, one.end_us - one.begin_us), f"step {number}"
        if isinstance(one.step, Join):
            near = (*near, fars[one.step.number])
        elif isinstance(one.step, Far):
            far = _far(machine, one.step.kind, took)
            found.append(dataclasses.replace(far, name=name, after=(*near, *fars[-1:])))
            fars.append(name)
        else:
            parts: tuple[Gang, ...] = (Gang(name, took, moving),)
            if isinstance(one.step, Near):
                parts = dma_gangs(node, one.step.kind, one.step.input.count * ELEMENT_BYTES[DTYPE])
            longer = took / run_device(node, parts).time_us
            found += [stretched(part, longer) for part in named_gangs(parts, name, near)]
            near = (name,)
    found.append(Gang("collective", NOTHING_US, 0.0, after=(*near, *fars[-1:])))
    # Between steps a plan waits for its host and for flags; here what it takes is that of its steps.
    assert times.hierarchical_us is not None, "a plan has a time"
    longer = times.hierarchical_us / gangs_us(machine, tuple(found))
    return tuple(stretched(gang, longer, part_of=str(kind)) for gang in found)


def _far(machine: Machine, kind: Kind, alone_us: float) -> Gang:
    """Return the library's kernel on a rail. The network is slower than links, and as many units less fill it."""
    library, units = machine.library, default_units(machine.library, kind)
    network = float(machine.links.network_gbps * machine.links.nics_per_gpu)
    need = max(1.0, library.all_gather_need * network / float(library.all_gather_gbps))
    return Gang("far", alone_us, network * library.traffic, units, min(need, units))


def named_gangs(parts: Sequence[Gang], name: str, behind: tuple[str, ...]) -> list[Gang]:
    """Return the parts of a collective under names of their own, of which the last one is the collective's name.

    Args:
        parts: of one collective.
        name: of the collective.
        behind: kernels that parts wait for which wait for no other part.
    """
    names = {part.name: f"{name} {part.name}" for part in parts[:-1]} | {parts[-1].name: name}
    return [
        dataclasses.replace(
            part,
            name=names[part.name],
            after=tuple(names[before] for before in part.after) or behind,
            part_of=part.part_of and name,
        )
        for part in parts
    ]


def stretched(gang: Gang, longer: float, **fields: Any) -> Gang:
    """Return a gang that takes longer by a factor, with other fields besides."""
    return dataclasses.replace(gang, alone_us=gang.alone_us * longer, memory_gbps=gang.memory_gbps / longer, **fields)

"""Collectives among several nodes, simulated: the plans that a process group runs, flat rings, trees, and a floor.

Every way is one program of all ranks (``nodes_program.py``, ``nodes_baselines.py``) on the machine's network. Near
steps are the programs of one node's ranks on copy engines, the fastest variant of each; far steps, rings and trees are
kernels of the vendor's library, with its figures for start and bandwidth. Ranks that do alike are simulated once.

Not modelled: near steps by kernels, which ``auto`` takes where it has measured that they are faster (small pieces); the
time of a library's step within a node beside its bytes, so that flat rings and trees of small calls are predicted too
fast; ranks that come late; and switches that add up.
"""

from __future__ import annotations

import dataclasses

from sidelane.integrations.nodes.topology import NodesChoice, choose_steps, count_pieces
from sidelane.program.collective import Kind
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.node_steps import Step, nodes_of
from sidelane_lab.model.nodes_baselines import TREES, flat, tree
from sidelane_lab.model.nodes_program import planned

KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST)


@dataclasses.dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a plan with its begin and end; of a join, of the wait."""

    step: Step
    begin_us: float
    end_us: float


@dataclasses.dataclass(frozen=True, slots=True)
class NodesTimes:
    """Predicted ways of a collective among several nodes.

    Attributes:
        choice: way that a process group takes, with the reason.
        flat_us: the library's rings among all ranks, or its exchange; None for a broadcast whose chain needs more
            chunks than are simulated.
        tree_us: the library's tree; None where it has none.
        hierarchical_us: the plans of all ranks, in the choice's pieces; None where a node has one rank.
        floor_us: the latency of one way, and the least bytes at the bandwidth of all NICs of a node.
        steps: steps of rank 0.
    """

    choice: NodesChoice
    flat_us: float | None
    tree_us: float | None
    hierarchical_us: float | None
    floor_us: float
    steps: tuple[TimedStep, ...] = ()


@remembered("gpu", "links", "dma", "library")
def nodes_times(machine: Machine, kind: Kind, nbytes: int, beside: bool = False) -> NodesTimes:
    """Predict a collective among all GPUs of several nodes.

    Args:
        machine: several nodes that are connected.
        kind: one of :data:`KINDS`; a broadcast is from rank 0.
        nbytes: gathered bytes of an all_gather, the local buffer of the others.
        beside: True if the call runs next to a computation, by which a process group chooses.

    Raises:
        ValueError: another kind, one node, or nodes that are not connected.
    """
    rings, branches = ring_us(machine, kind, nbytes), tree_us(machine, kind, nbytes)
    choice = choose_steps(kind, nbytes, nodes_of([machine.gpus] * machine.nodes), beside=beside)
    hierarchical: float | None = None
    steps: tuple[TimedStep, ...] = ()
    if machine.gpus > 1:
        plans = planned(machine, kind, nbytes, count_pieces(nbytes))
        run = plans.simulate()
        hierarchical = run.time_us
        steps = tuple(TimedStep(step, run.stamps[0, begin], run.stamps[0, end]) for step, begin, end in plans.steps)
    return NodesTimes(choice, rings, branches, hierarchical, least_us(machine, kind, nbytes), steps)


@remembered("gpu", "links", "dma", "library")
def ring_us(machine: Machine, kind: Kind, nbytes: int) -> float | None:
    """Predict a collective of the vendor's library among all GPUs by rings or an exchange.

    It is None as in :class:`NodesTimes`; arguments and errors are those of :func:`nodes_times`.
    """
    if kind not in KINDS:
        allowed = ", ".join(KINDS)
        raise ValueError(f"nodes_times: kind (value={kind}, allowed={allowed}; all of it passes the root's network)")
    if machine.nodes == 1:
        raise ValueError(f"nodes_times: nodes of {machine.name} (value=1, allowed=2 and more)")
    rings = flat(machine, kind, nbytes)
    return None if rings is None else rings.simulate().time_us


@remembered("gpu", "links", "dma", "library")
def tree_us(machine: Machine, kind: Kind, nbytes: int) -> float | None:
    """Predict the same by the library's tree; None where it has none."""
    return tree(machine, kind, nbytes).simulate().time_us if kind in TREES else None


def least_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Return the time that no way is faster than: what a node must send or receive, by all of its NICs."""
    links, nodes, ranks = machine.links, machine.nodes, machine.world_size
    share = {
        Kind.ALL_REDUCE: 2 * (nodes - 1) / nodes,
        Kind.BROADCAST: 1.0,
        Kind.ALL_TO_ALL: (ranks - machine.gpus) / ranks * machine.gpus,
    }.get(kind, (nodes - 1) / nodes)
    gbps = links.network_gbps * links.nics_per_gpu * machine.gpus
    return float(links.network_us + share * nbytes / (gbps * 1e3))

"""Collectives among several nodes: the plan that a process group runs, step by step, next to a flat ring and a floor.

Steps come from :func:`sidelane.integrations.nodes.plan.make_plan`. Near steps are the programs of one node's ranks on
copy engines, simulated, the fastest variant of each. Far steps are rings of the vendor's library (exchanges for an
all-to-all) on all rails at once, one after the other on each rail. A rank's steps end before its next begin, but far
ones, which go on until they are joined.

Not modelled: near steps by kernels, which ``auto`` takes where it has measured that they are faster (small pieces);
near and far steps that slow each other down in memory; ranks that come late; trees; and near steps whose host work
hides behind the steps before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from sidelane.integrations.nodes.choose import NodesChoice, choose
from sidelane.integrations.nodes.explain import counts_of, nodes_of
from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.steps import Copies, Far, Join, Near, NodeBroadcast, NodePlan, Step
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program import collective as define
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build_batch, list_variants, variants
from sidelane.program.collective import Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower
from sidelane_lab.machines.network import latency_and_bytes_us
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine, Topology
from sidelane_lab.model.collectives import dependencies, program_of
from sidelane_lab.sim import simulate

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
        flat_us: the library's ring among all ranks, or its exchange.
        hierarchical_us: the plan of the slowest rank, in the choice's pieces; None where there is nothing to do within
            a node.
        floor_us: the latency of one way, and the least bytes at the bandwidth of all NICs of a node.
        steps: steps of rank 0.
    """

    choice: NodesChoice
    flat_us: float
    hierarchical_us: float | None
    floor_us: float
    steps: tuple[TimedStep, ...] = ()


def nodes_times(machine: Machine, kind: Kind, nbytes: int, dtype: str = "bfloat16") -> NodesTimes:
    """Predict a collective among all GPUs of several nodes.

    Args:
        machine: several nodes that are connected.
        kind: one of :data:`KINDS`; a broadcast is from rank 0.
        nbytes: gathered bytes of an all_gather, the local buffer of the others.
        dtype: of the elements.

    Raises:
        ValueError: another kind, one node, or nodes that are not connected.
    """
    if kind not in KINDS:
        allowed = ", ".join(KINDS)
        raise ValueError(f"nodes_times: kind (value={kind}, allowed={allowed}; all of it passes the root's network)")
    if machine.nodes == 1:
        raise ValueError(f"nodes_times: nodes of {machine.name} (value=1, allowed=2 and more)")
    nodes = nodes_of([machine.gpus] * machine.nodes)
    choice = choose(kind, nbytes, nodes)
    counts, item = counts_of(kind, nbytes, dtype, machine.world_size)
    # Ranks of a node have the same steps, and nodes but the root's.
    ranks = (0, machine.gpus) if kind is Kind.BROADCAST else (0,)
    runs: list[tuple[TimedStep, ...]] = []
    for rank in ranks if machine.gpus > 1 else ():
        runs.append(_timed(machine, nodes, make_plan(kind, nodes, rank, counts, choice.pieces), item, dtype))
    hierarchical = max((run[-1].end_us for run in runs), default=None)
    flat = _library_us(machine, kind, nbytes, flat=True)
    return NodesTimes(choice, flat, hierarchical, least_us(machine, kind, nbytes), runs[0] if runs else ())


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


def _timed(machine: Machine, nodes: Nodes, plan: NodePlan, item: int, dtype: str) -> tuple[TimedStep, ...]:
    """Run a plan: near steps one after the other, far ones one after the other beside them."""
    found: list[TimedStep] = []
    far_ends: list[float] = []
    now = 0.0
    for step in plan.steps:
        if isinstance(step, Far):
            begin = max(now, far_ends[-1] if far_ends else 0.0)
            nbytes = max(step.input.count, step.output.count) * item
            far_ends.append(begin + _library_us(machine, step.kind, nbytes, flat=False))
            found.append(TimedStep(step, begin, far_ends[-1]))
            continue
        if isinstance(step, Copies) and not step.pairs:
            continue
        end = max(now, far_ends[step.number]) if isinstance(step, Join) else now + _near_us(machine, step, item, dtype)
        found.append(TimedStep(step, now, end))
        now = end
    return tuple(found)


def _near_us(machine: Machine, step: Step, item: int, dtype: str) -> float:
    """Return the time of a step in one node."""
    ranks = machine.gpus
    if isinstance(step, Copies):
        nbytes = sum(to.count for to, _ in step.pairs) * item
        return float(machine.dma.copy_us + nbytes / (machine.dma.local_gbps * 1e3))
    if isinstance(step, NodeBroadcast):
        return _simulated_us(machine, tuple((root, span.count * item) for root, span in step.parts))
    assert isinstance(step, Near)
    part = step.input.count // ranks
    if step.kind is Kind.ALL_TO_ALL:
        return _simulated_us(machine, define.all_to_all([[part * item] * ranks] * ranks))
    return _simulated_us(machine, define.reduce_scatter([part * item] * ranks, Reduction(ReduceOp.SUM, dtype)))


@remembered("gpu", "links", "dma")
def _simulated_us(machine: Machine, what: Collective | tuple[tuple[int, int], ...]) -> float:
    """Return the fastest variant's time on one node. Broadcasts of (root, bytes) are one batch."""
    node = dataclasses.replace(machine, nodes=1)
    return min(simulate(program, node, edges=dependencies(program)).time_us for program in _programs(machine, what))


def _programs(machine: Machine, what: Collective | tuple[tuple[int, int], ...]) -> Iterator[Program]:
    if isinstance(what, Collective):
        yield from (program_of(what, variant) for variant in variants(what.kind))
        return
    parts = tuple(define.broadcast(nbytes, machine.gpus, root, in_place=True) for root, nbytes in what)
    batch, transports = Batch("batch", machine.gpus, parts), [Transport.PUSH] * len(parts)
    for variant in list_variants(Kind.BROADCAST):
        yield freeze(lower(build_batch(batch, variant, transports), {Copy}))


def _library_us(machine: Machine, kind: Kind, nbytes: int, *, flat: bool) -> float:
    """Return the time of the library's collective among all ranks (flat), or among the ranks of every rail at once."""
    library, links, gpus = machine.library, machine.links, machine.gpus
    latency_us, us_per_byte = _pace(machine, kind, flat)
    bytes_us = us_per_byte * nbytes
    if flat and gpus > 1:
        speed = float(getattr(library, f"{_timed_as(kind)}_gbps")) * 1e3
        members = machine.world_size
        if kind is Kind.ALL_TO_ALL:
            inside = nbytes / members * (1 if links.topology is Topology.MESH else gpus - 1)
        else:  # rings through all links of a mesh
            inside = _passed(kind, members) * nbytes / (gpus - 1 if links.topology is Topology.MESH else 1)
        bytes_us = max(bytes_us, inside / speed)
    fixed = float(getattr(library, f"{_timed_as(kind)}_us"))
    return fixed + latency_us + min(bytes_us / library.low_latency_share, library.bulk_us + bytes_us)


def _timed_as(kind: Kind) -> Kind:
    """Return the kind whose figures of the library stand for it: nothing is known of broadcasts."""
    return Kind.ALL_GATHER if kind is Kind.BROADCAST else kind


def _passed(kind: Kind, members: int) -> float:
    """Return what a rank of a ring passes on, as a share of the larger buffer."""
    return {Kind.ALL_REDUCE: 2 * (members - 1) / members, Kind.BROADCAST: 1.0}.get(kind, (members - 1) / members)


@remembered("links")
def _pace(machine: Machine, kind: Kind, flat: bool) -> tuple[float, float]:
    """Return the latency of all hops of a collective, and the time of a byte of its larger buffer on the network.

    Flat rings are as many as a node's GPUs, and each leaves the node by another one's NIC.
    """
    gpus, nodes = machine.gpus, machine.nodes
    ranks = range(machine.world_size)
    members = machine.world_size if flat else nodes
    if kind is Kind.ALL_TO_ALL:
        pairs = itertools.permutations(ranks, 2)
        sent = {(a, b): 1 / members for a, b in pairs if flat or a % gpus == b % gpus}
        hops = 1
    else:
        passed = _passed(kind, members) / (gpus if flat else 1)
        last = machine.world_size - gpus if kind is Kind.BROADCAST else machine.world_size  # nothing goes to the root
        sent = {(a, (a + gpus) % machine.world_size): passed for a in ranks if a < last}
        hops = (members - 1) * (2 if kind is Kind.ALL_REDUCE else 1)
    latency_us, us_per_byte = latency_and_bytes_us(machine, sent)
    return hops * latency_us, us_per_byte

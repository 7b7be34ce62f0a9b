"""Fused operators among many ranks that all do the same: one stands for all of its node, and its node for all nodes.

Among 128 ranks every one sends to every other at once, and each part of a kernel starts a flow: too many to simulate
one by one. By symmetry the others' flows are known. What a rank has for its node and what it has for other nodes is one
flow each, at the pace at which an even exchange passes links and network:

    rank 0  | for other nodes | for its node | its own |     rank 0 of the model     its node's others: rank 1
                                                             other nodes: rank 2, which has a rank 3 beside it

Not modelled: a rank's peers come in turn, so that at any moment all ranks send one way along the axes of a torus. Real
kernels can deal their slices out to all peers in turn instead; the exchange's pace takes that for granted.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.collective import Kind
from sidelane_lab.machines.network import exchange_pace
from sidelane_lab.machines.spec import Machine, NetworkTopology, Topology
from sidelane_lab.model.fused import FusedKernel, KernelWork, run_fused
from sidelane_lab.model.gangs import flat_us
from sidelane_lab.model.operators import FusedTimes, OperatorModel, collective_us, counts_of, require_room
from sidelane_lab.model.workgroups import fused_figures

OWN, NEAR, FAR = 0, 1, 2
"""Numbers to which a rank's own is added, bit by bit, for who stands for itself, its node and the other nodes."""


def predict_symmetric(machine: Machine, operator: OperatorModel, *, record: bool = False) -> FusedTimes:
    """Predict an operator among several nodes, fused and not, with what other nodes wait for first.

    Args:
        machine: several nodes of any number of GPUs.
        operator: an even all-to-all of what is computed.
        record: keep the timeline of the ranks that stand for all.

    Raises:
        ValueError: one node, nodes that are not connected, an operator that is no even all-to-all of what is computed,
            or tensors that no memory of the machine holds.
    """
    if machine.nodes == 1 or not machine.links.network_gbps:
        raise ValueError(f"predict_symmetric: {machine.name} (value=1 node, allowed=several that are connected)")
    require_room(machine, operator)
    occupancy = float(fused_figures(machine).kept_share)
    kernel = operator.kernel(machine, occupancy, 0) if operator.has_kernel else None
    if kernel is None or operator.kind is not Kind.ALL_TO_ALL or counts_of(operator) or kernel.first_shares:
        text = "an even all-to-all of what is computed: embedding_all_to_all, gemm_all_to_all"
        raise ValueError(f"fused: {operator.name} among the nodes of {machine.name} (allowed={text})")
    few = stand_in(machine)
    kernels = [_stand_in_kernel(machine, kernel, rank, few.gpus) for rank in range(few.world_size)]
    nbytes = operator.collective_bytes(machine.world_size)
    if machine.gpus == 1:
        exchanged_us = collective_us(machine, operator.kind, nbytes)
    else:
        exchanged_us = flat_us(machine, operator.kind, round(nbytes))
    return FusedTimes(operator.compute_us(machine), exchanged_us, run_fused(few, kernels, record=record))


def stand_in(machine: Machine) -> Machine:
    """Return two nodes of two GPUs, or of one, whose links and network carry an even exchange at a machine's pace."""
    links, ranks, gpus = machine.links, machine.world_size, min(machine.gpus, 2)
    latency_us, us_per_byte = exchange_pace(machine)
    few = dataclasses.replace(
        machine, gpus=gpus, nodes=2, links=dataclasses.replace(links, network=NetworkTopology.RAILS)
    )
    far_share = (ranks - machine.gpus) / ranks
    values = {
        "network_gbps": far_share / us_per_byte / 1e3,
        "network_us": latency_us,
        "nics_per_gpu": 1,
        "oversubscription": 1,
        "usable_gbps": links.usable_gbps * (machine.gpus - 1 if links.topology is Topology.MESH and gpus > 1 else 1),
    }
    for name, value in values.items():
        few = few.with_value(f"links.{name}", value)
    return few


def _stand_in_kernel(machine: Machine, kernel: FusedKernel, rank: int, gpus: int) -> FusedKernel:
    """Return the kernel of one of the ranks that stand for all, from that of a machine's first rank."""
    works: list[KernelWork] = []
    for group in (FAR, NEAR, OWN):
        for work in kernel.works:
            sent: dict[int, float] = {}
            for to, nbytes in work.sends:
                to_group = OWN if to == 0 else NEAR if machine.node_of(to) == 0 else FAR
                sent[to_group] = sent.get(to_group, 0.0) + nbytes
            if max(sent, default=OWN) == group:
                to_rank = {OWN: rank, NEAR: rank ^ 1, FAR: rank ^ gpus}
                works.append(KernelWork(work.workgroups, tuple((to_rank[one], sent[one]) for one in sorted(sent))))
    launched = float(machine.matmul.launch_us)
    return dataclasses.replace(kernel, works=tuple(works), puts=True, start_us=launched)

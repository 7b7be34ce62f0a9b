"""A training pass of DLRM among nodes of one GPU, embedding tables spread over them and MLPs on each (DLRM, ASTRA-Sim).

    computes  [embedding][bottom MLP]....[top MLP][top, backward][bottom, backward]....[update]
    network              [all-to-all]             [all-reduces][all-to-all][all-reduces]

Fused (fused operators paper, IV-D), the embedding and its all-to-all begin together, and so do the all-to-all of the
gradients and the update, which is the same pipeline backward:

    computes  [embedding  ][bottom MLP]..[top MLP][top, backward][bottom, backward]..[update]
    network   [all-to-all    ]                    [all-reduces][all-to-all    ][all-reduces]

A GPU computes one thing after another, and the network carries one collective after another, of those that are ready
an all-to-all first. As in ASTRA-Sim, neither slows the other. Left out: the interaction of features, whose size depends
on all tables, the loss and the optimizer of the MLPs.
"""

from __future__ import annotations

import dataclasses

from sidelane_lab.machines.network import exchange_pace
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine, NetworkTopology
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.operators import Embedding
from sidelane_lab.model.symmetry import predict_symmetric
from sidelane_lab.pairs.workload import Gemm
from sidelane_lab.traces.graph import NodeKind, TraceNode
from sidelane_lab.traces.schedule import scheduled

COMPUTES, NETWORK = "computes", "network"
"""Names of what runs one node after another."""
GRADIENT_BYTES = 4
"""Bytes of an element of a gradient that is added up, float32 as in DLRM."""
MOVES = 2
"""Number of times that an update moves a row of a bag: it is read, and written."""


@dataclasses.dataclass(frozen=True, slots=True)
class DlrmPass:
    """A training pass; the first four are Table II of the fused operators paper, which leaves the others open.

    Attributes:
        layers, width: number of all MLP layers, and rows and columns of each.
        dim, pooling: elements of a row of an embedding table, and rows of a bag.
        batch: samples of a node.
        tables: number of a node's embedding tables.
        bottom: layers of the bottom MLP, which runs beside the all-to-all; the others are the top MLP's.
    """

    layers: int = 43
    width: int = 682
    dim: int = 92
    pooling: int = 70
    batch: int = 64
    tables: int = 32
    bottom: int = 14


def dlrm_passes(machine: Machine, step: DlrmPass) -> tuple[tuple[TraceNode, ...], tuple[TraceNode, ...]]:
    """Predict a pass, unfused and fused: nodes with their begins.

    Raises:
        ValueError: nodes of several GPUs, or not on a torus, or tensors that no memory of the machine holds.
    """
    if machine.gpus > 1 or machine.links.network is not NetworkTopology.TORUS:
        value, allowed = f"{machine.nodes} of {machine.gpus} GPUs", "several of one GPU on a torus, as in the paper"
        raise ValueError(f"dlrm_passes: nodes of {machine.name} (value={value}, allowed={allowed})")
    unfused, fused = (scheduled(dlrm_graph(machine, step, fused=one), _exchange_first) for one in (False, True))
    return unfused, fused


def dlrm_graph(machine: Machine, step: DlrmPass, *, fused: bool) -> list[TraceNode]:
    """Return the nodes of a pass in the order in which a rank issues them; a trace of Chakra can hold them."""
    found: list[TraceNode] = []

    def add(name: str, lane: str, us: float, *after: int, collective: str = "", nbytes: float = 0) -> int:
        kind = NodeKind.COLLECTIVE if collective else NodeKind.COMPUTE
        ranks = machine.nodes if collective else 0
        ident = len(found)
        node = TraceNode(
            ident, name, kind, after, us, lane=lane, collective=collective, nbytes=round(nbytes), ranks=ranks
        )
        found.append(node)
        return ident

    def exchange(name: str, us: float, *after: int, share: float = 1.0) -> int:
        return add(name, NETWORK, us, *after, collective="all_to_all", nbytes=share * nbytes)

    forward, backward = (_embedding(machine, _operator(machine, step, rows)) for rows in (1, MOVES))
    nbytes = _operator(machine, step, 1).collective_bytes(machine.world_size)
    sent_us = exchange_pace(machine)[1] * nbytes
    forward_us, backward_us = layer_us(machine, step)
    if fused:
        computing_us, whole_us = max(forward.fused.computed_us), forward.fused.time_us
        pooled = add("embedding, fused", COMPUTES, computing_us)
        arrived = exchange("all-to-all, fused", min(sent_us, whole_us))
        arrived = add("last slices", "", max(0.0, whole_us - sent_us), arrived)
    else:
        pooled = add("embedding", COMPUTES, forward.compute_us)
        arrived = exchange("all-to-all", forward.collective_us, pooled)
    last = pooled
    for layer in range(step.layers):
        behind = (arrived,) if layer == step.bottom else ()
        last = add(f"MLP {layer}", COMPUTES, forward_us, last, *behind)
    gradients, reduced_us = step.width * step.width * GRADIENT_BYTES, all_reduce_us(machine, step)
    for layer in reversed(range(step.layers)):
        last = add(f"MLP {layer}, backward", COMPUTES, backward_us, last)
        if layer == step.bottom and fused:  # the gradients of what was pooled are known
            updating_us, whole_us = max(backward.fused.computed_us), backward.fused.time_us
            first_us = min(sent_us, whole_us - updating_us)
            begun = exchange("first gradients, fused", first_us, last, share=first_us / sent_us)
            rest_us = sent_us - first_us
            exchange("all-to-all of gradients, fused", rest_us, begun, share=rest_us / sent_us)
        elif layer == step.bottom:
            updating_us, begun = backward.compute_us, exchange("all-to-all of gradients", backward.collective_us, last)
        add(f"all-reduce {layer}", NETWORK, reduced_us, last, collective="all_reduce", nbytes=gradients)
    add("update", COMPUTES, updating_us, last, begun)
    return found


def _operator(machine: Machine, step: DlrmPass, rows: int) -> Embedding:
    return Embedding(step.batch * machine.nodes, step.tables, rows * step.pooling, dim=step.dim)


_embedding = remembered("gpu", "links", "library", "matmul", "fused", maxsize=1024)(predict_symmetric)


@remembered("gpu", "matmul")
def layer_us(machine: Machine, step: DlrmPass) -> tuple[float, float]:
    """Return the time of an MLP's layer, forward and backward: GEMMs, and the kernel of what is not linear."""
    rows, width, launch = step.batch, step.width, float(machine.matmul.launch_us)
    forward = gemm_us(machine, Gemm(rows, width, width))
    return forward + launch, forward + gemm_us(machine, Gemm(width, width, rows)) + launch


def all_reduce_us(machine: Machine, step: DlrmPass) -> float:
    """Return the time of the all-reduce of a layer's gradients.

    Along the axes of a torus, as ASTRA-Sim has it: rows, and what is left of it columns, each a ring in both
    directions. Every step of a ring is a hop.
    """
    nbytes, links = step.width * step.width * GRADIENT_BYTES, machine.links
    row = int(links.torus_row)
    column, link = machine.nodes // row, float(links.network_gbps * links.nics_per_gpu) / 4
    sent = 2 * nbytes * ((row - 1) / row + (column - 1) / column / row)
    hops = 2 * (row - 1 + column - 1)
    return float(machine.library.all_reduce_us) + hops * float(links.network_us) + sent / (2 * link * 1e3)


def _exchange_first(node: TraceNode) -> float:
    """Put all-to-alls before other collectives of the network."""
    return float(node.collective != "all_to_all")

"""The network between nodes: what bytes from one GPU to another pass, and the least time of what all GPUs send.

Bytes flow: they take a share of everything that they pass at once. A GPU that has several NICs uses all of them for
each transfer; GPUs that share a NIC share its bandwidth. Not modelled: packets and their headers, collisions of flows
that hash to one path of a fat tree, switches that add up (SHARP), and the way of bytes between a GPU and its NIC.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine, NetworkTopology, Topology

Resource = tuple[object, ...]
"""Name of something that bytes pass: a kind, which begins with ``network`` between nodes, and numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkRoute:
    """Way of bytes from one GPU to another.

    Attributes:
        passes: bandwidth of every resource on the way, in GB/s.
        latency_us: time of the first byte.
    """

    passes: tuple[tuple[Resource, float], ...]
    latency_us: float


def route(machine: Machine, source: int, target: int) -> NetworkRoute:
    """Return the way from one rank to another, of another node.

    >>> from sidelane_lab.machines.load import named
    >>> route(named("h100x8x2"), 0, 8)
    NetworkRoute(passes=((('network out', 0, 0), 50.0), (('network in', 1, 0), 50.0)), latency_us=3.0)

    Raises:
        ValueError: the nodes are not connected.
    """
    links = machine.links
    if not links.network_gbps:
        raise ValueError(f"links.network_gbps of {machine.name} (value=0, allowed=what joins nodes)")
    from_node, to_node = machine.node_of(source), machine.node_of(target)
    ports = round(machine.gpus * min(1.0, links.nics_per_gpu))
    port_gbps = links.network_gbps * max(1.0, links.nics_per_gpu)
    if links.network is NetworkTopology.TORUS:
        link_gbps = port_gbps * ports / 4
        hops = [(("network torus", *link), link_gbps) for link in _hops(machine, from_node, to_node)]
        return NetworkRoute(tuple(hops), len(hops) * float(links.network_us))
    sends, receives = (rank % machine.gpus * ports // machine.gpus for rank in (source, target))
    passes = [(("network out", from_node, sends), port_gbps), (("network in", to_node, receives), port_gbps)]
    leaves = [int(node // links.leaf_nodes) for node in (from_node, to_node)]
    rails = (sends, receives) if links.network is NetworkTopology.RAILS else (0, 0)
    below = 1 if links.network is NetworkTopology.RAILS else ports
    spine_gbps = links.leaf_nodes * below * port_gbps / links.oversubscription
    if (leaves[0], rails[0]) != (leaves[1], rails[1]) and links.oversubscription > 1:
        passes.append((("network up", leaves[0], rails[0]), spine_gbps))
        passes.append((("network down", leaves[1], rails[1]), spine_gbps))
    return NetworkRoute(tuple((name, float(gbps)) for name, gbps in passes), float(links.network_us))


def way_between(machine: Machine, source: int, target: int, link_gbps: float) -> NetworkRoute:
    """Return the way from one rank to another: by a link or by two ports of so many GB/s, or between nodes."""
    if machine.node_of(source) != machine.node_of(target):
        return route(machine, source, target)
    if machine.links.topology is Topology.SWITCH:
        return NetworkRoute(((("port out", source), link_gbps), (("port in", target), link_gbps)), 0.0)
    return NetworkRoute(((("link", source, target), link_gbps),), 0.0)


def _hops(machine: Machine, source: int, target: int) -> Iterator[tuple[int, str, int]]:
    """Yield the links of a torus on the shortest way, along the row first: node, axis and direction of each.

    Of two ways of the same length, nodes take one and the other in turn.
    """
    row = int(machine.links.torus_row)
    sides = {"row": row, "column": machine.nodes // row}
    at = {"row": source % row, "column": source // row}
    to = {"row": target % row, "column": target // row}
    turn = 1 if sum(at.values()) % 2 else -1
    for axis, side in sides.items():
        ahead = (to[axis] - at[axis]) % side
        direction = turn if 2 * ahead == side else 1 if 2 * ahead < side else -1
        while at[axis] != to[axis]:
            yield at["column"] * row + at["row"], axis, direction
            at[axis] = (at[axis] + direction) % side


def floor_us(machine: Machine, sent: Mapping[tuple[int, int], float]) -> float:
    """Return the least time of bytes from rank to rank: the sum of :func:`latency_and_bytes_us`."""
    return sum(latency_and_bytes_us(machine, sent))


def latency_and_bytes_us(machine: Machine, sent: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """Return the longest latency of what ranks send at once, and the time of the busiest resource's bytes.

    Args:
        machine: several nodes.
        sent: bytes for (source, target); what stays in a node does not count.
    """
    loads: defaultdict[Resource, float] = defaultdict(float)
    speeds: dict[Resource, float] = {}
    latency_us = 0.0
    for (source, target), nbytes in sent.items():
        if machine.node_of(source) != machine.node_of(target):
            way = route(machine, source, target)
            latency_us = max(latency_us, way.latency_us)
            speeds.update(way.passes)
            for name, _ in way.passes:
                loads[name] += nbytes
    return latency_us, max((load / (speeds[name] * 1e3) for name, load in loads.items()), default=0.0)


@remembered("links")
def exchange_pace(machine: Machine) -> tuple[float, float]:
    """Return the latency of an even all-to-all among all GPUs, and the network's time of a byte of a GPU's buffer.

    Leaf switches are alike, so that what the first one's nodes send is enough. On a torus of which a side is even
    nodes differ in the way around it that they take, so that all of them count.
    """
    ranks, links = machine.world_size, machine.links
    alike = int(links.leaf_nodes) if links.oversubscription > 1 else 1
    senders = machine.nodes if links.network is NetworkTopology.TORUS else min(machine.nodes, alike)
    share = 1 / ranks
    sent = {(a, b): share for a in range(senders * machine.gpus) for b in range(ranks)}
    return latency_and_bytes_us(machine, sent)

"""Ranks that stand for all others, where a program and a network look the same from every node.

A *fold* maps the ranks of a few nodes, at a few places of each, to themselves, and every other rank to one of them: of
the node as many nodes on, and of the place as many places on. If a move of all ranks by that many nodes, or places,
changes neither the program nor what bytes pass, all ranks that are mapped to one do the same at the same time, and one
of them need be simulated (:func:`fold_of`, and ``tests/sim/test_nodes_program.py`` against the full simulation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane_lab.machines.network import Resource, route
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine, NetworkTopology


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """Ranks of the first ``nodes`` nodes, at the first ``places`` places, that stand for those of ``machine``.

    Attributes:
        moved: nodes and places by which the ranks that are built have moved on from those; they stand for all as well.
    """

    machine: Machine
    nodes: int
    places: int
    moved: tuple[int, int] = (0, 0)

    @classmethod
    def whole(cls, machine: Machine) -> Fold:
        """Return the fold in which every rank stands for itself."""
        return cls(machine, machine.nodes, machine.gpus)

    @property
    def is_whole(self) -> bool:
        """True if every rank stands for itself."""
        return (self.nodes, self.places) == (self.machine.nodes, self.machine.gpus)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that stand for all others."""
        gpus, many, (by, across) = self.machine.gpus, self.machine.nodes, self.moved
        return tuple(
            (node + by) % many * gpus + (place + across) % gpus
            for node in range(self.nodes)
            for place in range(self.places)
        )

    def rank(self, rank: int) -> int:
        """Return the rank that stands for another."""
        node, place = divmod(rank, self.machine.gpus)
        return node % self.nodes * self.machine.gpus + place % self.places

    def resource(self, key: Resource) -> Resource:
        """Return the resource that stands for another one of the simulator's or the network's."""
        kind, *rest = key
        first, *others = [number for number in rest if isinstance(number, int)]
        if kind == "link":
            gpus, here = self.machine.gpus, self.rank(first)
            return kind, here, here // gpus * gpus + (here + others[0] - first) % gpus
        if not str(kind).startswith("network"):
            return kind, self.rank(first), *others
        if kind == "network torus":
            return kind, first % self.nodes, *rest[1:]
        if kind in ("network up", "network down"):
            return kind, first % self._leaves(), others[0] % self._ports()
        return kind, first % self.nodes, others[0] % self._ports()

    def _leaves(self) -> int:
        return max(1, self.nodes // int(self.machine.links.leaf_nodes))

    def _ports(self) -> int:
        return max(1, self.places * _ports(self.machine) // self.machine.gpus)


@remembered("links")
def fold_of(machine: Machine, steps: tuple[tuple[int, int], ...], *, nodes: int = 1, places: int = 0) -> Fold:
    """Return the smallest fold that changes nothing on the network.

    Args:
        machine: one node, or several that are connected.
        steps: pairs (nodes, places) by which what is sent moves on: ``(1, 0)`` to the same place of the next node.
        nodes: smallest number of nodes that the program allows; a divisor of the machine's.
        places: smallest number of places that the program allows; 0 for all.
    """
    gpus = machine.gpus
    if not places or _ports(machine) != gpus:
        places = gpus
    for count in range(nodes, machine.nodes):
        if not machine.nodes % count and not count % nodes and _is_even(machine, steps, count, 0):
            break
    else:
        count = machine.nodes
    if places < gpus and machine.nodes > 1 and not _is_even(machine, steps, 0, places):
        places = gpus
    return Fold(machine, count, places)


def _ports(machine: Machine) -> int:
    return round(machine.gpus * min(1.0, machine.links.nics_per_gpu))


def _is_even(machine: Machine, steps: Sequence[tuple[int, int]], nodes: int, places: int) -> bool:
    """Return True if all that moves by ``steps`` passes what it would from that many nodes, and places, on."""
    gpus, many = machine.gpus, machine.nodes
    for node in range(many):
        for place in range(gpus if places else 1):
            for by, across in steps:
                ends = [(node, place), ((node + by) % many, (place + across) % gpus)]
                if ends[0][0] == ends[1][0]:
                    continue
                here = route(machine, *(n * gpus + p for n, p in ends))
                moved = [((n + nodes) % many, (p + places) % gpus) for n, p in ends]
                there = route(machine, *(n * gpus + p for n, p in moved))
                if places and not {*here.passes}.isdisjoint(there.passes):
                    return False  # what all places of a node share has no others to stand for
                if here.latency_us != there.latency_us or {**dict(there.passes)} != {
                    _moved(machine, key, nodes, places): gbps for key, gbps in here.passes
                }:
                    return False
    return True


def _moved(machine: Machine, key: Resource, nodes: int, places: int) -> Resource | None:
    """Return the resource that another one becomes if all ranks move on; None where they do not do so as one."""
    kind, first, *others = key
    assert isinstance(first, int)
    if kind == "network torus":
        return kind, (first + nodes) % machine.nodes, *others
    port = (int(others[0]) + places * _ports(machine) // machine.gpus) % _ports(machine)  # type: ignore[call-overload]
    if kind in ("network up", "network down"):
        leaf_nodes = int(machine.links.leaf_nodes)
        if nodes % leaf_nodes:
            return None
        rail = port if machine.links.network is NetworkTopology.RAILS else 0
        return kind, (first + nodes // leaf_nodes) % -(-machine.nodes // leaf_nodes), rail
    return kind, (first + nodes) % machine.nodes, port

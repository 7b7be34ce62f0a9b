"""The network between nodes: what bytes pass on each topology, and that a simulation is never faster than the floor."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from sidelane.program.collective import Kind
from sidelane.program.ir import Copy
from sidelane_lab.machines.load import named, parse
from sidelane_lab.machines.network import floor_us, route
from sidelane_lab.machines.spec import NetworkTopology
from sidelane_lab.model.nodes_baselines import flat
from sidelane_lab.sim import Fold

TORUS = named("mi210x1x128")


def nodes_of(text, nodes=4, base="h100x8x2"):
    return parse(f'base = "{base}"\nname = "x"\nnodes = {nodes}\n[links]\n{text}', "x.toml")


def kinds(machine, source, target):
    return [name[0].removeprefix("network ") for name, _ in route(machine, source, target).passes]


def test_a_gpu_sends_by_its_own_nics_or_by_one_that_it_shares():
    two, shared = nodes_of("nics_per_gpu = 2"), nodes_of("nics_per_gpu = 0.25")
    assert route(two, 3, 11).passes == ((("network out", 0, 3), 100.0), (("network in", 1, 3), 100.0))
    assert {route(shared, rank, 8).passes[0] for rank in range(4)} == {(("network out", 0, 0), 50.0)}
    assert route(shared, 4, 8).passes[0] == (("network out", 0, 1), 50.0)


def test_only_what_leaves_a_leaf_switch_of_a_fat_tree_shares_its_uplinks():
    machine = nodes_of('network = "fat_tree"\nleaf_nodes = 2\noversubscription = 4')
    assert kinds(machine, 0, 8) == ["out", "in"]
    assert kinds(machine, 0, 16) == ["out", "in", "up", "down"]
    assert dict(route(machine, 0, 16).passes)["network up", 0, 0] == 2 * 8 * 50 / 4


def test_only_what_changes_its_rail_passes_the_spines():
    machine = nodes_of("leaf_nodes = 32\noversubscription = 2")
    assert machine.links.network is NetworkTopology.RAILS
    assert kinds(machine, 3, 11) == ["out", "in"]
    assert kinds(machine, 3, 12) == ["out", "in", "up", "down"]
    assert dict(route(machine, 3, 12).passes)["network up", 0, 3] == 32 * 50 / 2


def test_a_torus_takes_the_shortest_way_and_a_latency_a_hop():
    for source, target in ((0, 1), (0, 15), (0, 17), (5, 100), (127, 0), (0, 72)):
        rows = abs(source // 16 - target // 16)
        columns = abs(source % 16 - target % 16)
        hops = min(rows, 8 - rows) + min(columns, 16 - columns)
        way = route(TORUS, source, target)
        assert len(way.passes) == hops and way.latency_us == pytest.approx(0.7 * hops)
        assert {gbps for _, gbps in way.passes} == {25.0}


def test_an_exchange_loads_all_links_of_an_axis_alike():
    """Nodes that are half a ring apart take one way round in half of the cases, and the other way in the rest."""
    loads = Counter()
    for source, target in itertools.permutations(range(128), 2):
        loads.update(name for name, _ in route(TORUS, source, target).passes)
    assert len(loads) == 4 * 128
    # On a ring of n, n * n / 8 ways pass a link in each direction, for each of the nodes of the other axis.
    assert {n for (_, _, axis, _), n in loads.items() if axis == "row"} == {16 * 16 // 8 * 8}
    assert {n for (_, _, axis, _), n in loads.items() if axis == "column"} == {8 * 8 // 8 * 16}
    exchange = dict.fromkeys(itertools.permutations(range(128), 2), 1e6)
    assert floor_us(TORUS, exchange) == pytest.approx(12 * 0.7 + 256 * 1e6 / 25e3)


def test_the_floor_is_latency_and_the_bytes_of_the_busiest_nic():
    machine = named("h100x8x2")
    assert floor_us(machine, {(0, 1): 1e9}) == 0
    assert floor_us(machine, {(0, 8): 5e6, (0, 9): 5e6, (1, 8): 1e6}) == pytest.approx(3 + 1e7 / 50e3)


@pytest.mark.parametrize(
    "machine",
    [
        named("h100x8x2"),
        named("mi210x1x2"),
        dataclasses.replace(named("mi300x8x2"), nodes=4),
        nodes_of("nics_per_gpu = 0.5"),
        nodes_of('network = "fat_tree"\nleaf_nodes = 2\noversubscription = 8'),
        nodes_of('network = "torus"\ntorus_row = 4\nnics_per_gpu = 0.5', nodes=8),
        nodes_of('network = "torus"\ntorus_row = 4\nnics_per_gpu = 4', nodes=16, base="mi210x1x2"),
    ],
    ids=["rails", "pair", "mesh", "shared", "oversubscribed", "torus", "torus of ones"],
)
def test_a_ring_is_no_faster_than_the_floor(machine):
    rings = flat(machine, Kind.ALL_GATHER, machine.world_size << 20, Fold.whole(machine))
    copied = Counter()
    for command in itertools.chain.from_iterable(queue.commands for queue in rings.program.queues):
        if isinstance(command, Copy):
            copied[command.src.rank, command.dst.rank] += float(command.src.nbytes)
    assert rings.simulate().time_us >= floor_us(machine, copied) * (1 - 1e-9)


def test_oversubscription_slows_what_crosses_it():
    free, narrow = (nodes_of(f'network = "fat_tree"\nleaf_nodes = 2\noversubscription = {factor}') for factor in (1, 8))
    narrow_us, free_us = (flat(machine, Kind.ALL_GATHER, 128 << 20).simulate().time_us for machine in (narrow, free))
    assert narrow_us > 1.5 * free_us


def test_nodes_without_a_network_are_refused():
    with pytest.raises(ValueError, match=r"links.network_gbps of h100x8x2 \(value=0, allowed=what joins nodes\)"):
        route(named("h100x8x2").with_value("links.network_gbps", 0), 0, 8)

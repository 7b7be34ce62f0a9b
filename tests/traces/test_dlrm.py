"""A training pass of DLRM on many nodes: the order of its nodes, fused against unfused."""

from __future__ import annotations

import itertools

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named, with_nodes
from sidelane_lab.model.gangs import flat_us
from sidelane_lab.model.nodes import least_us
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.figure_command import figure_of
from sidelane_lab.traces import dlrm
from sidelane_lab.traces.graph import NodeKind, TraceNode
from sidelane_lab.traces.schedule import end_us, scheduled

TORUS = named("mi210x1x128")
STEP = dlrm.DlrmPass(batch=16, tables=64)


def node(ident: int, lane: str, us: float, *after: int, collective: str = "") -> TraceNode:
    return TraceNode(ident, f"{ident}", NodeKind.COMPUTE, after, us, lane=lane, collective=collective)


def test_a_lane_runs_one_node_after_another_and_an_all_to_all_goes_first() -> None:
    nodes = (
        node(0, dlrm.COMPUTES, 10.0),
        node(1, dlrm.NETWORK, 20.0, collective="all_reduce"),
        node(2, dlrm.NETWORK, 5.0, collective="all_reduce"),
        node(3, dlrm.NETWORK, 5.0, 0, collective="all_to_all"),
        node(4, "", 7.0, 0),
        node(5, dlrm.COMPUTES, 1.0, 3, 4),
    )
    assert [one.start_us for one in scheduled(nodes, lambda one: one.collective != "all_to_all")] == [
        0,
        0,
        25,
        20,
        10,
        25,
    ]


@pytest.mark.parametrize(
    "step", [STEP, dlrm.DlrmPass(batch=2, tables=1, bottom=40), dlrm.DlrmPass(batch=512, tables=8)]
)
def test_passes_keep_their_order(step: dlrm.DlrmPass) -> None:
    for nodes in dlrm.dlrm_passes(TORUS, step):
        ends = {one.ident: one.start_us + one.duration_us for one in nodes}
        assert all(one.start_us >= ends[before] for one in nodes for before in one.after)
        for lane in (dlrm.COMPUTES, dlrm.NETWORK):
            alike = sorted((one.start_us, ends[one.ident]) for one in nodes if one.lane == lane)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(alike))
        layers = [one.name for one in nodes if one.name.startswith("all-reduce")]
        assert len(layers) == len(set(layers)) == step.layers


def test_fused_hides_the_shorter_of_both_and_no_more() -> None:
    """Long enough that layers and all-reduces count for nothing; the fused kernel gains by its occupancy, too."""
    unfused, fused = dlrm.dlrm_passes(TORUS, dlrm.DlrmPass(batch=512, tables=64))
    took = {one.name: one.duration_us for one in unfused}
    parts = (took["embedding"], took["all-to-all"], took["all-to-all of gradients"], took["update"])
    assert end_us(unfused) == pytest.approx(sum(parts), rel=0.01)
    bound = max(parts[:2]) + max(parts[2:])
    assert 0.8 * bound < end_us(fused) < bound


def test_gains_grow_with_samples_and_tables() -> None:
    passes = (dlrm.dlrm_passes(TORUS, dlrm.DlrmPass(batch=batch, tables=16)) for batch in (1, 8, 64, 512))
    shares = [end_us(fused) / end_us(unfused) for unfused, fused in passes]
    assert 1 > shares[0] > 0.95 > 0.6 > shares[-1] and shares == sorted(shares, reverse=True)


def test_all_reduces_along_the_axes_are_slower_than_the_floor_and_faster_than_one_ring() -> None:
    nbytes = STEP.width**2 * 4
    ring = flat_us(TORUS, Kind.ALL_REDUCE, nbytes)
    assert least_us(TORUS, Kind.ALL_REDUCE, nbytes) < dlrm.all_reduce_us(TORUS, STEP) < ring


def test_fused_passes_exchange_as_many_bytes() -> None:
    exchanged = [
        sum(one.nbytes for one in dlrm.dlrm_graph(TORUS, STEP, fused=way) if one.collective == "all_to_all")
        for way in (False, True)
    ]
    assert exchanged[1] == pytest.approx(exchanged[0], abs=2)


def test_the_figure_has_the_published_gain_inside_of_its_shapes() -> None:
    (panel,) = figure_of("fused/15").predict(TORUS, False, "")
    (band,) = panel.curves.values()
    assert len(band.values) == len(panel.x) == 12
    assert min(band.values) < 1 - published()["FU-SIM-01"]["value"] / 100 < max(band.values)


@pytest.mark.parametrize(("nodes", "row"), [(8, 4), (64, 8), (12, 4), (7, 7)])
def test_a_torus_of_other_nodes_is_as_even_as_it_can_be(nodes: int, row: int) -> None:
    assert float(with_nodes(TORUS, nodes).links.torus_row) == row
    assert with_nodes(TORUS, 128) is TORUS


def test_nodes_of_several_gpus_are_refused() -> None:
    for name, value in (("h100x8x2", "2 of 8"), ("mi210x1x2", "2 of 1")):
        with pytest.raises(ValueError, match=f"value={value} GPUs, allowed=several of one GPU on a torus"):
            dlrm.dlrm_passes(named(name), STEP)

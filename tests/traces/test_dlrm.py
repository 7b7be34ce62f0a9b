"""A training pass of DLRM on many nodes: the order of its nodes, fused against unfused, and the study of Figure 15."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sidelane.program.collective import Kind
from sidelane_lab.cli.model import plan as command
from sidelane_lab.machines.load import named, with_nodes
from sidelane_lab.machines.spec import NetworkTopology
from sidelane_lab.model.nodes import least_us
from sidelane_lab.papers import dlrm
from sidelane_lab.papers.claims import published
from sidelane_lab.traces.chakra import read_chakra, write_chakra
from sidelane_lab.traces.dlrm import COMPUTES, NETWORK, DlrmPass, all_reduce_us, dlrm_graph, dlrm_times, scheduled
from sidelane_lab.traces.graph import NodeKind, TraceNode

TORUS = named("mi210x1x128")
STEP = DlrmPass(batch=16, tables=64)


def node(ident: int, lane: str, us: float, *after: int, collective: str = "") -> TraceNode:
    return TraceNode(ident, f"{ident}", NodeKind.COMPUTE, after, us, lane=lane, collective=collective)


def test_a_lane_runs_one_node_after_another_and_an_all_to_all_goes_first() -> None:
    nodes = (
        node(0, COMPUTES, 10.0),
        node(1, NETWORK, 20.0, collective="all_reduce"),
        node(2, NETWORK, 5.0, collective="all_reduce"),
        node(3, NETWORK, 5.0, 0, collective="all_to_all"),
        node(4, "", 7.0, 0),
        node(5, COMPUTES, 1.0, 3, 4),
    )
    assert [one.start_us for one in scheduled(nodes)] == [0, 0, 25, 20, 10, 25]


@pytest.mark.parametrize(
    "step", [STEP, DlrmPass(batch=2, tables=1, bottom=40), DlrmPass(batch=512, tables=8, waits=True)]
)
def test_passes_keep_their_order(step: DlrmPass) -> None:
    times = dlrm_times(TORUS, step)
    for nodes in (times.unfused, times.fused):
        ends = {one.ident: one.start_us + one.duration_us for one in nodes}
        assert all(one.start_us >= ends[before] for one in nodes for before in one.after)
        for lane in (COMPUTES, NETWORK):
            alike = sorted((one.start_us, ends[one.ident]) for one in nodes if one.lane == lane)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(alike))
        layers = [one.name for one in nodes if one.name.startswith("all-reduce")]
        assert len(layers) == len(set(layers)) == step.layers


def test_fused_hides_the_shorter_of_both_and_no_more() -> None:
    """Long enough that layers and all-reduces count for nothing; the fused kernel gains by its occupancy, too."""
    large = dlrm_times(TORUS, DlrmPass(batch=512, tables=64, at_once=True))
    took = {one.name: one.duration_us for one in large.unfused}
    parts = (took["embedding"], took["all-to-all"], took["all-to-all of gradients"], took["update"])
    assert large.unfused_us == pytest.approx(sum(parts), rel=0.01)
    bound = max(parts[:2]) + max(parts[2:])
    assert 0.8 * bound < large.fused_us < bound


def test_gains_grow_with_samples_and_tables() -> None:
    gains = [dlrm_times(TORUS, DlrmPass(batch=batch, tables=16)).lower_percent for batch in (1, 8, 64, 512)]
    assert gains == sorted(gains)
    assert 0 < gains[0] < 5 < 40 < gains[-1]


def test_all_reduces_along_the_axes_are_slower_than_the_floor_and_faster_than_one_ring() -> None:
    nbytes = STEP.width**2 * 4
    axes, ring = (all_reduce_us(TORUS, dataclasses.replace(STEP, axis_rings=way)) for way in (True, False))
    assert least_us(TORUS, Kind.ALL_REDUCE, nbytes) < axes < ring
    tree = dataclasses.replace(TORUS, links=dataclasses.replace(TORUS.links, network=NetworkTopology.FAT_TREE))
    assert all_reduce_us(tree, STEP) == all_reduce_us(tree, dataclasses.replace(STEP, axis_rings=False))


def test_a_graph_is_a_trace_of_chakra(tmp_path: Path) -> None:
    nodes = dlrm_graph(TORUS, STEP, fused=True)
    read = read_chakra(write_chakra(tmp_path / "dlrm.et", nodes)).nodes
    assert {one.ident: (one.name, one.after, one.ranks, one.nbytes) for one in read} == {
        one.ident: (one.name, one.after, one.ranks, one.nbytes) for one in nodes
    }
    exchanged = [
        sum(one.nbytes for one in dlrm_graph(TORUS, STEP, fused=way) if one.collective == "all_to_all")
        for way in (False, True)
    ]
    assert exchanged[1] == pytest.approx(exchanged[0], abs=2)


@pytest.fixture
def few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out most ranges of the description and most of the sweep, which take some seconds."""
    monkeypatch.setattr(dlrm, "SECTIONS", ("matmul.launch_us",))
    monkeypatch.setattr(dlrm, "SWEPT_BATCHES", (8, 512))
    monkeypatch.setattr(dlrm, "SWEPT_TABLES", (1, 16))


def test_the_published_gain_is_inside_of_the_range(few_numbers: None) -> None:
    study = dlrm.dlrm_study(TORUS, (256, 2048), (64,))
    low, high = study.ends
    assert low < published()["FU-SIM-01"]["value"] < high
    assert study.percent == pytest.approx(sum(one.lower_percent for one in study.shapes.values()) / 2)
    ranges = [high - low for low, high in (one.ends(study.percent) for one in study.assumptions)]
    assert ranges == sorted(ranges, reverse=True), "what moves the mean most comes first"
    assert {"speed of the network", "all-reduces", "sides of the torus"} <= {one.name for one in study.assumptions}
    assert "inside the range" in dlrm.conclusions(study)[0]


def test_the_command_writes_numbers_a_picture_and_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_numbers: None
) -> None:
    small = dlrm.dlrm_study(with_nodes(TORUS, 8), (256,), (1,))
    monkeypatch.setattr(dlrm, "dlrm_study", lambda machine, progress: small)
    words = ["--model", "dlrm", "--nodes", "8", "--report", str(tmp_path), "--json", str(tmp_path / "x.json")]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert "8 nodes of 1 x AMD Instinct MI210" in result.output and "Published: 21%" in result.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert rows[0]["published_percent"] == 21 and {row["row"] for row in rows} == {
        "mean",
        "assumption",
        "shape",
        "sweep",
    }
    assert {path.name for path in tmp_path.iterdir()} >= {
        "dlrm-8.png",
        "dlrm-8.json",
        "dlrm-fused.et",
        "dlrm-unfused.et",
    }


@pytest.mark.parametrize(("nodes", "row"), [(8, 4), (64, 8), (12, 4), (7, 7)])
def test_a_torus_of_other_nodes_is_as_even_as_it_can_be(nodes: int, row: int) -> None:
    assert float(with_nodes(TORUS, nodes).links.torus_row) == row
    assert with_nodes(TORUS, 128) is TORUS


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--nodes 2..8", "allowed=one number with --model dlrm"),
        ("--tokens 4096", "--tokens goes with a Llama"),
        ("--machine h100x8x2", "value=2 of 8 GPUs, allowed=several of one GPU"),
    ],
)
def test_what_a_pass_can_not_have_is_refused(words: str, problem: str) -> None:
    result = CliRunner().invoke(command, ["--model", "dlrm", *words.split()])
    assert result.exit_code == 2 and problem in " ".join(result.output.split())
    with pytest.raises(ValueError, match="allowed=1 to 42, of all layers"):
        DlrmPass(bottom=43)

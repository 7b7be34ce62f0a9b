"""Predicted collectives among several nodes: the plan of a process group, a flat ring, and a floor."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner, Result
from marks import long

from sidelane import cli
from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named, parse
from sidelane_lab.model.node_steps import Far, Join, make_plan, nodes_of, pieces_of
from sidelane_lab.model.nodes import KINDS, least_us, nodes_times
from sidelane_lab.model.nodes_baselines import TREES

TWO = named("h100x8x2")
NARROW = parse(
    'base = "h100x8x2"\nname = "narrow"\nnodes = 4\n'
    '[links]\nnetwork = "fat_tree"\nleaf_nodes = 2\noversubscription = 8\nnics_per_gpu = 0.5\n',
    "narrow.toml",
)


def run(words: str) -> Result:
    return CliRunner().invoke(cli.main, words.split(), prog_name="sidelane", terminal_width=200)


@pytest.mark.parametrize(
    "machine", [TWO, long(named("mi300x8x16")), long(named("mi210x1x128")), long(NARROW)], ids=lambda m: m.name
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_way_is_faster_than_the_floor(machine, kind):
    for nbytes in (1, 1 << 20):
        times = nodes_times(machine, kind, nbytes)
        assert times.flat_us >= times.floor_us > 0 and (times.tree_us is None) is (kind not in TREES)
        assert times.tree_us is None or times.tree_us >= times.floor_us
        assert (times.hierarchical_us is None) is (machine.gpus == 1)
        assert times.hierarchical_us is None or times.hierarchical_us >= times.floor_us


def test_the_floor_is_what_a_node_sends_by_all_of_its_nics():
    nbytes, node = 1 << 30, 8 * 50e3
    halves = nbytes / 2 / node
    assert least_us(TWO, Kind.ALL_GATHER, nbytes) == pytest.approx(3 + halves)
    assert least_us(TWO, Kind.ALL_REDUCE, nbytes) == pytest.approx(3 + 2 * halves)
    assert least_us(TWO, Kind.ALL_TO_ALL, nbytes) == pytest.approx(3 + 8 * halves)
    assert least_us(NARROW, Kind.BROADCAST, nbytes) == pytest.approx(3 + nbytes / (4 * 50e3))


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_those_that_a_process_group_runs(kind):
    nbytes = 8 << 20
    times, nodes = nodes_times(TWO, kind, nbytes, beside=True), nodes_of([8, 8])
    count = nbytes // 4 // (1 if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) else 16)
    plan = make_plan(kind, nodes, 0, (count,), pieces_of(times.choice, nbytes))
    assert pieces_of(times.choice, nbytes) == 2
    assert [timed.step for timed in times.steps] == plan.steps
    assert all(timed.begin_us <= timed.end_us for timed in times.steps)
    far = [timed for timed in times.steps if isinstance(timed.step, Far)]
    assert all(a.end_us <= b.begin_us for a, b in itertools.pairwise(far)), "one after the other on a rail"
    near = [timed for timed in times.steps if not isinstance(timed.step, Far)]
    assert all(a.end_us == pytest.approx(b.begin_us) for a, b in itertools.pairwise(near))
    joins = [timed for timed in near if isinstance(timed.step, Join)]
    assert [timed.end_us >= far[timed.step.number].end_us for timed in joins] == [True] * len(far)


def test_a_wider_network_helps_and_spines_do_not_matter_to_rails():
    fast, slow = (TWO.with_value("links.network_gbps", gbps) for gbps in (100, 12.5))
    narrow = TWO.with_value("links.oversubscription", 16).with_value("links.leaf_nodes", 1)
    within = TWO.with_value("links.oversubscription", 16)
    for kind in KINDS:
        times = [nodes_times(machine, kind, 12 << 20) for machine in (fast, TWO, slow, within)]
        assert times[0].flat_us <= times[1].flat_us < times[2].flat_us
        assert times[0].hierarchical_us <= times[1].hierarchical_us <= times[2].hierarchical_us
        assert times[3].hierarchical_us == times[1].hierarchical_us
    exchange = Kind.ALL_TO_ALL
    assert nodes_times(narrow, exchange, 12 << 20).flat_us > 4 * nodes_times(TWO, exchange, 12 << 20).flat_us


def test_what_is_not_modelled_is_refused():
    with pytest.raises(ValueError, match=r"kind \(value=scatter, allowed=all_gather, .* passes the root's network"):
        nodes_times(TWO, Kind.SCATTER, 1 << 20)
    with pytest.raises(ValueError, match=r"nodes of h100x8 \(value=1, allowed=2 and more\)"):
        nodes_times(named("h100x8"), Kind.ALL_GATHER, 1 << 20)


def test_explain_predicts_the_steps_on_a_machine_of_several_nodes():
    """It had predicted one node."""
    shown = run("explain all_gather 16M --machine h100x8x2 --beside compute")
    assert shown.exit_code == 0, shown.output
    for words in (
        "among 16 ranks",
        "2 nodes of 8 x NVIDIA H100 SXM, rails",
        "takes hierarchical: hier",
        "never run there",
    ):
        assert words in shown.output
    written = json.loads(run("explain all_gather 16M --machine h100x8x2 --beside compute --json -").output)
    assert written["flat_us"] > written["floor_us"] and written["steps"][-1]["end_us"] < written["hierarchical_us"]
    alone = run("explain all_gather 16M --machine h100x8x2").output
    assert "takes flat: hierarchical " in alone and "nothing hides it" in alone and "Steps of rank 0" not in alone
    flat = run("explain all_to_all 1M --machine mi210x1x128")
    assert "128 nodes of 1 rank; nothing to do within a node" in flat.output and "takes flat: flat " in flat.output


@pytest.mark.parametrize("option", ["--in-place", "--graph", "--world-size 4", "--beside-us 9", "--tensors 3"])
def test_explain_refuses_options_that_are_not_modelled_among_nodes(option):
    shown = run(f"explain all_gather 16M --machine h100x8x2 {option}")
    assert shown.exit_code == 2
    assert (
        f"{option.split()[0]} does not go with the nodes of h100x8x2 (allowed=--dtype, --json, --beside" in shown.output
    )


def test_collective_predicts_all_ways_by_size():
    shown = run("collective --machine mi210x1x2 --json -")
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.output)["rows"]
    assert {row["collective"] for row in rows} == set(map(str, KINDS)) and rows[0]["hierarchical_us"] is None
    assert all(row["flat_us"] >= row["floor_us"] for row in rows)
    for words in ("c3 --machine h100x8x2", "phases --machine h100x8x2"):
        refused = run(words)
        assert refused.exit_code == 2 and "nodes of h100x8x2 (value=2, allowed=1" in refused.output

"""Clusters of several GPUs a node: exchanges, fused operators, pairs, replays and training steps among them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from marks import long

from sidelane import cli
from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named, parse
from sidelane_lab.machines.network import exchange_pace, latency_and_bytes_us
from sidelane_lab.model.gangs import engine_gangs, gangs_us, library_gangs, rails_gang
from sidelane_lab.model.layer import MODELS, Step
from sidelane_lab.model.nodes import nodes_times
from sidelane_lab.model.operators import Embedding, Gemv, TiledGemm, predict_fused
from sidelane_lab.model.plan import parse_nodes
from sidelane_lab.model.strategies import predict
from sidelane_lab.model.symmetry import predict_symmetric, stand_in
from sidelane_lab.model.training import compute_us, step_times
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode
from sidelane_lab.traces.strategies import ENGINES, plan_trace

TWO, TORUS, MESH = named("h100x8x2"), named("mi210x1x128"), named("mi300x8x2")
NARROW = parse(
    'base = "h100x8x2"\nname = "narrow"\nnodes = 6\n'
    '[links]\nnetwork = "fat_tree"\nleaf_nodes = 2\noversubscription = 8\nnics_per_gpu = 0.5\n',
    "narrow.toml",
)
RAILS = parse('base = "h100x8x2"\nname = "r"\nnodes = 5\n[links]\nleaf_nodes = 2\noversubscription = 4\n', "r.toml")
SHARDINGS = ("FSDP2", "HSDP")
SMALL = Step(dataclasses.replace(MODELS["llama-8b-like"], layers=6), 4096, 4096)


def run(words: str) -> Result:
    return CliRunner().invoke(cli.main, words.split(), prog_name="sidelane", terminal_width=200)


def torus(nodes: int, row: int, gbps: float = 25.0):
    small = dataclasses.replace(TORUS, nodes=nodes)
    return small.with_value("links.torus_row", row).with_value("links.network_gbps", gbps)


@pytest.mark.parametrize("machine", [TWO, NARROW, RAILS, torus(12, 4), torus(15, 5)], ids=lambda machine: machine.name)
def test_an_exchanges_pace_is_that_of_all_pairs(machine):
    ranks = machine.world_size
    whole = latency_and_bytes_us(machine, dict.fromkeys(itertools.permutations(range(ranks), 2), 1e6 / ranks))
    latency_us, us_per_byte = exchange_pace(machine)
    assert (latency_us, 1e6 * us_per_byte) == pytest.approx(whole)


@pytest.mark.parametrize("nodes", [(4, 2), (9, 3)])
@pytest.mark.parametrize("operator", [Embedding(144, 32, 70, dim=92), TiledGemm(4608, 2048, 4608)])
def test_one_rank_stands_for_all(nodes, operator):
    """Where computing takes longer. Where the network does, peers in turn use one way along an axis at a time."""
    machine = torus(*nodes)
    full, symmetric = predict_fused(machine, operator).fused, predict_symmetric(machine, operator).fused
    assert symmetric.time_us == pytest.approx(full.time_us, rel=0.08)
    slow = torus(*nodes, gbps=1.0)
    full, symmetric = (made(slow, operator) for made in (predict_fused, predict_symmetric))
    latency_us, us_per_byte = exchange_pace(slow)
    sent_us = us_per_byte * operator.collective_bytes(slow.world_size)
    assert latency_us + sent_us < symmetric.fused.time_us < 1.1 * sent_us
    assert symmetric.fused.time_us < 1.001 * full.fused.time_us
    assert symmetric.unfused_us == pytest.approx(full.unfused_us)


@pytest.mark.parametrize("machine", [TWO, NARROW, MESH, TORUS], ids=lambda machine: machine.name)
@pytest.mark.parametrize(
    "operator", [Embedding(2048, 8, 32), TiledGemm(8192, 1024, 4096), TiledGemm(4096, 512, 2048, 2)]
)
def test_fused_exchanges_among_nodes_are_no_faster_than_their_parts(machine, operator):
    times = predict_symmetric(machine, operator)
    far = (machine.world_size - machine.gpus) / machine.world_size * operator.collective_bytes(machine.world_size)
    network_us = far / (float(stand_in(machine).links.network_gbps) * 1e3)
    assert times.fused.time_us > network_us
    assert times.fused.time_us < 1.2 * times.unfused_us
    assert len(times.fused.ended_us) == 2 * min(2, machine.gpus)
    assert times.fused.ended_us == pytest.approx([times.fused.time_us] * len(times.fused.ended_us))


def test_fused_operators_that_are_no_even_exchange_are_refused_among_many():
    for operator in (Gemv(4096, 4096), TiledGemm(64, 64, 64, counts=((1,) * 16,) * 16)):
        with pytest.raises(ValueError, match="an even all-to-all of what is computed"):
            predict_symmetric(TWO, operator)
    with pytest.raises(ValueError, match="value=1 node, allowed=several"):
        predict_symmetric(named("h100x8"), Embedding(64, 4, 4))
    shown = run("fused --machine h100x8x2 --ops gemv_all_reduce")
    assert shown.exit_code == 2 and "allowed=embedding_all_to_all, gemm_all_to_all on h100x8x2" in shown.output


def test_fused_takes_nodes_of_several_gpus(tmp_path: Path):
    path = tmp_path / "x.json"
    shown = run(f"fused --machine h100x8x2 --ops gemm_all_to_all --shape 8192,4096,4096 --json {path}")
    assert shown.exit_code == 0 and "one rank stands for all" in shown.output
    rows = {row["implementation"]: row for row in json.loads(path.read_text())["rows"]}
    unfused, fused = rows["unfused_nccl"], rows["fused"]
    lower_percent = 100 * (1 - fused["time_us"] / unfused["time_us"])
    assert fused["schedule"] == "remote_first" and unfused["low_percent"] <= lower_percent <= unfused["high_percent"]


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL])
@pytest.mark.parametrize("nbytes", [1 << 20, 64 << 20])
def test_gangs_alone_take_what_the_plan_takes(kind, nbytes):
    times = nodes_times(TWO, kind, nbytes)
    (ring,) = library_gangs(TWO, kind, nbytes)
    assert ring.alone_us == times.flat_us
    gangs = engine_gangs(TWO, kind, nbytes)
    assert gangs_us(TWO, gangs) == pytest.approx(times.hierarchical_us, rel=3e-3)
    assert any(gang.units for gang in gangs) and not all(gang.units for gang in gangs)
    assert gangs[-1].name == "collective"


def test_what_a_group_would_not_cut_into_steps_is_the_librarys():
    assert engine_gangs(TORUS, Kind.ALL_GATHER, 1 << 20) == library_gangs(TORUS, Kind.ALL_GATHER, 1 << 20)
    assert engine_gangs(TWO, Kind.ALL_GATHER, 1 << 10) == library_gangs(TWO, Kind.ALL_GATHER, 1 << 10)
    with pytest.raises(ValueError, match="units among the nodes"):
        library_gangs(TWO, Kind.ALL_GATHER, 1 << 20, units=8)


def test_rails_share_nics_where_gpus_do():
    alone, shared = (
        rails_gang(one, Kind.ALL_REDUCE, 1 << 30).alone_us for one in (TWO, TWO.with_value("links.nics_per_gpu", 0.5))
    )
    assert alone > (1 << 30) / 50e3
    assert shared == pytest.approx(2 * alone, rel=0.05)


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_REDUCE])
def test_pairs_among_nodes(kind):
    workload = parse_workload("cb1_64M", kind)
    serial, base, engines = (predict(TWO, workload, name) for name in ("serial", "c3_base", "conccl"))
    times = nodes_times(TWO, kind, workload.nbytes)
    assert serial.comm_us == times.flat_us
    assert serial.time_us == pytest.approx(serial.gemm_us + times.flat_us)
    assert max(serial.gemm_us, times.flat_us) < base.time_us <= 1.05 * serial.time_us
    assert max(engines.gemm_us, times.hierarchical_us) < engines.time_us < engines.gemm_us + times.hierarchical_us
    for name, why in (("c3_rp", "how many units"), ("conccl_left", "copies own parts")):
        with pytest.raises(ValueError, match=why):
            predict(TWO, workload, name)


def test_pairs_among_nodes_say_what_is_not_modelled():
    shown = run("c3 cb1_64M --machine h100x8x2 --strategy conccl --strategy c3_rp --collective all_gather")
    assert shown.exit_code == 0 and "partition: not predicted among nodes" in " ".join(shown.output.split())
    for words, what in (
        ("c3", "c3 without pairs, which is the ConCCL paper's study"),
        ("c3 cb1_64M --study heuristics", "c3 --study heuristics"),
        ("phases", "phases, which are of copy engines in one node"),
        ("pipeline", "pipeline"),
    ):
        shown = run(f"{words} --machine h100x8x2")
        assert shown.exit_code == 2, shown.output
        assert f"{what}: nodes of h100x8x2 (value=2, allowed=1; what crosses nodes is modelled for" in shown.output


def test_traces_are_planned_among_nodes():
    nodes = (
        TraceNode(0, "gemm", NodeKind.COMPUTE, (), 500.0),
        TraceNode(1, "gather", NodeKind.COLLECTIVE, (0,), collective="all_gather", nbytes=4 << 20),
    )
    found = plan_trace(TWO, TraceGraph("a trace", nodes), is_same=False)
    times = nodes_times(TWO, Kind.ALL_GATHER, 64 << 20)
    assert found.library_us == pytest.approx(500 + times.flat_us, rel=1e-3)
    assert found.operations[0].steps_us[ENGINES] - 500 == pytest.approx(times.hierarchical_us, rel=0.02)


@pytest.mark.parametrize("strategy", [long("library"), "straight both"])
def test_steps_on_more_nodes_expose_more_and_hybrid_ones_gather_as_one_node_does(strategy):
    found = {
        (nodes, hybrid): step_times(
            dataclasses.replace(TWO, nodes=nodes), SMALL, strategy, sharding="HSDP" if hybrid else "FSDP2"
        )
        for nodes in (2, 4)
        for hybrid in (False, True)
    }
    for hybrid in (False, True):
        assert found[2, hybrid].exposed_us < found[4, hybrid].exposed_us
        assert found[2, hybrid].communication_us < found[4, hybrid].communication_us
    node = step_times(named("h100x8"), SMALL, strategy)
    added = rails_gang(TWO, Kind.ALL_REDUCE, 2 * SMALL.model.parameters // 8).alone_us
    assert found[2, True].communication_us == pytest.approx(node.communication_us + SMALL.model.layers * added)
    assert found[2, True].compute_us == node.compute_us > found[2, False].compute_us, "shards are smaller among all"
    assert compute_us(TWO, SMALL) == found[2, False].compute_us


def test_numbers_of_nodes_are_read():
    assert parse_nodes("2..128") == (2, 4, 8, 16, 32, 64, 128)
    assert parse_nodes("16") == (16,) and parse_nodes("8,2,8") == (8, 2)
    for wrong in ("1", "0..1", "2..", "x", "2,4096", "9..10"):
        with pytest.raises(ValueError, match="allowed=2 to 1024"):
            parse_nodes(wrong)


def test_a_plan_has_both_ways_to_shard_on_each_number_of_nodes(tmp_path: Path):
    shown = run(f"plan --model llama-8b --nodes 2,4 --layers 6 --tokens 4096 --report {tmp_path}")
    assert shown.exit_code == 0 and "on 4 nodes of 8" in shown.output, shown.output
    rows = json.loads((tmp_path / "plan-llama-3.1-8b-nodes.json").read_text())["rows"]
    assert {(row["nodes"], row["sharding"]) for row in rows} == set(itertools.product((2, 4), ("FSDP2", "HSDP", "DDP")))
    assert len(rows) == 2 * (5 + 5 + 1) and (tmp_path / "plan-llama-3.1-8b-nodes.png").exists()
    alone = run("plan --model llama-8b --machine h100x8x2 --shard FSDP2 --layers 6 --tokens 4096 --json -")
    assert {row["sharding"] for row in json.loads(alone.stdout)["rows"]} == {"FSDP2"}

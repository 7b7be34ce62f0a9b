"""Replays on described machines: sums that can be told beforehand, refusals, and the command."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane.program.collective import Kind
from sidelane_lab.cli.model import replay as command
from sidelane_lab.machines.load import named
from sidelane_lab.model.kernels import dma_us, library_gang
from sidelane_lab.traces.chakra import read_chakra, write_chakra
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode
from sidelane_lab.traces.replay import replay, replayable

MACHINE = named("mi300x8")
NBYTES = 64 << 20
GATHERED_US = library_gang(MACHINE, Kind.ALL_GATHER, NBYTES).alone_us


def gemm(ident: int, us: float, *after: int, **more: Any) -> TraceNode:
    return TraceNode(ident, f"gemm {ident}", NodeKind.COMPUTE, after, us, **more)


def gather(ident: int, *after: int, us: float = 0.0, name: str = "all_gather") -> TraceNode:
    nbytes = NBYTES // MACHINE.gpus if name == "all_gather" else NBYTES
    return TraceNode(ident, name, NodeKind.COLLECTIVE, after, us, collective=name, nbytes=nbytes)


def trace(*nodes: TraceNode) -> TraceGraph:
    return TraceGraph("a trace", nodes)


LAYERS = trace(*itertools.chain(*((gemm(2 * i, 3_000.0), gather(2 * i + 1, 2 * i)) for i in range(4))))
"""Four gathers, each of which may run beside the next computation; the last one has none beside it."""


def test_serial_is_the_sum_and_copy_engines_expose_the_last_gather_only() -> None:
    serial, kernels, engines = replay(MACHINE, LAYERS, ("serial", "c3_base", "conccl"))
    assert serial.compute_us == pytest.approx(12_000, rel=1e-6)
    assert serial.time_us == pytest.approx(12_000 + 4 * GATHERED_US, rel=1e-6)
    assert serial.communication_us == pytest.approx(4 * GATHERED_US)
    alone_us = dma_us(MACHINE, Kind.ALL_GATHER, NBYTES)
    assert engines.communication_us == pytest.approx(4 * alone_us)
    assert engines.exposed_us == pytest.approx(alone_us)
    assert alone_us < 0.6 * serial.exposed_us
    assert kernels.time_us < serial.time_us
    for one in (serial, kernels, engines):
        assert sum(one.critical_us.values()) == pytest.approx(one.time_us)


def test_a_collective_that_everything_waits_for_is_exposed_whole() -> None:
    step = trace(gemm(1, 500.0), gather(2, 1), gemm(3, 500.0, 2))
    for one in replay(MACHINE, step, ("serial", "c3_base")):
        assert one.exposed_us == pytest.approx(GATHERED_US, rel=1e-6)
        assert [node.ident for node in one.path] == [1, 2, 3]
        assert one.critical_us["communication"] == pytest.approx(GATHERED_US, rel=1e-6)


def test_reductions_run_on_engines_in_parts_of_their_own() -> None:
    step = trace(gemm(1, 9_000.0), gather(2, name="all_reduce"), gather(3, 2, name="all_reduce"), gemm(4, 10.0, 3))
    (one,) = replay(MACHINE, step, ("conccl",))
    assert one.communication_us == pytest.approx(2 * dma_us(MACHINE, Kind.ALL_REDUCE, NBYTES))
    assert one.communication_us < one.time_us < 9_010 + one.communication_us


@pytest.mark.parametrize("strategy", [one.name for one in replayable(MACHINE)])
def test_a_trace_keeps_its_order_under_every_strategy(strategy: str) -> None:
    (one,) = replay(MACHINE, LAYERS, (strategy,))
    ran = {node.ident: node for node in one.nodes}
    for node, before in ((ran[a], ran[b]) for a in ran for b in ran[a].after):
        assert node.start_us >= before.start_us + before.duration_us - 1e-6
    assert max(node.start_us + node.duration_us for node in one.nodes) == pytest.approx(one.time_us)


def test_threads_of_the_cpu_and_streams_run_beside_each_other() -> None:
    host = [gemm(i, 100.0, on_host=True, lane=str(i % 2)) for i in range(4)]
    (one,) = replay(MACHINE, trace(*host, gemm(9, 150.0)), ("c3_base",))
    assert one.time_us == pytest.approx(200) and one.exposed_us == pytest.approx(0)
    assert one.critical_us == pytest.approx({"host": 200, "computation": 0, "communication": 0})


def test_operations_and_bytes_give_times_that_were_not_recorded() -> None:
    few = trace(gemm(1, 0.0, flops=10**12), gemm(2, 0.0, nbytes=10**9), gemm(3, 0.0))
    (one,) = replay(MACHINE, few, ("serial",))
    gpu, matmul = MACHINE.gpu, MACHINE.matmul
    by_hand = 1e6 / gpu.peak_tflops / matmul.efficiency + 1e6 / gpu.memory_gbps / matmul.memory_efficiency
    assert one.time_us == pytest.approx(by_hand, rel=1e-6)


def test_collectives_without_figures_keep_their_recorded_time() -> None:
    step = trace(gather(1, us=70.0, name="broadcast"), gather(2, 1, name="barrier"))
    for one in replay(MACHINE, step, ("serial", "conccl")):
        assert one.time_us == pytest.approx(70, rel=1e-6)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        (gather(1, name="broadcast"), "node 1 'broadcast' is a collective that needs a duration, or bytes"),
        (
            TraceNode(1, "p2p", NodeKind.SEND, duration_us=3.0),
            "node 1 'p2p' is a send that needs the trace of its peer",
        ),
    ],
)
def test_nodes_that_are_not_modelled_are_refused_by_name(node: TraceNode, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replay(MACHINE, trace(gemm(0, 1.0), node), ("serial",))


@pytest.mark.parametrize("strategy", ["conccl_rp", "conccl_left", "nccl_ce", "nothing"])
def test_strategies_that_a_trace_can_not_tell_are_refused(strategy: str) -> None:
    with pytest.raises(ValueError, match=strategy):
        replay(MACHINE, LAYERS, (strategy,))


def test_many_nodes_are_replayed() -> None:
    nodes = itertools.chain(*((gemm(2 * i, 20.0), gather(2 * i + 1, 2 * i)) for i in range(1_000)))
    (one,) = replay(MACHINE, trace(*nodes), ("conccl",))
    assert len(one.nodes) == 2_000


def run(*arguments: object) -> Any:
    return CliRunner().invoke(command, [str(one) for one in arguments])


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    path = write_chakra(tmp_path / "in.et", LAYERS.nodes)
    result = run(path, "--machine", "mi300x8", "--write", tmp_path / "out.et", "--json", tmp_path / "x.json")
    assert result.exit_code == 0, result.output
    advised = " ".join(run(path, "--machine", "mi300x8").output.split())
    assert "conccl instead of serial: 0." in advised and "conccl instead of c3_base: 0." in advised
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["serial", "c3_base", "conccl"]
    assert rows[-1]["longest"][0]["name"].startswith("gemm")
    written = read_chakra(tmp_path / "out.et").nodes
    end_us = max(node.start_us + node.duration_us for node in written)
    assert end_us == pytest.approx(rows[-1]["time_us"], abs=1)  # begins are whole microseconds in a file
    assert {node.ident: node.after for node in written} == {node.ident: node.after for node in LAYERS.nodes}


def test_a_recorded_run_is_written_as_it_was(tmp_path: Path) -> None:
    recorded = [gemm(2, 100.0, start_us=10.0), gather(3, 2, us=55.5, name="all_to_all")]
    path, copied = write_chakra(tmp_path / "in.et", recorded), tmp_path / "out.et"
    result = run(path, "--machine", "mi300x8", "--write-recorded", copied)
    assert result.exit_code == 0, result.output
    assert read_chakra(copied).nodes == read_chakra(path).nodes
    assert [node.duration_us for node in read_chakra(copied).nodes] == [100.0, 55.5]


def test_the_command_says_where_strategies_make_no_difference(tmp_path: Path) -> None:
    path = write_chakra(tmp_path / "in.et", [gemm(1, 9_000.0)])
    assert "no collective that takes time" in run(path, "--machine", "mi300x8").output
    few = write_chakra(tmp_path / "few.et", [gemm(1, 900_000.0), gather(2, 1)])
    assert "conccl instead of c3_base: less than 1%" in " ".join(run(few, "--machine", "mi300x8").output.split())


def test_the_command_refuses_before_anything_runs(tmp_path: Path) -> None:
    path = write_chakra(tmp_path / "in.et", [gemm(1, 1.0, 2), gemm(2, 1.0, 1)])
    result = run(path, "--machine", "mi300x8")
    assert result.exit_code == 2
    assert "node 1 'gemm 1'" in result.output

"""Plans from traces: sums that can be told beforehand, steps that another simulator ran, refusals, and the command."""

import dataclasses
import functools
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane.program.collective import Kind
from sidelane_lab.cli.model import plan as command
from sidelane_lab.machines.load import find, named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import run_device
from sidelane_lab.model.gangs import engine_gangs, library_gangs
from sidelane_lab.model.kernels import dma_us, library_gang
from sidelane_lab.model.layer import ELEMENT, MODELS, Step
from sidelane_lab.model.training import BESIDE_COPIES, ordinary, step_kernels, sustained
from sidelane_lab.traces.command import operations_table
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode
from sidelane_lab.traces.kineto import read_kineto
from sidelane_lab.traces.strategies import ENGINES, KERNELS, LIBRARY, STRAIGHT, TracePlan, plan_trace

MACHINE = named("mi300x8")
NBYTES = 64 << 20
GATHERED_US = library_gang(MACHINE, Kind.ALL_GATHER, NBYTES).alone_us
NCCL = {"Collective name": "_allgather_base", "In msg nelems": 1 << 24, "dtype": "BFloat16", "Group size": 2}


def gemm(ident: int, us: float, *after: int, **more: Any) -> TraceNode:
    return TraceNode(ident, f"kernel {ident}", NodeKind.COMPUTE, after, us, **more)


def gather(ident: int, *after: int, us: float = 0.0, name: str = "all_gather", nbytes: int = NBYTES) -> TraceNode:
    nbytes = nbytes // MACHINE.gpus if name == "all_gather" else nbytes
    return TraceNode(ident, name, NodeKind.COLLECTIVE, after, us, collective=name, nbytes=nbytes)


def planned(*nodes: TraceNode, machine: Machine = MACHINE) -> TracePlan:
    return plan_trace(machine, TraceGraph("a trace", nodes), is_same=False)


LAYERS = tuple(itertools.chain(*((gemm(2 * i, 3_000.0), gather(2 * i + 1, 2 * i)) for i in range(4))))
"""Four gathers, each of which may run beside the next computation; the last one has none beside it."""


def kernel(name: str, ts: float, dur: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    arguments = {"stream": stream, "device": 0, "grid": [132, 1, 1], "block": [128, 1, 1], **args}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": stream, "args": arguments}


def launched(number: int, at: float, **of: Any) -> list[dict[str, Any]]:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1.0, "tid": 3}
    launch["args"] = {"correlation": number}
    return [launch, kernel(**of, correlation=number)]


def written(path: Path, events: list[dict[str, Any]], device: str = "NVIDIA H200", ranks: int = 2) -> Path:
    about = {
        "deviceProperties": [{"id": 0, "name": device}],
        "distributedInfo": {"backend": "nccl", "world_size": ranks},
    }
    path.write_text(json.dumps({"schemaVersion": 1, **about, "traceEvents": events}))
    return path


def test_a_collective_that_everything_waits_for_is_exposed_whole() -> None:
    found = planned(gemm(1, 500.0), gather(2, 1), gemm(3, 500.0, 2))
    assert (found.library_us, found.exposed_us) == pytest.approx((1_000 + GATHERED_US, GATHERED_US))
    (operation,) = found.operations
    alone_us = dma_us(MACHINE, Kind.ALL_GATHER, NBYTES)
    assert operation.times_us == {LIBRARY: pytest.approx(GATHERED_US), ENGINES: pytest.approx(alone_us)}
    assert operation.steps_us == {ENGINES: pytest.approx(1_000 + alone_us)}
    assert alone_us > GATHERED_US and found.chosen == (LIBRARY,) and found.single is None


def test_gathers_beside_computations_cost_these_what_their_mover_takes() -> None:
    """Alone a gather on engines is slower here, and beside a computation it takes no units from it."""
    found = planned(*LAYERS)
    assert found.silent_us == pytest.approx(12_000)
    (operation,) = found.operations
    share = float(MACHINE.library.default_units) / float(MACHINE.gpu.units)
    by_hand = {name: 12_000 + us * (1 + 3 * slow / (1 + slow)) for (name, us), slow in zip(
        operation.times_us.items(), (share, BESIDE_COPIES), strict=True)}  # fmt: skip
    assert {LIBRARY: found.library_us, **operation.steps_us} == {
        name: pytest.approx(us) for name, us in by_hand.items()
    }


def test_each_operation_gets_the_strategy_that_is_best_for_the_step() -> None:
    """Small all-reduces gain by kernels; a gather that a computation hides keeps the library."""
    machine = find("h200x2")
    small = TraceNode(1, "ar", NodeKind.COLLECTIVE, (0,), collective="all_reduce", nbytes=32 << 10)
    hidden = TraceNode(3, "ag", NodeKind.COLLECTIVE, (2,), collective="all_gather", nbytes=8 << 20, lane="c")
    found = planned(gemm(0, 10.0), small, gemm(2, 10.0, 1), hidden, gemm(4, 900.0, 2, lane="7"), machine=machine)
    assert dict(zip((one.kind for one in found.operations), found.chosen, strict=True))[Kind.ALL_REDUCE] == KERNELS


@pytest.mark.parametrize(
    ("name", "tokens", "off", "exposed_off"),
    [
        ("h200x2", 4096, 0.005, 0.25),
        ("h200x2", 8192, 0.025, 0.6),
        ("h200x4", 8192, 0.01, 0.2),
        ("h100x8", 8192, 0.015, 0.35),
    ],
)
def test_a_recorded_step_is_predicted_as_another_simulator_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, off: float, exposed_off: float
) -> None:
    """The device model runs FSDP2 with the library, which is recorded, and with copy engines, which is the truth.

    It has units and waves, which a trace does not tell. Where all GEMMs of a kind run beside collectives, nothing tells
    how long one takes alone: then exposed time is seen too small.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    sample, machine = importlib.import_module("parts.recorded_step"), ordinary(sustained(find(name)))
    step = Step(dataclasses.replace(MODELS["llama-8b-like"], layers=6), tokens, 4096)

    def run(make: Callable[..., Any]) -> float:
        gangs = tuple((kind, make(machine, kind, step.gathered * ELEMENT)) for kind in sample.KINDS.values())
        return run_device(machine, step_kernels(machine, step, 6, gangs, False)).time_us

    recorded_us, engines_us = run(functools.partial(library_gangs, priority=1)), run(engine_gangs)
    silent_us = run_device(machine, step_kernels(machine, step, 6, None, False)).time_us
    (tmp_path / "step.json").write_text(json.dumps(sample.trace_of(find(name), step)))
    trace = read_kineto(tmp_path / "step.json")
    found = plan_trace(find(name), trace)
    assert trace.step == "the whole trace", "layers are no steps"
    assert found.library_us == pytest.approx(recorded_us) and found.chosen == (ENGINES, ENGINES)
    assert found.best_us == pytest.approx(engines_us, rel=off)
    assert found.exposed_us == pytest.approx(recorded_us - silent_us, rel=exposed_off)


FSDP = [
    kernel("ncclDevKernel_AllGather_RING_LL", 1_000.0, 150.0, 20, **NCCL),
    kernel("void at::native::split_with_sizes_copy_out_kernel<int>(int)", 1_152.0, 30.0),
    kernel("nvjet_gemm", 1_182.0, 400.0),
    kernel("ncclDevKernel_AllGather_RING_LL", 1_183.0, 150.0, 20, **NCCL),
    kernel("void at::native::split_with_sizes_copy_out_kernel<int>(int)", 1_582.0, 30.0),
    kernel("nvjet_gemm", 1_612.0, 360.0),
]
"""Two layers: the first gather is exposed, the second one runs beside a GEMM of 360 us alone."""


def test_gathers_straight_into_parameters_need_no_copies_out(tmp_path: Path) -> None:
    found = plan_trace(find("h200x2"), read_kineto(written(tmp_path / "step.json", FSDP)))
    (operation,) = found.operations
    assert operation.waiting == ("void at::native::split_with_sizes_copy_out_kernel<int>(int)",)
    assert (found.library_us, operation.exposed_us, found.chosen) == (972.0, 150.0, (STRAIGHT,))
    gathered = operation.times_us[ENGINES]
    # The CPU's pauses stay: 2 us before the first copy. The second gather runs beside the first GEMM.
    by_hand = gathered + 2 + 360 + gathered * (1 - 1 / (1 + BESIDE_COPIES)) + 360
    assert found.best_us == pytest.approx(by_hand, abs=1.0)
    assert [node.calm_us for node in found.trace.nodes if node.name == "nvjet_gemm"] == [360.0, 0.0]


def test_a_step_of_a_recording_is_what_was_launched_in_the_last_profiler_step(tmp_path: Path) -> None:
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 100.0 * n, "dur": 90.0, "tid": 3}
        for n in (1, 2)
    ]
    events = [
        *launched(1, 110.0, name="gemm", ts=150.0, dur=20.0),
        *launched(2, 210.0, name="gemm", ts=250.0, dur=20.0),
        *launched(3, 280.0, name="ncclDevKernel_AllGather", ts=320.0, dur=30.0, stream=20, **NCCL),
    ]
    trace = read_kineto(written(tmp_path / "step.json", [*marks, *events]))
    assert [trace.step, *(node.name for node in trace.nodes if not node.on_host)] == [
        "ProfilerStep#2",
        "gemm",
        "ncclDevKernel_AllGather",
    ]
    again = [{**event, "ts": event["ts"] + 500.0 * n} for n in range(4) for event in events if event["cat"] == "kernel"]
    trace = read_kineto(written(tmp_path / "step.json", again))
    assert trace.step == "the last of 8 parts that are alike", "of GEMMs, which are on the busiest stream"
    assert sum(not node.on_host for node in trace.nodes) == 2


def test_collectives_of_a_graph_have_the_bytes_of_eager_ones_before(tmp_path: Path) -> None:
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 1_000.0 * n, "dur": 900.0, "tid": 3}
        for n in (1, 2)
    ]
    sizes = [{**NCCL, "Collective name": "allreduce", "In msg nelems": 1 << (10 + n)} for n in range(3)]
    eager = [kernel("ncclDevKernel_AllReduce", 1_100.0 + 50 * n, 9.0, 20, **size) for n, size in enumerate(sizes)]
    graph = [kernel("ncclDevKernel_AllReduce", 2_100.0 + 50 * n, 9.0, 20) for n in range(2)]
    trace = read_kineto(written(tmp_path / "step.json", [*marks, *eager, *graph, kernel("gemm", 2_110.0, 40.0)]))
    assert [node.nbytes for node in trace.nodes if node.collective] == [4 << 10, 8 << 10]
    found = plan_trace(find("h200x2"), trace)
    assert found.kept == 0 and set(found.chosen) == {KERNELS}
    written(tmp_path / "step.json", [*graph, kernel("gemm", 2_110.0, 40.0)])
    assert plan_trace(find("h200x2"), read_kineto(tmp_path / "step.json")).kept == 2


def test_kernels_of_sidelane_change_no_stream_in_a_graph(tmp_path: Path) -> None:
    """Before and after NCCL's a graph takes 4 us; between its other kernels 1 us, which is left."""
    reduced = {**NCCL, "Collective name": "allreduce", "In msg nelems": 1 << 14}
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 900.0, "dur": 9.0, "tid": 3}
    graph = [
        kernel("norm", 1_000.0, 5.0, correlation=7),
        kernel("gemm", 1_006.0, 20.0, correlation=7),
        kernel("ncclDevKernel_AllReduce", 1_030.0, 8.0, 20, correlation=7, **reduced),
        kernel("norm", 1_042.0, 5.0, correlation=7),
        kernel("gemm", 1_048.0, 20.0, correlation=7),
    ]
    events = [launch | {"args": {"correlation": 7}}, *graph]
    found = plan_trace(find("h200x2"), read_kineto(written(tmp_path / "step.json", events)))
    (operation,) = found.operations
    saved = operation.times_us[LIBRARY] - operation.times_us[KERNELS] + 3 + 3
    assert found.library_us - found.best_us == pytest.approx(saved)
    for event in graph:
        event["args"]["correlation"] = event["ts"]
    found = plan_trace(find("h200x2"), read_kineto(written(tmp_path / "step.json", graph)))
    assert found.library_us - found.best_us == pytest.approx(saved - 6), "the host's pauses stay"


@pytest.mark.parametrize(
    ("nodes", "machine", "problem"),
    [
        ([gemm(1, 9.0)], MACHINE, "has no collectives in the whole trace"),
        ([gemm(1, 9.0), gather(2)], dataclasses.replace(MACHINE, gpus=1), "needs several GPUs"),
    ],
)
def test_traces_that_can_not_be_planned_are_refused(nodes: list[TraceNode], machine: Machine, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        planned(*nodes, machine=machine)


@pytest.mark.parametrize(("each", "nelems", "took", "off"), [(10, 1 << 22, 60.0, 0.012), (100, 1 << 10, 10.0, 2e-4)])
def test_savings_are_between_two_modelled_steps(
    tmp_path: Path, each: int, nelems: int, took: float, off: float
) -> None:
    """The model's step with the library is longer than the recording, by more than any strategy saves."""
    events = [kernel(f"gemm_{at % 7}", 52.0 * at, 50.0) for at in range(100)] + [
        kernel("ncclDevKernel_AllGather", 52.0 * at + 5, took, 20, **{**NCCL, "In msg nelems": nelems})
        for at in range(0, 100, each)
    ]
    found = plan_trace(find("h200x2"), read_kineto(written(tmp_path / "step.json", events)))
    saved, strategy = max((found.modelled_us - us, name) for name, us in found.operations[0].steps_us.items())
    assert found.modelled_us == pytest.approx(5198 * (1 + off), rel=off / 10)
    assert 0 < saved < found.modelled_us - found.library_us, "the recorded step is shorter than each modelled one"
    says = (f"by {strategy}, {saved / 1e3:.2f} ms", 'backend="sidelane"', "saves more than 0.05%", "Leave the vendor's")
    shown, is_saving = run("--trace", tmp_path / "step.json").output, each == 10
    assert [words in shown for words in says] == [is_saving, is_saving, not is_saving, not is_saving]
    assert (found.single, found.chosen, operations_table(found).lines[0].cells[-3]) == (
        (found.operations[0], strategy, saved) if is_saving else None,
        (strategy if is_saving else LIBRARY,),
        f"{saved / 1e3:.2f}",
    )
    assert found.library_us - found.best_us == pytest.approx(saved * is_saving)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(command, [str(one) for one in arguments])


def test_the_command_answers_first(tmp_path: Path) -> None:
    path, json_path = written(tmp_path / "step.json", FSDP), tmp_path / "x.json"
    shown = run("--trace", path, "--json", json_path)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith(
        "the whole trace takes 0.97 ms, as recorded on 2 x NVIDIA H200: 2 collectives take 0.30 ms"
    )
    assert "split_with_sizes_copy_out_kernel waits" in lines[1] and "longer with the profiler" in shown.output
    assert lines.index("") <= 10 and any("fsdp.enable(model)" in line for line in lines[:10])
    step, operation = json.loads(json_path.read_text())["rows"]
    assert step["best_us"] < step["library_us"] == 972.0 and operation["takes"] == STRAIGHT
    assert "predicted on 8 x NVIDIA H100 SXM" in run("--trace", path, "--machine", "8xh100").output
    for ranks, device in ((2, "NVIDIA H100 80GB HBM3"), (4, "NVIDIA A100-SXM4-80GB"), (8, "NVIDIA L40S")):
        assert f"as recorded on {ranks} x NVIDIA " in run("--trace", written(path, FSDP, device, ranks)).output


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    path = written(tmp_path / "step.json", FSDP, "NVIDIA H2OO")
    for words, problem in (
        ((), "Say --model 8B, for example, or --trace step.json"),
        (("--trace", path, "--model", "8b"), "for a recorded step; not both"),
        (("--trace", path), "names NVIDIA H2OO, which is not described: say --machine 2xh100"),
        (("--trace", path, "--machine", "1xh100"), "1 x NVIDIA H100 SXM communicates nothing"),
    ):
        shown = run(*words)
        assert shown.exit_code == 2 and problem in " ".join(shown.output.split()), shown.output

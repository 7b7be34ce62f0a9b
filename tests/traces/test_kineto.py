"""Traces of PyTorch's profiler, from events that the tests write as Kineto does."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named
from sidelane_lab.model.kernels import library_gang
from sidelane_lab.traces import graph
from sidelane_lab.traces.command import read_trace, replay_table
from sidelane_lab.traces.graph import NodeKind
from sidelane_lab.traces.replay import replay

NCCL = {"Collective name": "_allgather_base", "In msg nelems": 1 << 20, "dtype": "BFloat16", "Group size": 8}


def kernel(name: str, ts: float, dur: float, stream: int = 7, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    arguments = {"stream": stream, "device": 0, **args}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": stream, "args": arguments}


def nccl(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return kernel(name, ts, dur, 20, **args)


STEP = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 900.0, "dur": 50.0, "pid": 1, "tid": 1},
    kernel("gemm 1", 1000.0, 100.0),
    nccl("ncclDevKernel_AllGather_RING_LL", 1100.0, 60.0, **NCCL),
    kernel("gemm 2", 1100.0, 80.0),
    kernel("gemm 3", 1190.0, 40.0),
    kernel("Memcpy DtoD", 1230.0, 10.0, cat="gpu_memcpy", bytes=1 << 20),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.json"


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_order_and_pauses_are_those_of_the_recording(path: Path) -> None:
    nodes = {node.name: node for node in read_trace(written(path, STEP)).nodes}
    gathered = nodes["ncclDevKernel_AllGather_RING_LL"]
    assert (gathered.kind, gathered.collective, gathered.nbytes) == (NodeKind.COLLECTIVE, "all_gather", 2 << 20)
    assert gathered.ranks == 8
    first, second = nodes["gemm 1"].ident, nodes["gemm 2"].ident
    assert (first, gathered.after, nodes["gemm 2"].after) == (2, (first,), (first,))
    pause = nodes["CPU before gemm 3"]
    assert (pause.on_host, pause.duration_us, pause.start_us) == (True, 10.0, 180.0)
    assert set(pause.after) == {second, gathered.ident}
    assert nodes["gemm 3"].after == (pause.ident,)
    copied = nodes["Memcpy DtoD"]
    assert (copied.kind, copied.nbytes, copied.start_us) == (NodeKind.MEMORY, 1 << 20, 230.0)


def test_a_step_without_collectives_takes_its_recorded_time(path: Path) -> None:
    events = [event for event in STEP if not event["name"].startswith("nccl")]
    (one,) = replay(named("mi300x8"), read_trace(written(path, events)), ("c3_base",))
    assert one.time_us == pytest.approx(240.0, abs=0.1)
    assert one.critical_us["host"] == pytest.approx(10.0, abs=0.1)


def test_a_gather_recorded_among_other_ranks_keeps_its_bytes_and_is_named(path: Path) -> None:
    trace = read_trace(written(path, STEP))
    machine = named("h100x4")
    found = replay(machine, trace, ("serial",))
    assert found[0].communication_us == pytest.approx(library_gang(machine, Kind.ALL_GATHER, 16 << 20).alone_us)
    assert "recorded among 8 ranks, replayed among 4" in replay_table(machine, trace, found).notes
    assert "recorded" not in "".join(replay_table(named("mi300x8"), trace, found).notes[1:])


@pytest.mark.parametrize(
    ("name", "args", "collective", "nbytes"),
    [
        ("ncclDevKernel_Generic", {**NCCL, "Collective name": "reduce_scatter_tensor"}, "reduce_scatter", 2 << 20),
        ("ncclDevKernel_SendRecv", {**NCCL, "Collective name": "all_to_allv"}, "all_to_all", 2 << 20),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", {}, "all_reduce", 0),
        ("ncclDevKernel_SendRecv", {}, "", 0),
        (
            "ncclDevKernel_Broadcast_RING_LL",
            {**NCCL, "dtype": "Unknown", "Collective name": "broadcast"},
            "broadcast",
            0,
        ),
    ],
)
def test_collectives_are_known_by_their_call_or_kernel(
    path: Path, name: str, args: dict[str, Any], collective: str, nbytes: int
) -> None:
    trace = read_trace(written(path, [nccl(name, 5.0, 30.0, **args)]))
    assert [(node.collective, node.nbytes) for node in trace.nodes] == [(collective, nbytes)]
    (one,) = replay(named("mi300x8"), trace, ("serial",))
    assert nbytes or one.time_us == pytest.approx(30.0)  # without bytes, a collective keeps its recorded time


def call(name: str, ts: float, dims: list[Any], *types: str) -> dict[str, Any]:
    """Return a call of a process group, and on the same thread the launch of a kernel of correlation ``ts``."""
    arguments = {"Input Dims": dims, "Input type": list(types)}
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 9.0, "tid": 3, "args": arguments}


@pytest.mark.parametrize(
    ("made", "collective", "nbytes"),
    [
        (call("nccl:all_to_all", 5.0, [[8, 1024], []], "float", ""), "all_to_all", 32 << 10),
        (call("nccl:_reduce_scatter_base", 5.0, [[64], [64]], "c10::BFloat16", "c10::Half"), "reduce_scatter", 256),
        (call("nccl:_all_gather_base", 5.0, [[16]], "signed char"), "all_gather", 16),
        (call("nccl:all_reduce", 5.0, []), "all_reduce", 0),  # shapes were not recorded
        (call("nccl:all_reduce", 5.0, [["x"], 3], "float", "int"), "all_reduce", 0),
        (call("nccl:all_reduce", 5.0, [[16]], "a type of its own"), "all_reduce", 0),
        (call("nccl:all_reduce", 20.0, [[16]], "float"), "", 0),  # begins behind the launch
        (call("nccl:recv", 5.0, [[16]], "float"), "", 0),
    ],
)
def test_collectives_of_old_traces_are_known_by_the_call_that_launched_them(
    path: Path, made: dict[str, Any], collective: str, nbytes: int
) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 8.0, "dur": 2.0, "tid": 3}
    launch["args"] = {"correlation": 77}
    events = [made, launch, nccl("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 30.0, 40.0, correlation=77)]
    trace = read_trace(written(path, events))
    assert [(node.collective, node.nbytes) for node in trace.nodes] == [(collective, nbytes)]
    notes = " ".join(replay_table(named("mi300x8"), trace, replay(named("mi300x8"), trace, ("serial",))).notes)
    assert ("1 collectives keep their recorded time" in notes) is (nbytes == 0)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (STEP[:2], "needs events of a GPU"),
        ([kernel("a", 1.0, 2.0), kernel("b", 1.0, 2.0, device=1)], "must have one rank's GPU .value=0, 1"),
        ([kernel("gemm", 1.0, -2.0)], "node 0 'gemm' needs times"),
        ([kernel("gemm", None, 2.0)], "node 0 'gemm' needs times"),  # type: ignore[arg-type]
        ([kernel("gemm", 10**400, 2.0)], "node 0 'gemm' needs times"),
        (
            [kernel("gemm", 0.0, 0.0), nccl("ncclDevKernel_AllGather", 0.0, 0.0, **NCCL)],
            "value=0 microsec",
        ),
        ([kernel("a", 0.0, 5.0), kernel("b", 1.7e15, 5.0)], "'CPU before b' is not of a step"),
        ([kernel("a", 1.0, 4e9)], "'a' is not of a step .value=4e.09 microseconds"),
        (
            [kernel(f"a{i}", i * 1e9, 1e9) for i in range(5)],
            "longer than a step .value=5e.09 us on",
        ),
        ([kernel("a", 1.0, 5.0) for _ in range(200)], "more than 128 at once on stream 7"),
        (
            [nccl("ncclDevKernel_AllGather", 1.0, 5.0, **{**NCCL, "In msg nelems": 1e15})],
            "not of a step .value=1.6e.16",
        ),
        ([nccl("ncclDevKernel_AllGather", 1.0, 5.0, **{**NCCL, "Group size": 1e9})], "not of a step"),
        ([kernel("copy", 1.0, 5.0, cat="gpu_memcpy", bytes=1e17)], "not of a step .value=1e.17 bytes"),
    ],
)
def test_traces_without_a_rank_are_refused(path: Path, events: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_trace(written(path, events))


def test_kernels_of_a_stream_that_overlapped_may_overlap(path: Path) -> None:
    """Branches of a CUDA graph overlap like this. A kernel after another one waits for both."""
    events = [kernel("a", 0.0, 100.0), kernel("b", 20.0, 60.0), kernel("c", 100.0, 50.0)]
    trace = read_trace(written(path, events))
    lanes = {node.name: node.lane for node in trace.nodes}
    assert lanes == {"a": "7", "CPU before b": "before 7, 1", "b": "7, 1", "c": "7"}
    assert set(trace.nodes[-1].after) == {0, 1}
    (one,) = replay(named("mi300x8"), trace, ("c3_base",))
    assert one.time_us < 220.0, "they compete for the compute units, and are not added up"


def test_shapes_and_numbers_of_another_form_are_unknown(path: Path) -> None:
    """Fields that only help to name a collective; its recorded time stays."""
    odd = {"correlation": [7], "device": 0}
    launch = {"ph": "X", "cat": ["cuda"], "name": "launch", "ts": 8.0, "dur": 2.0, "tid": [3], "args": odd}
    for dims in ([[10**17] * 9], [[2] * 100], [[1e400]], [[True, -1]]):
        made = call("nccl:all_reduce", 5.0, dims, "float") | {"tid": [3]}
        events = [made, launch, nccl("ncclKernel_SendRecv", 30.0, 40.0, correlation=[7])]
        try:
            (node,) = read_trace(written(path, events)).nodes
        except ValueError as problem:
            assert dims == [[10**17] * 9] and "is not of a step" in str(problem)  # noqa: PT017
        else:
            assert (node.collective, node.nbytes, node.duration_us) == ("all_reduce", 0, 40.0)


def test_a_file_that_unpacks_without_end_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_UNPACKED_BYTES", 1 << 20)
    for name in (path, path.with_suffix(".et")):
        name.write_bytes(gzip.compress(b" " * (1 << 21)))
        with pytest.raises(ValueError, match="unpacks to too many bytes .allowed=1048576"):
            read_trace(name)


def test_files_that_are_cut_are_refused(path: Path) -> None:
    content = written(path, STEP).read_bytes()
    path.write_bytes(gzip.compress(content))
    assert len(read_trace(path).nodes) == 6
    for cut in (content[:-20], gzip.compress(content)[:-20], b"[" * 100_000, b"[]", b"3", b"\xff\xfe"):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match="step.json"):
            read_trace(path)

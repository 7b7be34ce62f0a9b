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
from sidelane_lab.traces.command import operations_table
from sidelane_lab.traces.graph import NodeKind
from sidelane_lab.traces.kineto import read_kineto
from sidelane_lab.traces.strategies import LIBRARY, plan_trace

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
    nodes = {node.name: node for node in read_kineto(written(path, STEP)).nodes}
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


def test_a_step_takes_its_recorded_time(path: Path) -> None:
    found = plan_trace(named("mi300x8"), read_kineto(written(path, STEP)))
    assert found.library_us == pytest.approx(240.0) and found.host_us == pytest.approx(10.0)


def test_a_gather_recorded_among_other_ranks_keeps_its_bytes_and_is_named(path: Path) -> None:
    trace = read_kineto(written(path, STEP))
    machine = named("h100x4")
    found = plan_trace(machine, trace, is_same=False)
    (operation,) = found.operations
    assert operation.times_us[LIBRARY] == pytest.approx(library_gang(machine, Kind.ALL_GATHER, 16 << 20).alone_us)
    assert "recorded among 8 ranks" in operations_table(found).notes


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
    trace = read_kineto(written(path, [nccl(name, 5.0, 30.0, **args)]))
    assert [(node.collective, node.nbytes) for node in trace.nodes] == [(collective, nbytes)]
    found = plan_trace(named("mi300x8"), trace, is_same=False)
    assert nbytes or found.library_us == pytest.approx(30.0)  # without bytes, a collective keeps its recorded time


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (STEP[:2], "was recorded without a GPU: ranks on CPUs, or .*; record a step on two GPUs or more"),
        ([], "has no events of PyTorch"),
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
        read_kineto(written(path, events))


def test_kernels_of_a_stream_that_overlapped_may_overlap(path: Path) -> None:
    """Branches of a CUDA graph overlap like this. A kernel after another one waits for both."""
    events = [kernel("a", 0.0, 100.0), kernel("b", 20.0, 60.0), kernel("c", 100.0, 50.0)]
    trace = read_kineto(written(path, events))
    lanes = {node.name: node.lane for node in trace.nodes}
    assert lanes == {"a": "7", "CPU before b": "before 7, 1", "b": "7, 1", "c": "7"}
    assert set(trace.nodes[-1].after) == {0, 1}
    moved = read_kineto(written(path, [*events, nccl("ncclDevKernel_AllGather", 150.0, 9.0, **NCCL)]))
    assert plan_trace(named("mi300x8"), moved).library_us == pytest.approx(159.0), "they are not added up"


def test_a_file_that_unpacks_without_end_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_UNPACKED_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b" " * (1 << 21)))
    with pytest.raises(ValueError, match="unpacks to too many bytes .allowed=1048576"):
        read_kineto(path)


def test_files_that_are_cut_are_refused(path: Path) -> None:
    content = written(path, STEP).read_bytes()
    path.write_bytes(gzip.compress(content))
    assert len(read_kineto(path).nodes) == 6
    for cut in (
        *(content[:-20], gzip.compress(content)[:-20], b"[" * 100_000, b"[]", b"3", b"\xff\xfe"),
        *(b'{"deviceProperties": %s, ' % value + content[1:] for value in (b"[null]", b"[1]", b'["H200"]', b"3")),
    ):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match="step.json"):
            read_kineto(path)

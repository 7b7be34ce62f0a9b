"""Pipelined iterations: the schedule without a device, the figures, and the study from end to end on CPU ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidelane.c3.partitions import PairStreams
from sidelane.program.collective import Kind
from sidelane_lab.harness import running
from sidelane_lab.harness.study import read
from sidelane_lab.model import pipeline as model
from sidelane_lab.pairs.pair import Workers
from sidelane_lab.pairs.spans import Trace, shared_share
from sidelane_lab.shaping.shape import OPT1, OPT2
from sidelane_lab.studies.c3 import occupancy
from sidelane_lab.studies.c3.occupancy import OccupancyOptions, Pipelined, Schedule
from sidelane_lab.studies.c3.occupancy_rows import OccupancyRow, gain


class FakeDevice:
    """Records what is queued where; an event is the number of what was queued before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device, self.log, self.current = self, [], "caller"  # type: ignore[var-annotated]

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing, "every operation has two time stamps"

            def record(self, stream: Any) -> None:
                self.at = len(device.log)
                device.log.append(f"{stream.name}: stamp")

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                device.log.append(f"{self.name}: wait {event.at}")

            def wait_stream(self, other: Any) -> None:
                device.log.append(f"{self.name}: join {other.name}")

        class Use:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before, device.current = device.current, self.stream.name

            def __exit__(self, *failure: object) -> None:
                device.current = self.before

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", Use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("caller"))
        self.stream: Callable[[str], Any] = Stream

    def put(self, what: str) -> None:
        self.log.append(f"{self.current}: {what}")


@pytest.mark.parametrize("priority", [False, True])
def test_a_collective_follows_its_gemm_and_the_collective_before(
    monkeypatch: pytest.MonkeyPatch, priority: bool
) -> None:
    device = FakeDevice(monkeypatch)
    streams = PairStreams(*map(device.stream, ("even", "comm", "urgent")))
    with Workers() as workers:
        pipelined = Pipelined(
            lambda number: device.put(f"G{number}"), lambda: device.put("C") or (lambda: None),  # type: ignore[func-returns-value]
            streams, device.stream("odd"), workers,
        )  # fmt: skip
        read = pipelined.overlapped(Schedule(3, priority))
    comm = "urgent" if priority else "comm"
    gemms = [line for line in device.log if "G" in line]
    assert gemms == ["even: G0", "odd: G1", "even: G2"]
    for number, line in enumerate(gemms):
        behind = device.log.index(line) + 1  # the time stamp behind the GEMM
        assert device.log[behind + 1] == f"{comm}: wait {behind}", "of this GEMM"
        assert device.log[behind + 2 : behind + 5] == [f"{comm}: stamp", f"{comm}: C", f"{comm}: stamp"], number
    assert device.log[-3:] == [f"caller: join {name}" for name in ("even", "odd", comm)]
    trace = read()
    assert [end - begin for begin, end in (*trace.gemms, *trace.collectives)] == [2000.0] * 6


def test_on_threads_the_collective_runs_next_to_later_gemms() -> None:
    begun = [threading.Event() for _ in range(3)]

    def gemm(number: int) -> None:
        begun[number].set()

    calls = iter(range(3))

    def collective() -> Callable[[], None]:
        number = next(calls)
        assert begun[number].is_set()
        # It ends only once the following GEMM has begun: next to it, or this would hang.
        return lambda: None if number == 2 else _wait(begun[number + 1])

    with Workers() as workers:
        trace = Pipelined(gemm, collective, None, None, workers).overlapped(Schedule(3))()
    assert len(trace.gemms) == len(trace.collectives) == 3
    assert all(done <= begin for (_, done), (begin, _) in zip(trace.gemms, trace.collectives, strict=True))


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def test_figures_of_a_trace() -> None:
    trace = Trace(((0.0, 10.0), (10.0, 20.0)), ((10.0, 14.0), (20.0, 24.0)))
    assert (trace.time_us, trace.overlap_rate) == (24.0, 0.5)
    assert shared_share([(0.0, 4.0)], [(0.0, 2.0), (1.0, 3.0)]) == 0.75, "two GEMMs at once count once"
    assert shared_share([(0.0, 4.0)], []) == 0
    with pytest.raises(ValueError, match=r"iterations \(value=1"):
        Schedule(1)


def test_the_models_tiles_are_those_of_the_kernel() -> None:
    for ours, theirs in ((OPT1, model.OPT1), (OPT2, model.OPT2)):
        sizes = (ours.tile_m, ours.tile_n, ours.tile_k, ours.stages, 32 * ours.warps)
        assert sizes == (theirs.m, theirs.n, theirs.k, model.STAGES, model.THREADS)


def row(**changed: Any) -> OccupancyRow:
    values = {
        "gemm": "cb1", "m": 8, "n": 8, "k": 8, "dtype": "bfloat16", "collective": "all_reduce", "bytes": 1024,
        "implementation": "nccl", "shape": "opt1", "grid": "data-parallel", "blocks": 64, "resident": 8,
        "shared_bytes": 16384, "priority": False, "in_order": False, "iterations": 6, "gemm_us": 10.0, "comm_us": 5.0,
        "sequential_us": 90.0, "time_us": 80.0, "normalised": 0.9, "overlap_rate": 50.0, "correct": True,
    }  # fmt: skip
    return OccupancyRow(**(values | changed))


def test_what_shaping_gains_is_held_against_the_fastest_usual_grid() -> None:
    rows = [
        row(),
        row(shape="tuned", time_us=70.0, resident=1),
        row(priority=True, time_us=60.0),
        row(priority=True, time_us=56.0, resident=2),
        row(grid="persistent", blocks=16, time_us=75.0),
    ]
    assert gain(rows) == (
        "opt1, 64 blocks, 2 resident, priority: 56 us, 20.0% less than tuned, 64 blocks, 1 resident (70 us)",
    )
    assert gain(rows[2:]) == (), "nothing to hold it against"
    slower = [row(), row(priority=True, time_us=81.0), row(resident=2, time_us=79.9)]
    assert gain(slower) == (
        "opt1, 64 blocks, 8 resident: 80 us; shaping and priority save 0.1% (opt1, 64 blocks, 2 resident)",
    )
    assert gain(slower[:2]) == ("opt1, 64 blocks, 8 resident: 80 us",)


@pytest.mark.long
def test_from_end_to_end_on_cpu_ranks(tmp_path: Path) -> None:
    options = OccupancyOptions(
        device="cpu", ranks=2, quiet=True, warmup=1, repeats=2, timeout_s=100.0, workloads=("70x40x48_6K",),
        blocks=(1, 3, 0), iterations=3, json=tmp_path / "occupancy.json", report=tmp_path / "report", command="test",
    )  # fmt: skip
    results = running.run(options)
    assert results is not None and read(tmp_path / "occupancy.json") == results
    rows = [row for row in results.rows if isinstance(row, OccupancyRow)]
    wanted = list(itertools.product(("all_reduce", "all_to_all"), (1, 3, 70), (False, True)))
    assert [(one.collective, one.blocks, one.priority) for one in rows] == wanted
    for one in rows:
        assert one.correct, one.note
        assert one.normalised and one.time_us and one.sequential_us
        assert one.overlap_rate is not None and 0 <= one.overlap_rate <= 100
        assert (one.shape, one.implementation, one.iterations) == ("rows", "gloo", 3)
    assert "3 iterations" in (tmp_path / "report" / "report.md").read_text()


def test_a_budget_leaves_shapes_out_that_have_a_step_each(capfd: pytest.CaptureFixture[str]) -> None:
    results = running.run(
        OccupancyOptions(
            device="cpu", ranks=2, warmup=0, repeats=1, timeout_s=100.0, workloads=("7x5x6_1K",), iterations=2,
            collectives=(Kind.ALL_TO_ALL,), blocks=(1, 3, 0), budget_s=1e-9, command="test",
        )
    )  # fmt: skip
    assert results is not None and [(row.blocks, row.correct) for row in results.rows] == [(1, True)] * 2  # type: ignore[attr-defined]
    printed = " ".join(capfd.readouterr().err.split())
    name = "7x5x6_1K all_to_all, gloo: rows"
    assert f"[1/3] {name}, 1 blocks" in printed and "--resume" not in printed
    assert f"1e-09 s are over; left: {name}, 3 blocks; {name}, 7 blocks" in printed


def test_shapes_of_a_gpu() -> None:
    options = OccupancyOptions(shapes=("opt1",), blocks=(1, 1000, 0))
    gemm = SimpleNamespace(m=128, n=65)
    made = [*occupancy.shapes_of(gemm, torch.device("cuda:0"), options)]  # type: ignore[arg-type]
    assert [(shape and shape.resident, blocks) for shape, blocks in made] == [
        (None, 1),
        (None, 4),
        (1, 4),
        (2, 4),
        (4, 4),
    ]

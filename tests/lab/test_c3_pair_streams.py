"""The schedule of a pair on streams, seen without a device: who waits for what, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_up_device import FakeDevice

from sidelane.c3.partitions import PairStreams
from sidelane.c3.strategies import named
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Job
from sidelane_lab.pairs.pair import Pair, Workers
from sidelane_lab.pairs.spans import Traced


class Work:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = self.start = run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def launched(device: FakeDevice, strategy: str) -> list[str]:
    streams = PairStreams(*map(device.stream, ("gemm_lane", "comm_lane", "urgent_lane")))  # type: ignore[arg-type]
    with Workers() as workers:
        pairs = Pair(Work(device.queue("gemm")), streams, workers)  # type: ignore[arg-type]
        pairs.launch(named(strategy), Work(device.queue("collective")))()  # type: ignore[arg-type]
    return device.log


def test_the_second_lane_is_released_by_the_first_just_before_its_operation(device: FakeDevice) -> None:
    assert launched(device, "conccl") == [
        "caller: record e1",
        "comm_lane: wait e1",
        "comm_lane: record e2",
        "comm_lane: collective",
        "gemm_lane: wait e2",
        "gemm_lane: record e3",
        "gemm_lane: gemm",
        "caller: join comm_lane",
        "caller: join gemm_lane",
    ]


def test_gemm_first(device: FakeDevice) -> None:
    log = launched(device, "c3_base")
    assert log[1:4] == ["gemm_lane: wait e1", "gemm_lane: record e2", "gemm_lane: gemm"]
    assert log[4] == "comm_lane: wait e2"


def test_a_priority_is_that_of_the_lane(device: FakeDevice) -> None:
    base = launched(device, "c3_base").copy()
    device.log.clear()
    device.events = 0
    urgent = launched(device, "priority")
    assert urgent == [line.replace("comm_lane", "urgent_lane") for line in base] != base


def test_serial_stays_on_the_callers_stream(device: FakeDevice) -> None:
    assert launched(device, "serial") == ["caller: gemm", "caller: collective"]


def test_stamps_are_on_the_lane_of_each_operation(device: FakeDevice) -> None:
    streams = PairStreams(*map(device.stream, ("gemm_lane", "comm_lane", "urgent_lane")))  # type: ignore[arg-type]
    traced = Traced(Work(device.queue("gemm")), Work(device.queue("collective")), on_cpu=False)
    with Workers() as workers:
        traced.launched(Pair(traced, streams, workers).launch(named("conccl"), traced))()
    assert device.log[0] == "caller: record e1", "what the others count from"
    comm = [line for line in device.log if line.startswith("comm_lane")]
    assert [line.partition(" ")[2].partition(" ")[0] for line in comm] == [
        "wait", "record", "record", "collective", "record",
    ]  # fmt: skip
    gemm = [line for line in device.log if line.startswith("gemm_lane")]
    assert gemm[-3].startswith("gemm_lane: record") and gemm[-2:] == ["gemm_lane: gemm", gemm[-1]]
    trace = traced.read()
    assert trace.gemms == ((2000.0, 2000.0),) == trace.collectives  # this device's events are 2 ms apart


@pytest.fixture
def meter(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Meter:
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(Meter, "finish", lambda self, what: device.log.append(f"finish {what}"))
    made = Meter(torch.device("cuda:0"), device_barrier=device.queue("barrier"))
    device.log.clear()  # what it runs for the first time
    return made


def test_a_sample_lines_the_ranks_up_behind_the_spin(device: FakeDevice, meter: Meter) -> None:
    job = Job(device.queue("work"), repeats=2, calls=4, hide_launch_us=500)
    rounds = meter.rounds({"job": job}, warmup=0, repeats=1)["job"]
    assert device.log == [
        "caller: spin 1000000",
        "caller: barrier",
        "caller: record e1",
        "caller: work",
        "caller: work",
        "caller: record e2",
        "finish job",
    ]
    assert rounds.times_us == (500.0,)  # 2 ms for four calls
    assert rounds.late == 0


def test_calls_ahead_have_ended_before_the_ranks_line_up(device: FakeDevice, meter: Meter) -> None:
    job = Job(device.queue("work"), ahead=2)
    meter.rounds({"job": job}, warmup=0, repeats=1)
    assert device.log[:5] == ["caller: work", "caller: work", "finish job", "caller: barrier", "caller: record e1"]
    assert device.log.count("caller: work") == 3


def test_a_late_host_is_counted_and_gets_more_time(device: FakeDevice, meter: Meter) -> None:
    device.started = True
    job = Job(device.queue("work"), hide_launch_us=500)
    rounds = meter.rounds({"job": job}, warmup=1, repeats=2)["job"]
    assert rounds.late == 2
    spins = [line for line in device.log if "spin" in line]
    assert spins == ["caller: spin 1000000", "caller: spin 2000000", "caller: spin 4000000"]


def test_eager_launches_are_part_of_the_time_unless_asked(device: FakeDevice, meter: Meter) -> None:
    meter.rounds({"job": Job(device.queue("work"))}, warmup=0, repeats=1)
    assert not any("spin" in line for line in device.log)


def test_an_accelerator_needs_a_barrier(device: FakeDevice) -> None:
    with pytest.raises(ValueError, match="device_barrier"):
        Meter(torch.device("cuda:0"))

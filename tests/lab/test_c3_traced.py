"""Time stamps of a pair: on a made-up device, which stream has which event where."""

from __future__ import annotations

import pytest
from made_up_device import FakeDevice

from sidelane.c3.partitions import PairStreams
from sidelane.c3.strategies import named
from sidelane_lab.pairs.pair import Pair, Workers
from sidelane_lab.pairs.spans import Traced


class Work:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.run = self.start = device.queue(name)


def test_stamps_are_on_the_lane_of_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    streams = PairStreams(*map(device.stream, ("gemm_lane", "comm_lane", "urgent_lane")))  # type: ignore[arg-type]
    traced = Traced(Work(device, "gemm"), Work(device, "collective"), on_cpu=False)
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

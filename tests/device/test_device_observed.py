"""Metrics, traces and the flight recorder on GPUs."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_context import Context
from device_pool import Ranks

import sidelane
from sidelane import Config, PeerError, flight_recorder, metrics, ranges
from sidelane.cli.recorder import analyse, read_dump

BYTES = 64 << 20


def traced(context: Context, file: str) -> list[tuple[str, str, float]]:
    """Lane, label and microseconds of what a trace shows of this rank; rank 0 has those of all."""
    with sidelane.Communicator(dist.group.WORLD, device=context.device, config=Config(timeout_s=30)) as comm:
        output = comm.empty(comm.world_size, BYTES // 4)
        mine = output[comm.rank].fill_(1)
        sidelane.register()
        own = dist.new_group(backend="sidelane")
        small = torch.ones(1024, device=context.device)
        for _ in range(4):  # compiled code makes them from here on
            comm.all_gather(output, mine)
            dist.all_reduce(small, group=own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_gather(output, mine)
        with sidelane.trace(file):
            for _ in range(3):
                comm.all_gather(output, mine)
                dist.all_reduce(small, group=own)
            work = comm.all_gather(output, mine, async_op=True)
            assert work is not None
            work.wait()
            graph.replay()
        assert not ranges.observers
        dist.destroy_process_group(own)
    if dist.get_rank():
        return []
    events = json.loads(Path(file).read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [(lanes[event["tid"]], event["name"], event["dur"]) for event in events if event["ph"] == "X"]


def observed(context: Context, folder: str) -> tuple[str, list[str]]:
    """The text of the metrics, and the states of the calls in a dump, of copy engines and of kernels."""
    metrics.start()
    flight_recorder.start(f"{folder}/")
    try:
        with sidelane.Communicator(dist.group.WORLD, device=context.device, config=Config(timeout_s=30)) as comm:
            output = torch.empty(comm.world_size, BYTES // 4, device=context.device)
            for _ in range(4):
                comm.all_gather(output, output[comm.rank].clone(), variant="b2b")
                comm.all_reduce(torch.ones(512, device=context.device))
            comm.synchronize()
            comm.all_gather(output, output[comm.rank].clone(), variant="b2b")
            comm.synchronize()
            torch.cuda.synchronize()
            time.sleep(0.3)  # the watch posts ends some twenty times a second
            file = flight_recorder.dump()
        assert file is not None
        found: Any = pickle.loads(file.read_bytes())
        return metrics.text(), [entry["state"] for entry in found["entries"]]
    finally:
        metrics.stop()
        flight_recorder.stop()


def late(context: Context, folder: str) -> None:
    """Rank 1 comes late to the last call: the others' watch writes dumps while their hosts wait for the device."""
    flight_recorder.start(f"{folder}/")
    try:
        with sidelane.Communicator(dist.group.WORLD, device=context.device, config=Config(timeout_s=2)) as comm:
            output = comm.empty(comm.world_size, BYTES // 4)
            for _ in range(4):
                comm.all_gather(output, output[comm.rank], variant="b2b")
            comm.synchronize()
            if comm.rank == 1:
                time.sleep(6)
                with pytest.raises(PeerError):
                    comm.all_gather(output, output[comm.rank], variant="b2b")
                    comm.synchronize()
            else:
                comm.all_gather(output, output[comm.rank], variant="b2b")
                with pytest.raises(PeerError):
                    comm.synchronize()
    finally:
        flight_recorder.stop()


def test_a_trace_has_times_of_the_device(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(traced, str(tmp_path / "trace.json"), timeout_s=120)[0]
    size = ranks.world_size
    gathers = [us for lane, label, us in found if lane == "device: calls" and label.startswith("all_gather")]
    reduces = [us for lane, label, us in found if lane == "device: calls" and label.startswith("all_reduce")]
    assert len(gathers) == 4 * size and len(reduces) == 3 * size  # the replayed one is not there
    assert all(us > 20 for us in gathers)
    assert all(us > 0 for us in reduces)
    assert len([label for lane, label, _ in found if lane == "host: calls"]) == 7 * size


def test_sums_and_states(ranks: Ranks, tmp_path: Path) -> None:
    for text, states in ranks.run(observed, str(tmp_path), timeout_s=120):
        assert 'collective="all_gather",dtype="float32",device="cuda"} 5' in text
        assert "sidelane_timed_calls_total{" not in text  # the host does not know the ends
        assert set(states) == {"completed"}


def test_the_rank_behind_is_named(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(late, str(tmp_path), timeout_s=120)
    found = analyse([read_dump(file) for file in tmp_path.iterdir()])
    assert {(one.kind, one.ranks, one.call) for one in found if one.kind in ("behind", "late")} == {("late", (1,), 6)}

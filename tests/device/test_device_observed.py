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
from on_ranks import on_ranks

import sidelane
from sidelane import Config, PeerError, flight_recorder, metrics, ranges
from sidelane.cli.recorder import analyse, read_dump

BYTES = 64 << 20


@on_ranks(gpu=True, timeout_s=120)
def test_a_trace_has_times_of_the_device(context: Context, tmp_path: Path) -> None:
    """Rank 0 has the calls of all."""
    file = str(tmp_path / "trace.json")
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
        return
    events = json.loads(Path(file).read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = [(lanes[event["tid"]], event["name"], event["dur"]) for event in events if event["ph"] == "X"]
    gathers = [us for lane, label, us in found if lane == "device: calls" and label.startswith("all_gather")]
    reduces = [us for lane, label, us in found if lane == "device: calls" and label.startswith("all_reduce")]
    assert len(gathers) == 4 * context.world_size and len(reduces) == 3 * context.world_size  # without the replayed one
    assert all(us > 20 for us in gathers) and all(us > 0 for us in reduces)
    assert len([label for lane, label, _ in found if lane == "host: calls"]) == 7 * context.world_size


@on_ranks(gpu=True, timeout_s=120)
def test_sums_and_states(context: Context, tmp_path: Path) -> None:
    """The metrics, and the states of calls of copy engines and of kernels in a dump."""
    metrics.start()
    flight_recorder.start(f"{tmp_path}/")
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
        text = metrics.text()
        assert 'collective="all_gather",dtype="float32",device="cuda"} 5' in text
        assert "sidelane_timed_calls_total{" not in text  # the host does not know the ends
        assert {entry["state"] for entry in found["entries"]} == {"completed"}
    finally:
        metrics.stop()
        flight_recorder.stop()


@on_ranks(gpu=True, timeout_s=120)
def test_the_rank_behind_is_named(context: Context, tmp_path: Path) -> None:
    """Rank 1 comes late to the last call: the others' watch writes dumps while their hosts wait for the device."""
    flight_recorder.start(f"{tmp_path}/")
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
    dist.barrier()
    found = analyse([read_dump(file) for file in tmp_path.iterdir()])
    assert {(one.kind, one.ranks, one.call) for one in found if one.kind in ("behind", "late")} == {("late", (1,), 6)}

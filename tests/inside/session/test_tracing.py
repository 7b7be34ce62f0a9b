"""``sidelane.trace``: one file with the calls of all ranks on one clock; events on a GPU lie around each call."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Crew

import sidelane
from sidelane import Config, ranges
from sidelane.collectives.work import Work
from sidelane.session import tracing


def traced(group: dist.ProcessGroup, folder: str) -> list[int]:
    with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
        n = comm.world_size
        begins = []
        for name in ("first", "second"):
            begins.append(time.time_ns())
            with sidelane.trace(f"{folder}/{name}.json"):
                comm.all_gather(torch.empty(n, 256), torch.ones(256))
                if comm.rank:
                    time.sleep(0.1)
                work = comm.all_reduce(torch.ones(5), async_op=True)
                assert work is not None
                work.wait()
                with pytest.raises(RuntimeError, match="another trace"), sidelane.trace("never.json"):
                    pass
        comm.barrier()
    assert not ranges.observers
    return begins


@pytest.fixture
def crew() -> Any:
    made = Crew(2)
    yield made
    made.close()


def test_all_ranks_are_in_one_file(crew: Crew, tmp_path: Path) -> None:
    crew.run(traced, 2, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.json", "second.json"]
    for file in tmp_path.iterdir():
        events = json.loads(file.read_text())["traceEvents"]
        processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert sorted(processes.values()) == ["rank 0", "rank 1"]
        spans = [
            (processes[event["pid"]], lanes[event["tid"]], event["name"], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X"
        ]
        found = {(rank, lane, name): (begin, end) for rank, lane, name, begin, end in spans}
        gather, reduce = "all_gather 2KB float32", "all_reduce 20B float32"
        assert len(found) == len(spans) == 6
        for rank in ("rank 0", "rank 1"):
            assert 0 <= found[rank, tracing.HOST, gather][0] < found[rank, tracing.HOST, gather][1]
            # An asynchronous call has ended for all ranks only when the late one has come, on one clock.
            assert found[rank, tracing.DEVICE, reduce][1] > found["rank 1", tracing.HOST, reduce][0]
        begins = [found[rank, tracing.HOST, reduce][0] for rank in ("rank 0", "rank 1")]
        assert begins[1] - begins[0] > 5e4


class Event:
    """An event of a GPU that runs one microsecond of work for each that is recorded."""

    clock = 0

    def __init__(self, **_: Any) -> None:
        self.at = 0

    def record(self, stream: Any = None) -> None:
        Event.clock += 1
        self.at = stream if isinstance(stream, int) else Event.clock * 1000

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) / 1e3  # milliseconds


class OnStream(Work):
    wait = is_completed = exception = get_future = None  # type: ignore[assignment]

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream = stream

    @property
    def stream(self) -> Any:
        return self._stream


def test_events_lie_around_what_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream stands for the microsecond at which it gets to its event."""
    cuda = torch.cuda
    fakes = {
        "Event": Event,
        "ExternalStream": int,
        "current_stream": lambda: None,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(cuda, name, fake)
    engines: list[int] = []
    backend = SimpleNamespace(hosts_meet=False, engine_streams=lambda: engines)
    maker = SimpleNamespace(ranks=(0, 1), name="", backend=backend)
    tracer = tracing.Tracer()
    ranges.observe(tracer)
    try:
        with ranges.method_call(
            "barrier", ranges.argument_indices(()), (), {}, maker
        ) as call:  # begins at 2000, ends at 3000
            call.work = None
        engines[:] = [9000, 2500]  # the second one has had nothing to do since the first call
        with ranges.method_call("barrier", ranges.argument_indices(()), (), {}, maker) as call:  # begins at 4000
            call.work = OnStream(8000)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: True)
        with ranges.method_call("barrier", ranges.argument_indices(()), (), {}, maker) as call:
            call.work = None
    finally:
        ranges.leave(tracer)
    zero = tracer._zero
    assert zero is not None
    zero_ns = zero[0] - 1000_000
    device = [
        (lane, (b - zero_ns) // 1000, (e - zero_ns) // 1000)
        for lane, _, b, e in tracer.intervals()
        if lane != "host: calls"
    ]
    assert device == [
        (tracing.DEVICE, 2000, 3000),
        (tracing.DEVICE, 4000, 8000),
        (f"{tracing.ENGINES} 1", 4000, 9000),
    ]
    assert len([lane for lane, *_ in tracer.intervals() if lane == tracing.HOST]) == 3

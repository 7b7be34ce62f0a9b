"""Measure what it costs a call that something observes it: metrics, a subscriber, the flight recorder, a trace.

    python results/scripts/measure_observers.py  # a method that does nothing but enter and leave, and a call of 1 KiB

Prints microseconds of the host a call, in the fastest of the batches: another process may run beside the others. With
GPUs the call is one that compiled code repeats; on CPUs it is a copy in this process. There is one rank: others would
add their waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator, flight_recorder, metrics, trace
from sidelane.session.entry import entry

BATCHES = 15


class Nothing:
    """An object whose one call does nothing."""

    def __init__(self, comm: Communicator) -> None:
        self._calls = comm.calls

    @entry
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Do nothing."""


def least_us(call: Callable[[], object], calls: int) -> float:
    """Return the microseconds that a call takes the host, in the fastest batch."""
    found = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) * 1e6 / calls)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(found)


@contextlib.contextmanager
def summing() -> Iterator[None]:
    """Sum calls up as metrics."""
    metrics.start()
    yield
    metrics.stop()


@contextlib.contextmanager
def subscribed() -> Iterator[None]:
    """Pass each call to a function that does nothing."""
    leave = metrics.subscribe(lambda call: None)
    yield
    leave()


@contextlib.contextmanager
def recording(folder: str) -> Iterator[None]:
    """Keep the last calls."""
    flight_recorder.start(folder + "/")
    yield
    flight_recorder.stop()


def main() -> None:
    """Measure, print, and write a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="calls of a batch")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    with Communicator(device=device) as comm, tempfile.TemporaryDirectory() as folder:
        output, shard, nothing = torch.empty(256, device=device), torch.ones(256, device=device), Nothing(comm)
        observers: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "nothing": contextlib.nullcontext,
            "metrics": summing,
            "a subscriber": subscribed,
            "the flight recorder": lambda: recording(folder),
            "a trace": lambda: trace(f"{folder}/trace.json"),
        }
        for name, observer in observers.items():
            with observer():
                entered = least_us(lambda: nothing.all_gather(output, shard), options.calls)
                called = least_us(lambda: comm.all_gather(output, shard), options.calls)
            rows.append({"observer": name, "entry_us": round(entered, 2), "call_us": round(called, 2)})
            print(f"{name:20} {entered:6.2f} us to enter and leave   {called:7.2f} us a call of 1 KiB")
    dist.destroy_process_group()
    if options.json is not None:
        where = torch.cuda.get_device_name() if gpu else "cpu"
        options.json.write_text(
            json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

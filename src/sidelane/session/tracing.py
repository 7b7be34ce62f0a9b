"""``sidelane.trace``: when each call began and ended, of a running program, as a Chrome trace of all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import log, ranges
from sidelane.collectives.work import Work
from sidelane.execute.timeline import Interval, write_chrome_trace
from sidelane.ranges import ObservedCall, Observer
from sidelane.sizes import format_bytes

HOST, DEVICE = "host: calls", "device: calls"
"""Lanes of a rank: when its host was inside of a call, and when the device was."""

ENGINES = "device: engine stream"
"""Lane of a stream of copy engines, with its number: from the call's begin to the end of what it did for the call."""

PATIENCE_S = 60.0
"""Seconds that rank 0 waits for the other ranks' part of a trace."""


@contextlib.contextmanager
def trace(file: str | os.PathLike[str]) -> Iterator[None]:
    """Record when each call begins and ends while the ``with`` block runs, and write it for Perfetto.

        with sidelane.trace("trace.json"):
            for _ in range(3):
                step()

    Every rank enters and leaves the block. Rank 0 of the world writes one file with a process for each rank; the other
    ranks hand it their part and go on. On GPUs, events of the device are recorded around what a call submits, on the
    caller's stream and on the streams of copy engines; entering and leaving wait for the device. On CPU ranks the
    host's times are those of the calls. Calls that are captured into graphs have their host's time only, and replays of
    graphs cannot be seen: nothing of Sidelane runs on the host then.

    The clocks of one machine are one; those of several are as good as their synchronisation (NTP).

    Args:
        file: file to write, which Perfetto (ui.perfetto.dev) opens.

    Raises:
        RuntimeError: a trace is being recorded already.
    """
    global _traces
    if any(isinstance(observer, Tracer) for observer in ranges.observers):
        raise RuntimeError("trace: inside of another trace; one is recorded at a time")
    number, _traces = _traces, _traces + 1
    tracer = Tracer()
    ranges.observe(tracer)
    try:
        yield
    finally:
        ranges.leave(tracer)
        _write(file, tracer.intervals(), number)


@dataclasses.dataclass(slots=True, eq=False)
class _Traced:
    """One call: its label, its times on the host, and its events on the device.

    Attributes:
        maker: identity of the communicator that made it; 0 for none.
        ended_ns: time at which it returned.
        finished_ns: time of its end on the host's clock, where the host knows it; 0 if it does not.
        begin: event on the caller's stream in front of the call; None if there is none.
        ends: lane and event behind the call, for each stream.
    """

    label: str
    maker: int
    began_ns: int
    ended_ns: int = 0
    finished_ns: int = 0
    begin: torch.cuda.Event | None = None
    ends: list[tuple[str, torch.cuda.Event]] = dataclasses.field(default_factory=list)


class Tracer(Observer):
    """Observer that notes the times of calls, on the host and on the current GPU, if there is one."""

    def __init__(self) -> None:
        self._calls: list[_Traced] = []
        self._zero: tuple[int, torch.cuda.Event] | None = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._zero = time.time_ns(), event

    def begin(self, call: ObservedCall) -> _Traced:
        nbytes, dtype = call.nbytes, call.dtype
        label = f"{call.name} {format_bytes(nbytes)}B {dtype}" if nbytes else call.name
        traced = _Traced(label, 0 if call.maker is None else id(call.maker), call.began_ns)
        if self._zero is not None and call.device == "cuda" and not torch.cuda.is_current_stream_capturing():
            traced.begin = _marked(torch.cuda.current_stream())
        self._calls.append(traced)
        return traced

    def returned(self, call: ObservedCall, note: _Traced, error: BaseException | None) -> None:
        note.ended_ns = call.ended_ns
        if error is not None:
            note.label += f" ({type(error).__name__})"
            return
        if note.begin is None or (call.work is not None and not isinstance(call.work, Work)):
            return  # the work of another backend is on a stream of its own
        stream = (call.work.stream if call.work is not None else None) or torch.cuda.current_stream()
        note.ends.append((DEVICE, _marked(stream)))
        handles = call.maker.backend.engine_streams() if call.maker is not None else ()
        for number, handle in enumerate(handles, 1):
            note.ends.append((f"{ENGINES} {number}", _marked(torch.cuda.ExternalStream(handle))))

    def end(self, call: ObservedCall, note: _Traced, error: BaseException | None) -> None:
        if isinstance(call.work, Work):  # another call ended when it returned, or where no host sees it
            note.finished_ns = call.finished_ns

    def intervals(self) -> list[tuple[str, str, int, int]]:
        """Return lane, label, begin and end of everything, in nanoseconds of the epoch. Waits for the device."""
        if self._zero is not None:
            torch.cuda.synchronize()
        found: list[tuple[str, str, int, int]] = []
        free_ns: dict[int, int] = {}  # the end of the last call, by its communicator
        for traced in self._calls:
            found.append((HOST, traced.label, traced.began_ns, traced.ended_ns or traced.began_ns))
            if traced.finished_ns:
                found.append((DEVICE, traced.label, traced.began_ns, traced.finished_ns))
            if traced.begin is None:
                continue
            # Calls of a communicator follow each other: what ended before the one in front did is not of this one.
            began_ns = max(self._time_of(traced.begin), free_ns.get(traced.maker, 0))
            for lane, event in traced.ends:
                if (ended_ns := self._time_of(event)) > began_ns:
                    found.append((lane, traced.label, began_ns, ended_ns))
                    free_ns[traced.maker] = max(free_ns.get(traced.maker, 0), ended_ns)
        return found

    def _time_of(self, event: torch.cuda.Event) -> int:
        assert self._zero is not None
        zero_ns, zero = self._zero
        return zero_ns + int(zero.elapsed_time(event) * 1e6)


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _write(file: str | os.PathLike[str], own: Sequence[tuple[str, str, int, int]], number: int) -> None:
    """Hand the own part to rank 0, which writes the file."""
    parts: dict[int, Sequence[Any]] = {ranges.world_rank(): own}
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.PrefixStore(f"sidelane/trace/{number}/", c10d._get_default_store())
        if dist.get_rank():
            store.set(str(dist.get_rank()), json.dumps(own))
            return
        until = time.monotonic() + PATIENCE_S
        for rank in range(1, dist.get_world_size()):
            try:
                store.wait([str(rank)], timedelta(seconds=max(until - time.monotonic(), 0.1)))
                parts[rank] = json.loads(store.get(str(rank)))
                store.delete_key(str(rank))
            except RuntimeError as error:
                log.calls.warning("trace: rank %d has handed in nothing within %g s: %s", rank, PATIENCE_S, error)
    zero_ns = min((row[2] for part in parts.values() for row in part), default=0)
    write_chrome_trace(
        file,
        (
            Interval(f"rank {rank}", lane, label, (began_ns - zero_ns) / 1e3, (ended_ns - zero_ns) / 1e3)
            for rank, part in sorted(parts.items())
            for lane, label, began_ns, ended_ns in part
        ),
    )


_traces = 0

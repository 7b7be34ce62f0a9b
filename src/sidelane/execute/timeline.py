"""Timeline of a simulated run, and its form as a Chrome trace (open it in Perfetto or chrome://tracing)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """An activity with its begin and end.

    Attributes:
        group: owner of the lane (``rank 0``, ``host``).
        lane: queue, engine, link or kernel.
        label: description of the activity.
        start_us: virtual time of the begin in microseconds.
        end_us: virtual time of the end in microseconds.
    """

    group: str
    lane: str
    label: str
    start_us: float
    end_us: float


def chrome_trace(intervals: Iterable[Interval]) -> dict[str, Any]:
    """Return the trace as the object that Perfetto reads: a process for each group, a thread for each lane."""
    groups: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for interval in intervals:
        if interval.group not in groups:
            groups[interval.group] = len(groups) + 1
            events.append(_name("process_name", interval.group, groups[interval.group], 0))
        key = (interval.group, interval.lane)
        if key not in lanes:
            lanes[key] = len(lanes) + 1
            events.append(_name("thread_name", interval.lane, groups[interval.group], lanes[key]))
        events.append(
            {
                "name": interval.label,
                "ph": "X",
                "pid": groups[interval.group],
                "tid": lanes[key],
                "ts": round(interval.start_us, 4),
                "dur": round(interval.end_us - interval.start_us, 4),
            }
        )
    return {"displayTimeUnit": "ns", "traceEvents": events}


def write_chrome_trace(path: str | os.PathLike[str], intervals: Iterable[Interval]) -> Path:
    """Write the trace to a file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(chrome_trace(intervals)), encoding="utf-8")
    return target


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

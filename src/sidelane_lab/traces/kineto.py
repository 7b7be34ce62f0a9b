"""Traces of PyTorch's profiler (Kineto's Chrome JSON) of one rank: what ran on its GPU, when, and after what.

Such a trace has no dependencies. A kernel is taken to wait for the kernel before it on its stream, and on every other
stream for the last one that had ended when it began: what overlapped in the recording may overlap, and what did not
keeps its order. Time in which a kernel could have begun by that and did not is the CPU's, and becomes a node.

    compute  |  gemm 1  |      |  gemm 2  |             gemm 2 waits for gemm 1; gather waits for gemm 1
    NCCL                | gather  |                     the pause before gemm 2 is the CPU's

Kernels of collectives have their names and sizes since PyTorch 2.2. Of older traces they are those of the call of the
process group in which the CPU launched the kernel, if shapes were recorded.
"""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from sidelane.user_files import bytes_of
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode

CATEGORIES = {"kernel": NodeKind.COMPUTE, "gpu_memcpy": NodeKind.MEMORY, "gpu_memset": NodeKind.MEMORY}
"""Kinds of the events of a GPU, by category."""
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Names of collectives by what the names of PyTorch's calls and NCCL's kernels have in them, the longer one first."""
ELEMENT_BYTES = {
    **dict.fromkeys(("Double", "Long", "double", "long", "long int"), 8),
    **dict.fromkeys(("Float", "Int", "float", "int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "c10::Half", "c10::BFloat16", "short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("signed char", "unsigned char", "bool"), 1),
}
"""Bytes of an element, by the profiler's name of its type: of kernels, and of inputs of calls."""
CALL = "nccl:"
"""Begin of the names of a process group's calls."""
PAUSE_US = 0.01
"""Microseconds above which a pause is the CPU's; shorter ones are rounding."""


def read_kineto(path: Path) -> TraceGraph:
    """Read a trace of one rank.

    Raises:
        OSError: the file can not be read.
        ValueError: the file is cut or no trace of PyTorch's profiler, has nothing that ran on a GPU, or several GPUs.
    """
    content = bytes_of(path)
    try:
        found = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (ValueError, EOFError, RecursionError, zlib.error, OSError) as problem:
        raise ValueError(f"read_kineto: {path} must be a whole JSON file ({problem})") from problem
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ValueError(f"read_kineto: {path} needs a list traceEvents (value={type(events).__name__})")
    ran = [
        (place, event)
        for place, event in enumerate(events)
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") in CATEGORIES
    ]
    if not ran:
        raise ValueError(f"read_kineto: {path} needs events of a GPU (value=none, allowed={', '.join(CATEGORIES)})")
    calls = _Calls(events)
    devices = {str(_arguments(event).get("device", 0)) for _, event in ran}
    if len(devices) > 1:
        raise ValueError(f"read_kineto: {path} must have one rank's GPU (value={', '.join(sorted(devices))})")
    return TraceGraph(
        str(path), tuple(_ordered([_node(path, place, event, calls) for place, event in ran], len(events)))
    )


class _Calls:
    """Calls of a process group by what they launched: their names and the bytes of their inputs."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.launches: dict[object, tuple[object, float]] = {}
        self.by_thread: dict[object, list[tuple[float, float, str, int]]] = {}
        for event in events:
            if not isinstance(event, dict) or event.get("ph") != "X" or not _positive(event.get("ts")):
                continue
            name, thread, start = str(event.get("name", "")), event.get("tid"), float(event["ts"])
            correlation = _arguments(event).get("correlation")
            if correlation is not None and event.get("cat") not in CATEGORIES:
                self.launches[correlation] = thread, start
            if name.startswith(CALL) and _positive(event.get("dur")):
                call = (start, start + float(event["dur"]), name.removeprefix(CALL), _recorded_bytes(event))
                self.by_thread.setdefault(thread, []).append(call)
        for calls in self.by_thread.values():
            calls.sort()

    def launched(self, kernel: Mapping[str, Any]) -> tuple[str, int]:
        """Return the name of the call that launched a kernel, and the bytes of its inputs; nothing where none did."""
        thread, start = self.launches.get(_arguments(kernel).get("correlation"), (None, 0.0))
        calls = self.by_thread.get(thread, [])
        place = bisect.bisect_right(calls, start, key=lambda call: call[0]) - 1
        if place < 0 or calls[place][1] < start:
            return "", 0
        return calls[place][2:]


def _recorded_bytes(event: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors that a call got; 0 where shapes were not recorded, or a type is not known."""
    dims, types = (_arguments(event).get(name) for name in ("Input Dims", "Input type"))
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return 0
    found = 0
    for shape, kind in zip(dims, types, strict=True):
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            return 0
        if shape:
            found += math.prod(shape) * ELEMENT_BYTES.get(str(kind), 0)
    return found


def _ordered(nodes: list[TraceNode], first_free: int) -> list[TraceNode]:
    """Return nodes with what they wait for, and the pauses before them as nodes of the CPU."""
    nodes = sorted(nodes, key=lambda node: (node.start_us, node.start_us + node.duration_us))
    begin_us = nodes[0].start_us
    lanes: dict[str, list[TraceNode]] = {}
    ends: dict[str, list[float]] = {}
    found: list[TraceNode] = []
    for node in nodes:
        after: dict[int, float] = {}
        for lane, before in lanes.items():
            place = len(before) if lane == node.lane else bisect.bisect_right(ends[lane], node.start_us + PAUSE_US)
            if place:
                after[before[place - 1].ident] = ends[lane][place - 1]
        pause_us = node.start_us - max(after.values(), default=begin_us)
        start_us = node.start_us - begin_us
        waits = tuple(after)
        if pause_us > PAUSE_US:
            pause = TraceNode(
                first_free, f"CPU before {node.name}", NodeKind.COMPUTE, waits, pause_us, start_us - pause_us, True,
                f"before {node.lane}",
            )  # fmt: skip
            found.append(pause)
            first_free, waits = first_free + 1, (pause.ident,)
        made = dataclasses.replace(node, after=waits, start_us=start_us)
        found.append(made)
        lanes.setdefault(node.lane, []).append(made)
        # Kernels of a stream can overlap by rounding.
        latest = max(node.start_us + node.duration_us, *ends.get(node.lane, [])[-1:], node.start_us)
        ends.setdefault(node.lane, []).append(latest)
    return found


def _node(path: Path, place: int, event: Mapping[str, Any], calls: _Calls) -> TraceNode:
    name = str(event.get("name", ""))
    start, duration = event.get("ts"), event.get("dur", 0)
    if not _positive(start) or not _positive(duration):
        text = f"(value=ts {start!r}, dur {duration!r}, allowed=0 or more microseconds)"
        raise ValueError(f"read_kineto: {path}: node {place} {name!r} needs times {text}")
    arguments = _arguments(event)
    lane = str(arguments.get("stream", event.get("tid", "")))
    kind, collective = CATEGORIES[event["cat"]], ""
    nbytes = ranks = 0
    if kind is NodeKind.COMPUTE and name.lower().startswith(("nccl", "rccl")):
        kind = NodeKind.COLLECTIVE
        collective = _collective(str(arguments.get("Collective name", "")) or name)
        nbytes = _input_bytes(arguments)
        if not nbytes:
            call, recorded = calls.launched(event)
            if called := _collective(call):
                collective, nbytes = called, recorded
        ranks = int(arguments["Group size"]) if _positive(arguments.get("Group size")) else 0
    elif kind is NodeKind.MEMORY and _positive(arguments.get("bytes")):
        nbytes = int(arguments["bytes"])
    return TraceNode(place, name, kind, (), float(duration), float(start), False, lane, collective, nbytes, 0, ranks)


def _collective(name: str) -> str:
    """Return Chakra's name of a collective; empty where the name tells none, such as send and receive."""
    plain = name.lower().replace("_", "")
    return next((known for part, known in COLLECTIVES.items() if part in plain), "")


def _input_bytes(arguments: Mapping[str, Any]) -> int:
    """Return the bytes of this rank's input; 0 where the profiler did not record them."""
    count = arguments.get("In msg nelems", 0)
    element = ELEMENT_BYTES.get(str(arguments.get("dtype", "")), 0)
    return int(count) * element if _positive(count) else 0


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")

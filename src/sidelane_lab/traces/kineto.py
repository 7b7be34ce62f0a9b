"""Traces of PyTorch's profiler (Kineto's Chrome JSON) of one rank: what ran on its GPU, when, and after what.

Such a trace has no dependencies. A kernel is taken to wait for the kernel before it on its stream, and on every other
stream for the last one that had ended when it began: what overlapped in the recording may overlap, and what did not
keeps its order. Time in which a kernel could have begun by that and did not is the CPU's, and becomes a node.

    compute  |  gemm 1  |      |  gemm 2  |             gemm 2 waits for gemm 1; gather waits for gemm 1
    NCCL                | gather  |                     the pause before gemm 2 is the CPU's

Kernels of collectives have their names and sizes since PyTorch 2.2. Kernels of a CUDA graph have none: they get those
of as many eager calls before it in the same trace, a warm-up for example.

Of a recording of several steps the last one counts: what was launched in the last ``ProfilerStep#``, or else what
repeats itself to the end, kernel by kernel.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeGuard

from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode, content_of

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
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes of an element, by the profiler's name of its type."""
PAUSE_US = 0.01
"""Microseconds above which a pause is the CPU's; shorter ones are rounding."""
MOST_BESIDE = 128
"""Kernels of a stream that run beside each other at the most, as those of a CUDA graph may."""
ALIKE = 1.5
"""Factor by which a kernel beside a collective takes longer at the most than one of the same name and grid alone: where
they are further apart, they are of other sizes."""
REPEATED = 0.9
"""Share of a recording that steps which are alike make up at least: layers of one step make up less."""
HOW = "record a step on two GPUs or more (docs/guide/start-planning.md), or try examples/parts/recorded_step.py"
"""Words for what to do where a file is no trace of a step of several GPUs."""
STEP = "ProfilerStep#"
"""Begin of the profiler's names of steps."""
LARGEST = 1e18
"""Largest number in a trace: microseconds since 1970 are a thousandth of it."""


def read_kineto(path: Path) -> TraceGraph:
    """Read a trace of one rank.

    Raises:
        OSError: the file can not be read.
        ValueError: the file is cut or no trace of PyTorch's profiler, has nothing that ran on a GPU, or several GPUs,
            or its description of the GPUs is damaged.
    """
    content = content_of(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"plan: {path} is not a whole JSON file; record it again ({problem})") from problem
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ValueError(f"plan: {path} is no trace of PyTorch's profiler: {HOW} (it has no list traceEvents)")
    ran = [
        (place, event)
        for place, event in enumerate(events)
        if isinstance(event, dict) and event.get("ph") == "X" and str(event.get("cat")) in CATEGORIES
    ]
    if not ran:
        on_cpu = any(isinstance(event, dict) and event.get("cat") in ("cpu_op", "user_annotation") for event in events)
        why = "was recorded without a GPU: ranks on CPUs, or a profiler without ProfilerActivity.CUDA" if on_cpu else ""
        raise ValueError(f"plan: {path} {why or 'has no events of PyTorch: the profiler saw no step'}; {HOW}")
    devices = {str(_arguments(event).get("device", 0)) for _, event in ran}
    if len(devices) > 1:
        raise ValueError(f"plan: {path} must have one rank's GPU (value={', '.join(sorted(devices))})")
    nodes = [_node(path, place, event) for place, event in ran]
    if not any(node.duration_us for node in nodes):
        raise ValueError(f"plan: {path} needs times of what ran on the GPU (value=0 microseconds of every event)")
    words, chosen = _last_step(events, nodes)
    step = _calm(_sized(nodes, chosen), events)
    properties, distributed = (
        found.get(name) if isinstance(found, dict) else None for name in ("deviceProperties", "distributedInfo")
    )
    first = (properties or [{}])[0] if isinstance(properties, list | None) else None
    if not isinstance(first, dict):
        text = f"deviceProperties must be a list of objects, not {str(properties)[:40]}: take it out of the file"
        raise ValueError(f"plan: {path} is damaged: {text}, and say --machine 8xh100, ...")
    ranks = distributed.get("world_size") if isinstance(distributed, dict) else 0
    return TraceGraph(
        str(path),
        tuple(_ordered(path, step, len(events), _in_graphs(step, events))),
        str(first.get("name") or ""),
        int(ranks) if _positive(ranks) else 0,
        words,
    )


def _last_step(events: Sequence[Any], nodes: Sequence[TraceNode]) -> tuple[str, list[TraceNode]]:
    """Return the last step of a recording, and words for it."""
    steps = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if isinstance(event, dict)
        and str(event.get("name", "")).startswith(STEP)
        and event.get("cat") == "user_annotation"
        and _positive(event.get("ts"))
        and _positive(event.get("dur"))
    ]
    launched = _launched(nodes, events)
    for begin, end, name in sorted(steps, reverse=True):
        found = [node for node in nodes if begin <= launched.get(node.ident, node.start_us) < end]
        if any(node.kind is NodeKind.COMPUTE for node in found):
            return name, found
    busy: dict[str, list[TraceNode]] = defaultdict(list)
    for node in sorted(nodes, key=lambda one: one.start_us):
        busy[node.lane].append(node)
    lane = max(busy.values(), key=lambda one: sum(node.duration_us for node in one))
    count = _repeated([node.name for node in lane])
    found = [node for node in nodes if count and node.start_us >= lane[-count].start_us]
    if any(node.kind is NodeKind.COLLECTIVE for node in found):
        return f"the last of {len(lane) // count} parts that are alike", found
    return "the whole trace", list(nodes)


def _repeated(names: Sequence[str]) -> int:
    """Return the least number of names at the end that the ones before them repeat, nearly to the first; 0: none do.

    >>> _repeated("abcabcabcabc"), _repeated("abcdddd"), _repeated("abcdef")
    (3, 0, 0)
    """
    alike = _alike(list(reversed(names)))
    each = range(1, len(names) // 2 + 1)
    return next((count for count in each if count + alike[count] >= REPEATED * len(names)), 0)


def _alike(names: Sequence[str]) -> list[int]:
    """Return for each place how many names from there on are those from the first on (the Z function)."""
    found = [len(names)] + [0] * (len(names) - 1)
    left = right = 0
    for at in range(1, len(names)):
        length = min(right - at, found[at - left]) if at < right else 0
        while at + length < len(names) and names[length] == names[at + length]:
            length += 1
        found[at] = length
        if at + length > right:
            left, right = at, at + length
    return found


def _sized(nodes: Sequence[TraceNode], step: Sequence[TraceNode]) -> list[TraceNode]:
    """Return a step's nodes; collectives of a CUDA graph get the bytes of as many eager ones of their kind before."""
    begin = min(node.start_us for node in step)
    eager: dict[str, list[TraceNode]] = defaultdict(list)
    lacking: dict[str, list[TraceNode]] = defaultdict(list)
    for node in sorted(nodes, key=lambda one: one.start_us):
        if node.kind is NodeKind.COLLECTIVE and node.nbytes and node.start_us < begin:
            eager[node.collective].append(node)
    for node in sorted(step, key=lambda one: one.start_us):
        if node.kind is NodeKind.COLLECTIVE and not node.nbytes:
            lacking[node.collective].append(node)
    sizes = {
        node.ident: other
        for kind, some in lacking.items()
        if len(eager[kind]) >= len(some)
        for node, other in zip(some, eager[kind][-len(some) :], strict=True)
    }
    return [
        dataclasses.replace(node, nbytes=sizes[node.ident].nbytes, ranks=sizes[node.ident].ranks)
        if node.ident in sizes
        else node
        for node in step
    ]


def _calm(step: Sequence[TraceNode], events: Sequence[Any]) -> list[TraceNode]:
    """Return a step's nodes; computations beside collectives get the duration of the same kernel beside none."""
    moving = sorted(
        (node.start_us, node.start_us + node.duration_us) for node in step if node.kind is NodeKind.COLLECTIVE
    )
    begins = [begin for begin, _ in moving]

    def is_beside(node: TraceNode) -> bool:
        at = bisect.bisect_left(begins, node.start_us + node.duration_us)
        return any(end > node.start_us for _, end in moving[max(0, at - MOST_BESIDE) : at])

    def key(node: TraceNode) -> str:
        arguments = _arguments(events[node.ident])
        return f"{node.name} {arguments.get('grid')} {arguments.get('block')}"

    alone: dict[str, list[float]] = defaultdict(list)
    beside = {node.ident for node in step if node.kind is NodeKind.COMPUTE and is_beside(node)}
    for node in step:
        if node.kind is NodeKind.COMPUTE and node.ident not in beside:
            alone[key(node)].append(node.duration_us)
    found = []
    for node in step:
        least, most = node.duration_us / ALIKE, node.duration_us * ALIKE
        near = [us for us in alone[key(node)] if least <= us <= most] if node.ident in beside else []
        calm_us = min(statistics.median(near), node.duration_us) if near else 0.0
        found.append(dataclasses.replace(node, calm_us=calm_us))
    return found


def _in_graphs(step: Sequence[TraceNode], events: Sequence[Any]) -> set[int]:
    """Return the numbers of kernels of CUDA graphs, all of which one launch began."""
    launch = {node.ident: str(_arguments(events[node.ident]).get("correlation", f"of {node.ident}")) for node in step}
    counts = Counter(launch.values())
    return {ident for ident, number in launch.items() if counts[number] > 1}


def _launched(nodes: Sequence[TraceNode], events: Sequence[Any]) -> dict[int, float]:
    """Return the times at which the CPU launched kernels, by the number of the node, where they are known."""
    launches = {
        str(_arguments(event)["correlation"]): float(event["ts"])
        for event in events
        if isinstance(event, dict)
        and "correlation" in _arguments(event)
        and str(event.get("cat")) not in CATEGORIES
        and _positive(event.get("ts"))
    }
    number = {node.ident: str(_arguments(events[node.ident]).get("correlation")) for node in nodes}
    return {ident: launches[one] for ident, one in number.items() if one in launches}


def _ordered(path: Path, nodes: list[TraceNode], first_free: int, in_graph: Set[int]) -> list[TraceNode]:
    """Return nodes with what they wait for, and the pauses before them as nodes of the CPU, or of a CUDA graph."""
    nodes = sorted(nodes, key=lambda node: (node.start_us, node.start_us + node.duration_us))
    begin_us = nodes[0].start_us
    lanes: dict[str, list[TraceNode]] = {}
    ends: dict[str, list[float]] = {}
    found: list[TraceNode] = []
    for recorded in nodes:
        node = dataclasses.replace(recorded, lane=_free_lane(path, recorded, ends))
        after: dict[int, float] = {}
        for lane, before in lanes.items():
            if place := bisect.bisect_right(ends[lane], node.start_us + PAUSE_US):
                after[before[place - 1].ident] = ends[lane][place - 1]
        pause_us = node.start_us - max(after.values(), default=begin_us)
        start_us = node.start_us - begin_us
        waits = tuple(after)
        if pause_us > PAUSE_US:
            kind = NodeKind.LAUNCH if node.ident in in_graph else NodeKind.COMPUTE
            pause = TraceNode(
                first_free, f"CPU before {node.name}", kind, waits, pause_us, start_us - pause_us, True,
                f"before {node.lane}",
            )  # fmt: skip
            waits = (pause.ident,)
            found.append(pause)
            first_free += 1
        made = dataclasses.replace(node, after=waits, start_us=start_us)
        found.append(made)
        lanes.setdefault(node.lane, []).append(made)
        latest = max(node.start_us + node.duration_us, *ends.get(node.lane, [])[-1:], node.start_us)
        ends.setdefault(node.lane, []).append(latest)
    return found


def _free_lane(path: Path, node: TraceNode, ends: Mapping[str, Sequence[float]]) -> str:
    """Return the stream of a kernel, or another lane for it where one before it on the stream still ran.

    Kernels of a CUDA graph are all of the stream that launched it, and run beside each other where it has branches.
    """
    for number in range(MOST_BESIDE):
        lane = f"{node.lane}, {number}" if number else node.lane
        if lane not in ends or ends[lane][-1] <= node.start_us + PAUSE_US:
            return lane
    text = f"(value=more than {MOST_BESIDE} at once on stream {node.lane}, allowed=one after another)"
    raise ValueError(f"plan: {path}: {node} needs times behind those before it {text}")


def _node(path: Path, place: int, event: Mapping[str, Any]) -> TraceNode:
    name = str(event.get("name", ""))
    start, duration = event.get("ts"), event.get("dur", 0)
    if not _positive(start) or not _positive(duration):
        text = f"(value=ts {start!r}, dur {duration!r}, allowed=0 or more microseconds)"
        raise ValueError(f"plan: {path}: node {place} {name!r} needs times {text}")
    arguments = _arguments(event)
    lane = str(arguments.get("stream", event.get("tid", "")))
    kind, collective = CATEGORIES[event["cat"]], ""
    nbytes = ranks = 0
    if kind is NodeKind.COMPUTE and name.lower().startswith(("nccl", "rccl")):
        kind = NodeKind.COLLECTIVE
        collective = _collective(str(arguments.get("Collective name", "")) or name)
        nbytes = _input_bytes(arguments)
        ranks = int(arguments["Group size"]) if _positive(arguments.get("Group size")) else 0
    elif kind is NodeKind.MEMORY and _positive(arguments.get("bytes")):
        nbytes = int(arguments["bytes"])
    return TraceNode(place, name, kind, (), float(duration), float(start), False, lane, collective, nbytes, ranks)


def _collective(name: str) -> str:
    """Return the name of a collective; empty where the name tells none, such as send and receive."""
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
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST

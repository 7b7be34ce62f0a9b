"""A recorded step with other ways to communicate: what is exposed and why, and a strategy for each of its operations.

An *operation* is all collectives of a step of one kind, among as many ranks, with as many bytes: in FSDP2 the gathers
of layers, for example. Each can be made by the library, by Sidelane's kernels, by copy engines, or by copy engines
straight into FSDP2's parameters. A step is scheduled with each (``traces/schedule.py``), and the best for the whole
step counts.

On the machine that was recorded the library's times are the recorded ones. Time of a call beyond twice the fastest of
its operation is taken for waiting for peers, which no strategy ends. On another machine all times are the model's, and
computations keep those that were recorded.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.gangs import engine_gangs, gangs_us, library_gangs
from sidelane_lab.model.kernels import own_gang
from sidelane_lab.model.training import BESIDE_COPIES, COMMUNICATING
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode
from sidelane_lab.traces.kineto import HOW, PAUSE_US
from sidelane_lab.traces.schedule import end_us, scheduled

LIBRARY, KERNELS, ENGINES, STRAIGHT = STRATEGIES = "library", "kernels", "copy engines", "straight"
"""Names of strategies; ``straight``: copy engines, and no copies out of FSDP2's buffers."""
MOVED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""Collectives that descriptions of machines have times of."""
COPY_OUT = re.compile("split_with_sizes_copy")
"""Name of FSDP2's copies out of a gathered buffer."""
WAITS_US = 20.0
"""Microseconds after the end of a collective within which a kernel begins that waited for it."""
LAST = "the end of the step"
"""Name of what waits for a collective after which nothing runs."""
MOST_OPERATIONS = 8
"""Operations that are planned one by one at the most: those that take longest."""
BETWEEN, BEFORE, AFTER = "between", "before", "after"
"""Places of pauses of a CUDA graph: between computations, before and after collectives."""
LARGE, LARGE_US = re.compile("gemm|cutlass|nvjet|xmma"), 50.0
"""Names and microseconds of GEMMs that are slower while a step communicates (``model.training.COMMUNICATING``)."""
WORTH = 5e-4
"""Share of a step that another strategy must save."""
NOTHING_US = 1e-3
"""Microseconds of what is left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepOperation:
    """Collectives of a step that are alike.

    Attributes:
        kind: of collective.
        nbytes: bytes as studies count them: gathered, or of a rank's input.
        ranks: number of ranks.
        calls: nodes.
        exposed_us: recorded microseconds in which nothing else ran on the GPU.
        waiting: names of the kernels that began next, the most frequent first; empty where the host was late.
        times_us: microseconds of a call alone, by strategy.
        steps_us: modelled microseconds of the step with this operation alone by another strategy.
    """

    kind: Kind
    nbytes: int
    ranks: int
    calls: tuple[TraceNode, ...]
    exposed_us: float = 0.0
    waiting: tuple[str, ...] = ()
    times_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    steps_us: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def recorded_us(self) -> float:
        """Sum of the recorded durations."""
        return sum(node.duration_us for node in self.calls)


@dataclasses.dataclass(frozen=True)
class TracePlan:
    """A recorded step on a machine, and the best that other strategies make of it.

    Attributes:
        trace: the step.
        machine: on which it is planned.
        is_same: the machine is that of the recording, so that the library's times are the recorded ones.
        operations: of known bytes, the one that takes longest first.
        chosen: strategies by operation, those of the others are the library's.
        library_us: the step with the library on the machine, from its first kernel to the end of its last one.
        modelled_us: the same by the model, from which steps with other strategies are subtracted: a recorded step and
            its model may be some percent apart.
        best_us: ``library_us`` less what the chosen strategies save.
        silent_us: ``library_us`` less what it saves if collectives took no time.
        kept: number of collectives that keep their recorded time, as their bytes or their kind are unknown.
        host_us: microseconds of the recording in which nothing ran, but for the pauses of CUDA graphs.
    """

    trace: TraceGraph
    machine: Machine
    is_same: bool
    operations: tuple[StepOperation, ...]
    chosen: tuple[str, ...]
    library_us: float
    modelled_us: float
    best_us: float
    silent_us: float
    kept: int
    host_us: float

    @property
    def exposed_us(self) -> float:
        """Microseconds by which the step takes longer than without collectives."""
        return self.library_us - self.silent_us

    @property
    def single(self) -> tuple[StepOperation, str, float] | None:
        """The change of one operation that saves most: operation, strategy, microseconds; None: too little."""
        found = [
            (self.modelled_us - us, at, name)
            for at, one in enumerate(self.operations)
            for name, us in one.steps_us.items()
        ]
        saved, at, name = max(found, default=(0.0, 0, ""))
        return (self.operations[at], name, saved) if saved > WORTH * self.modelled_us else None


def plan_trace(
    machine: Machine, trace: TraceGraph, progress: Callable[[str], None] = lambda text: None, *, is_same: bool = True
) -> TracePlan:
    """Find the strategy for each operation of a recorded step.

    Args:
        machine: on which it is planned.
        trace: what one rank ran.
        progress: is called with each operation.
        is_same: it was recorded on this machine.

    Raises:
        ValueError: a step without collectives, or a machine of one GPU.
    """
    require_collectives(trace)
    if machine.world_size < 2:
        raise ValueError(f"plan: --trace needs several GPUs (value={machine.title}, allowed=2 or more)")
    gpu = [node for node in trace.nodes if not node.on_host]
    operations = _operations(machine, trace, gpu)
    step = _Step(machine, trace, operations, is_same=is_same)
    library = (LIBRARY,) * len(operations)
    library_us = step.time_us(library)
    tried: list[StepOperation] = []
    for at, one in enumerate(operations):
        progress(f"{one.kind} of {one.nbytes} bytes")
        others = {name: step.time_us((*library[:at], name, *library[at + 1 :])) for name in one.times_us}
        tried.append(dataclasses.replace(one, steps_us={name: us for name, us in others.items() if name != LIBRARY}))
    chosen = _best(step, operations)
    begin, end = min(node.start_us for node in trace.nodes), end_us(trace.nodes)
    is_recorded = is_same and not any(node.kind is NodeKind.LAUNCH for node in trace.nodes)
    recorded_us = end - begin if is_recorded else library_us
    idle_us = end - begin - _Spans(gpu).covered_us(begin, end)
    known = {node.ident for one in operations for node in one.calls}
    return TracePlan(
        trace,
        machine,
        is_same,
        tuple(tried),
        chosen,
        recorded_us,
        library_us,
        recorded_us + step.time_us(chosen) - library_us,
        recorded_us + step.time_us(None) - library_us,
        sum(node.kind is NodeKind.COLLECTIVE and node.ident not in known and node.duration_us > 0 for node in gpu),
        max(0.0, idle_us - sum(node.duration_us for node in trace.nodes if node.kind is NodeKind.LAUNCH)),
    )


def require_collectives(trace: TraceGraph) -> None:
    """Refuse a step of one GPU, or one without collectives, before anything else is asked for."""
    is_one = trace.ranks == 1
    if is_one or not any(node.kind is NodeKind.COLLECTIVE and not node.on_host for node in trace.nodes):
        why = f"has no collectives in {trace.step}: no kernel's name begins with nccl or rccl"
        raise ValueError(
            f"plan: {trace.source} {'is of one rank, which communicates nothing' if is_one else why}; {HOW}"
        )


def _best(step: _Step, operations: Sequence[StepOperation]) -> tuple[str, ...]:
    """Return the strategy of each operation that is best for the step, the others' given."""
    chosen = (LIBRARY,) * len(operations)
    least_us = WORTH * step.time_us(chosen)
    for _, (at, one) in itertools.product(range(2), enumerate(operations)):
        ways = [(*chosen[:at], name, *chosen[at + 1 :]) for name in one.times_us]
        best = min(ways, key=step.time_us)
        if step.time_us(chosen) - step.time_us(best) > least_us:
            chosen = best
    return chosen


def _kind_of(node: TraceNode) -> Kind | None:
    """Return the collective of a node that the machine's description has a time of."""
    known = node.kind is NodeKind.COLLECTIVE and not node.on_host and node.nbytes and node.collective in MOVED
    return Kind(node.collective) if known else None


def _bytes_of(machine: Machine, node: TraceNode) -> int:
    """Return the bytes of a collective; a gather has as many on a machine of another size: shards are what changes."""
    return node.nbytes * ((node.ranks or machine.world_size) if node.collective == Kind.ALL_GATHER else 1)


def _operations(machine: Machine, trace: TraceGraph, gpu: Sequence[TraceNode]) -> list[StepOperation]:
    """Return the operations of a step, the longest first; of many the smallest are left to the library."""
    alike: dict[tuple[Kind, int, int], list[TraceNode]] = defaultdict(list)
    for node in gpu:
        if (kind := _kind_of(node)) is not None:
            ranks = node.ranks if 1 < node.ranks <= machine.gpus else machine.world_size
            alike[kind, _bytes_of(machine, node), ranks].append(node)
    exposed = _exposed(gpu)
    emptied = {gather.ident for gather in _copies_out(trace).values()}
    found = []
    for (kind, nbytes, ranks), calls in alike.items():
        waiting = [exposed[node.ident][1] for node in calls if exposed[node.ident][1]]
        ordered = tuple(sorted(dict.fromkeys(waiting), key=waiting.count, reverse=True))
        times = call_times(machine, kind, nbytes, ranks)
        if any(node.ident in emptied for node in calls) and not machine.through_host:
            times |= {STRAIGHT: times[ENGINES]}
        exposed_us = sum(exposed[node.ident][0] for node in calls)
        found.append(StepOperation(kind, nbytes, ranks, tuple(calls), exposed_us, ordered, times))
    longest = sorted(found, key=lambda one: -(one.recorded_us or one.times_us[LIBRARY] * len(one.calls)))
    return longest[:MOST_OPERATIONS]


@functools.lru_cache(maxsize=256)
def call_times(machine: Machine, kind: Kind, nbytes: int, ranks: int) -> dict[str, float]:
    """Return the microseconds of a call alone, by strategy, among so many ranks of a machine."""
    if ranks != machine.world_size:
        machine = dataclasses.replace(machine, nodes=1, gpus=ranks)
    found = {LIBRARY: gangs_us(machine, library_gangs(machine, kind, nbytes))}
    if machine.kernels is not None and machine.nodes == 1:
        found[KERNELS] = own_gang(machine, kind, nbytes, captured=True).alone_us
    return found | {ENGINES: gangs_us(machine, engine_gangs(machine, kind, nbytes))}


def _copies_out(trace: TraceGraph) -> dict[int, TraceNode]:
    """Return the gather that ended last before each copy out of its buffer, by the number of the copy."""
    gathers = [node for node in trace.nodes if _kind_of(node) is Kind.ALL_GATHER]
    found = {}
    for copy in (node for node in trace.nodes if COPY_OUT.search(node.name) and not node.on_host):
        before = [node for node in gathers if node.start_us + node.duration_us <= copy.start_us + 1]
        if before:
            found[copy.ident] = max(before, key=lambda node: node.start_us + node.duration_us)
    return found


class _Spans:
    """Times at which some nodes run, for questions about what runs beside another one."""

    def __init__(self, nodes: Iterable[TraceNode]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.start_us)
        self._begins = [node.start_us for node in self.nodes]
        self._reached = list(itertools.accumulate((n.start_us + n.duration_us for n in self.nodes), max))

    def covered_us(self, begin: float, end: float) -> float:
        """Return for how long one of them runs between two times."""
        covered, until = 0.0, begin
        for at in range(bisect.bisect_right(self._reached, begin), bisect.bisect_left(self._begins, end)):
            node = self.nodes[at]
            first, last = max(node.start_us, until), min(node.start_us + node.duration_us, end)
            if last > first:
                covered, until = covered + last - first, last
        return covered

    def following(self, end: float) -> TraceNode | None:
        """Return the first of them that begins at a time or after it."""
        at = bisect.bisect_left(self._begins, end)
        return self.nodes[at] if at < len(self.nodes) else None


def _exposed(gpu: Sequence[TraceNode]) -> dict[int, tuple[float, str]]:
    """Return for each collective the time in which nothing else ran, and the name of the kernel that waited."""
    other = _Spans(node for node in gpu if node.kind is not NodeKind.COLLECTIVE)
    found = {}
    for node in (node for node in gpu if node.kind is NodeKind.COLLECTIVE):
        end = node.start_us + node.duration_us
        following = other.following(end)
        exposed, name = node.duration_us - other.covered_us(node.start_us, end), LAST
        if following is not None:
            name = following.name if following.start_us - end < WAITS_US else ""
        found[node.ident] = exposed, name
    return found


def _pauses_beside(trace: TraceGraph) -> dict[int, int]:
    """Return the collective before or after each pause of a graph that has one there, by the pause's number."""
    calls = {node.ident: node for node in trace.nodes if node.kind is NodeKind.COLLECTIVE}
    pauses = {node.ident: node for node in trace.nodes if node.kind is NodeKind.LAUNCH}
    found = {ident: call.ident for call in calls.values() for ident in call.after if ident in pauses}
    for pause in pauses.values():
        for call in (calls[ident] for ident in pause.after if ident in calls):
            if abs(call.start_us + call.duration_us - pause.start_us) < PAUSE_US:
                found[pause.ident] = call.ident
    return found


class _Step:
    """A step that is scheduled again and again, with strategies for its operations.

    Args:
        machine: on which it runs.
        trace: what one rank ran.
        operations: those whose strategies may differ.
        is_same: it was recorded on this machine.
    """

    def __init__(
        self, machine: Machine, trace: TraceGraph, operations: Sequence[StepOperation], *, is_same: bool
    ) -> None:
        self._is_same = is_same
        self._machine, self._trace, self._operations = machine, trace, operations
        self._of = {node.ident: at for at, one in enumerate(operations) for node in one.calls}
        self._copies = _copies_out(trace)
        self._slower = self._recorded_slowdown()
        self._beside_call = _pauses_beside(trace)
        pauses: dict[str, list[float]] = {BETWEEN: [], BEFORE: [], AFTER: []}
        for node in (node for node in trace.nodes if node.kind is NodeKind.LAUNCH):
            pauses[self._place_of(node)].append(node.duration_us)
        self._usual_us = {place: statistics.median(us or [0.0]) for place, us in pauses.items()}
        self._known: dict[tuple[str, ...] | None, float] = {}
        last: dict[str, int] = {}
        nodes = []
        for node in trace.nodes:
            moving = node.kind is NodeKind.COLLECTIVE and not node.lane
            lane = f"{'host' if node.on_host else 'network' if moving else 'GPU'} {node.lane}"
            after = (*node.after, last[lane]) if lane in last else node.after
            last[lane] = node.ident
            us = self._computation_us(node)
            nodes.append(dataclasses.replace(node, duration_us=us, lane=lane, after=tuple(dict.fromkeys(after))))
        self._nodes = nodes

    def time_us(self, chosen: tuple[str, ...] | None) -> float:
        """Return the time of the step with a strategy for each operation; None: if collectives took no time."""
        if chosen not in self._known:
            nodes, slower = [], {}
            for node in self._nodes:
                if node.kind is NodeKind.COLLECTIVE:
                    strategy = LIBRARY if chosen is None or node.ident not in self._of else chosen[self._of[node.ident]]
                    us = 0.0 if chosen is None else self._collective_us(node, strategy)
                    node = dataclasses.replace(node, duration_us=us)
                    slower[node.ident] = self._slower[strategy]
                elif node.ident in self._beside_call and (chosen is None or self._is_by_kernel(node, chosen)):
                    node = dataclasses.replace(node, duration_us=self._usual_us[BETWEEN])
                elif chosen is None and node.duration_us > LARGE_US and LARGE.search(node.name):
                    node = dataclasses.replace(node, duration_us=node.duration_us / (1 + COMMUNICATING))
                elif node.ident in self._copies and chosen is not None:
                    at = self._of.get(self._copies[node.ident].ident)
                    if at is not None and chosen[at] == STRAIGHT:
                        node = dataclasses.replace(node, duration_us=NOTHING_US)
                nodes.append(node)
            self._known[chosen] = end_us(scheduled(nodes, slower=slower))
        return self._known[chosen]

    def _place_of(self, pause: TraceNode) -> str:
        """Return where a pause of a graph is: before or after a collective, or between other kernels."""
        call = self._beside_call.get(pause.ident)
        return BETWEEN if call is None else AFTER if call in pause.after else BEFORE

    def _is_by_kernel(self, pause: TraceNode, chosen: tuple[str, ...]) -> bool:
        """Return True if a pause of a graph is before or after a call by Sidelane's kernels, which change no stream."""
        at = self._of.get(self._beside_call[pause.ident])
        return at is not None and chosen[at] == KERNELS

    def _computation_us(self, node: TraceNode) -> float:
        if node.kind is NodeKind.LAUNCH:  # what is longer than usual is the profiler's
            return min(node.duration_us, self._usual_us[self._place_of(node)])
        lost = 1 - 1 / (1 + self._slower[LIBRARY])
        return node.calm_us or node.duration_us - lost * self._beside_us.get(node.ident, 0.0)

    def _collective_us(self, node: TraceNode, strategy: str) -> float:
        """Return the time of a call; ``node`` has its recorded duration."""
        if node.ident not in self._of:
            kind = _kind_of(node)
            if kind is None or self._is_same:
                return node.duration_us
            machine = self._machine
            return call_times(machine, kind, _bytes_of(machine, node), machine.world_size)[LIBRARY]
        operation = self._operations[self._of[node.ident]]
        times, recorded = operation.times_us, node.duration_us
        if not self._is_same or not recorded:
            return times[strategy]
        if strategy == LIBRARY:
            return recorded
        if strategy == KERNELS:  # a launch and what runs beside it cost it as much
            return max(recorded - times[LIBRARY] + times[KERNELS], times[KERNELS] / 2)
        waited = recorded - 2 * min(call.duration_us for call in operation.calls)
        return times[strategy] + max(0.0, waited)

    def _recorded_slowdown(self) -> dict[str, float]:
        """Return the share by which computations take longer beside a collective of each strategy."""
        machine, units = self._machine, float(self._machine.gpu.units)
        moving = _Spans(n for n in self._trace.nodes if n.kind is NodeKind.COLLECTIVE and not n.on_host)
        self._beside_us = {
            node.ident: moving.covered_us(node.start_us, node.start_us + node.duration_us)
            for node in self._trace.nodes
            if node.kind is NodeKind.COMPUTE and not node.on_host
        }
        calmed = [node for node in self._trace.nodes if node.calm_us]
        covered = sum(self._beside_us[node.ident] for node in calmed)
        calm = covered + sum(node.calm_us - node.duration_us for node in calmed)
        recorded = covered / calm - 1 if 0 < calm < covered else float(machine.library.default_units) / units
        copies = max(BESIDE_COPIES, float(machine.interference.copies))
        own = float(machine.kernels.need) / units if machine.kernels is not None else 0.0
        return {LIBRARY: recorded, KERNELS: max(own, copies), ENGINES: copies, STRAIGHT: copies}

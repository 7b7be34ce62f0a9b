"""A trace of one rank on a described machine, under a strategy of C3: collectives beside what the trace computes.

    host        nodes of the CPU: one after another on each thread, with their recorded times
    GPU         computations: one after another on each stream, with their recorded times, or by their operations and
                bytes where none was recorded
    collectives one after another, in the machine's time for their bytes: library kernels, or copy engines

Every rank is taken to do the same at the same time, so that no collective waits for a peer. A computation that has its
recorded time competes for compute units in waves (``WAVE_US``). It competes for memory only where its bytes are known.
Times that were recorded beside a collective already hold what it slowed them down.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from sidelane.c3.strategies import Mover, Order, Strategy, named
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import DeviceRun, Gang, Tiled, run_device
from sidelane_lab.model.gangs import engine_gangs, gangs_us, library_gangs, named_gangs
from sidelane_lab.model.kernels import own_gang
from sidelane_lab.model.strategies import objection, partitions, predictable
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode

MOVED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""Collectives that descriptions of machines have times of."""
LEAST_WAVES, MOST_WAVES, WAVE_US = 8, 64, 50.0
"""Numbers of waves in which a recorded computation has its workgroups, and microseconds of a wave between the two.
Beside a collective's kernel a computation takes whole waves more: with 8 of them a tenth of the units costs an eighth
of its time, and with the 4 of the model of training steps a quarter. A trace does not tell the true number."""
NOTHING_US = 1e-6
"""Microseconds of a node without a duration."""
HOST, COMPUTATION, COMMUNICATION = CLASSES = "host", "computation", "communication"
"""Names of the parts of a critical path."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A replayed trace under one strategy.

    Attributes:
        strategy: name of the strategy.
        units: compute units of the collectives alone where the strategy sets some aside, else 0.
        time_us: microseconds of the whole.
        compute_us: microseconds of the whole if collectives took no time.
        communication_us: sum of the microseconds of the collectives, each alone.
        critical_us: microseconds of the critical path by class; they add up to ``time_us``.
        path: nodes of the critical path, the first one first.
        nodes: every node with its begin and its duration in this run.
    """

    strategy: str
    units: int
    time_us: float
    compute_us: float
    communication_us: float
    critical_us: dict[str, float]
    path: tuple[TraceNode, ...]
    nodes: tuple[TraceNode, ...]

    @property
    def exposed_us(self) -> float:
        """Microseconds that communication adds."""
        return self.time_us - self.compute_us


def replay(machine: Machine, trace: TraceGraph, strategies: Sequence[Strategy | str]) -> list[Replay]:
    """Run a trace under each strategy.

    Args:
        machine: described; all of its GPUs take part in every collective.
        trace: what one rank ran.
        strategies: values, or their names.

    Raises:
        ValueError: a strategy that :func:`refusal` speaks against, or a node that is not modelled; the
            message names the node. Nothing has run by then.
    """
    chosen = [named(one) if isinstance(one, str) else one for one in strategies]
    for strategy in chosen:
        if reason := refusal(strategy, machine):
            allowed = ", ".join(one.name for one in replayable(machine))
            raise ValueError(f"replay: strategy (value={strategy.name!r}: {reason}, allowed={allowed})")
    for node in trace.nodes:
        _require_modelled(trace, node)
    silent = _Kernels(machine, trace, None, 0)
    compute_us = run_device(machine, silent.listed).time_us
    return [_replayed(machine, trace, strategy, compute_us) for strategy in chosen]


def refusal(strategy: Strategy, machine: Machine) -> str:
    """Return why a trace is not replayed under a strategy; empty where it is."""
    if not strategy.mover.makes_whole_call:
        return "not replayed: it makes another call than the trace"
    if strategy.partition is not None and strategy.partition.memory_bound_only:
        return "not replayed: a trace does not tell which kernels are limited by memory"
    return objection(strategy, machine)


def replayable(machine: Machine) -> list[Strategy]:
    """Return the strategies under which traces are replayed on a machine."""
    return [one for one in predictable(machine) if not refusal(one, machine)]


def _require_modelled(trace: TraceGraph, node: TraceNode) -> None:
    """Refuse a node of the GPU whose time nothing tells."""
    if node.on_host or node.kind in (NodeKind.MARK, NodeKind.COMPUTE, NodeKind.MEMORY):
        return
    if node.kind is not NodeKind.COLLECTIVE:
        needs = "the trace of its peer, which is not read (allowed=collectives)"
    elif node.duration_us or _kind_of(node) is not None or node.collective == "barrier":
        return
    else:
        needs = f"a duration, or bytes (value={node.collective or 'no comm_type'}, allowed without: {', '.join(MOVED)})"
    raise ValueError(f"replay: {trace.source}: {node} is a {node.kind} that needs {needs}")


def kept_collectives(trace: TraceGraph) -> int:
    """Return the number of collectives that keep their recorded time, since their bytes or their kind are unknown."""
    gpu = (node for node in trace.nodes if node.kind is NodeKind.COLLECTIVE and not node.on_host)
    return sum(1 for node in gpu if node.duration_us and _kind_of(node) is None)


def _kind_of(node: TraceNode) -> Kind | None:
    """Return the collective of a node that the machine's description has a time of."""
    if node.kind is not NodeKind.COLLECTIVE or node.on_host or not node.nbytes or node.collective not in MOVED:
        return None
    return Kind(node.collective)


def _replayed(machine: Machine, trace: TraceGraph, strategy: Strategy, compute_us: float) -> Replay:
    swept = [0] if strategy.partition is None else partitions(machine)
    made = [_Kernels(machine, trace, strategy, units) for units in swept]
    runs = [run_device(machine, kernels.listed) for kernels in made]
    best = min(range(len(runs)), key=lambda place: runs[place].time_us)
    kernels, run = made[best], runs[best]
    critical, path = kernels.critical(run)
    return Replay(
        strategy.name,
        kernels.units,
        run.time_us,
        compute_us,
        kernels.communication_us,
        critical,
        path,
        kernels.ran(run),
    )


class _Kernels:
    """The kernels of a trace under a strategy; None: collectives take no time.

    A node's last kernel has the node's number as its name.
    """

    def __init__(self, machine: Machine, trace: TraceGraph, strategy: Strategy | None, units: int) -> None:
        self.machine, self.trace, self.strategy, self.units = machine, trace, strategy, units
        self.limit = int(machine.gpu.units) - units if units else None
        self.classes: dict[str, str] = {}
        self.begins: dict[int, str] = {}
        self.communication_us = 0.0
        self.made: dict[tuple[Kind, int], tuple[tuple[Gang, ...], float]] = {}
        lanes: dict[str, str] = {}
        compute: list[Tiled | Gang] = []
        collectives: list[Tiled | Gang] = []
        for node in trace.nodes:
            name, lane = str(node.ident), self._lane(node)
            behind = tuple(dict.fromkeys((*map(str, node.after), *([lanes[lane]] if lane in lanes else []))))
            lanes[lane] = name
            on_gpu = COMMUNICATION if node.kind is NodeKind.COLLECTIVE else COMPUTATION
            kernels = self._kernels_of(node, behind)
            (collectives if on_gpu is COMMUNICATION else compute).extend(kernels)
            self.classes[name] = HOST if node.on_host or node.kind is NodeKind.MARK else on_gpu
            self.begins[node.ident] = kernels[0].name
        first = strategy is not None and strategy.order is Order.COLLECTIVE_FIRST
        self.listed = [*collectives, *compute] if first else [*compute, *collectives]

    def _lane(self, node: TraceNode) -> str:
        """Return the name of what runs one node after another: a node follows the one before it on its lane."""
        if node.on_host or node.kind is NodeKind.MARK:
            return f"host {node.lane}"
        if self.strategy is not None and not self.strategy.concurrent:
            return "GPU"
        return COMMUNICATION if node.kind is NodeKind.COLLECTIVE else f"stream {node.lane}"

    def _kernels_of(self, node: TraceNode, behind: tuple[str, ...]) -> Sequence[Tiled | Gang]:
        name = str(node.ident)
        if node.on_host or node.kind is NodeKind.MARK:
            return [Gang(name, max(node.duration_us, NOTHING_US), 0.0, after=behind)]
        if node.kind is NodeKind.COLLECTIVE:
            return named_gangs(self._collective(node), name, behind)
        if node.kind is NodeKind.MEMORY:
            local_gbps = float(self.machine.dma.local_gbps)
            took_us = max(node.duration_us or node.nbytes / local_gbps / 1e3, NOTHING_US)
            return [Gang(name, took_us, 2 * node.nbytes / took_us / 1e3, after=behind)]
        return [dataclasses.replace(self._computation(node), after=behind)]

    def _computation(self, node: TraceNode) -> Tiled | Gang:
        gpu, matmul = self.machine.gpu, self.machine.matmul
        by_flops = node.flops / (gpu.peak_tflops * matmul.efficiency * 1e6)
        by_bytes = node.nbytes / (gpu.memory_gbps * matmul.memory_efficiency * 1e3)
        whole_us = node.duration_us or max(by_flops, by_bytes)
        if not whole_us:
            return Gang(str(node.ident), NOTHING_US, 0.0)
        units = int(gpu.units)
        usable = self.limit or units
        waves = min(max(LEAST_WAVES, math.ceil(whole_us / WAVE_US)), MOST_WAVES)
        time_us, traffic = whole_us / waves * units / usable, node.nbytes / usable / waves
        return Tiled(str(node.ident), waves * usable, time_us, traffic, limit=self.limit)

    def _collective(self, node: TraceNode) -> tuple[Gang, ...]:
        kind = _kind_of(node)
        if self.strategy is None or (kind is None and not node.duration_us):
            return (Gang(str(node.ident), NOTHING_US, 0.0),)
        if kind is None:  # the library's, with its recorded time
            self.communication_us += node.duration_us
            units = int(self.machine.library.default_units)
            gang = Gang(str(node.ident), node.duration_us, 0.0, units, units, priority=self.strategy.priority)
            return (gang,)
        # A gather has as many bytes on a machine of another size: shards are what changes.
        nbytes = node.nbytes * ((node.ranks or self.machine.world_size) if kind is Kind.ALL_GATHER else 1)
        if (kind, nbytes) not in self.made:
            gangs = self._gangs(kind, nbytes)
            self.made[kind, nbytes] = gangs, gangs_us(self.machine, gangs)
        gangs, alone_us = self.made[kind, nbytes]
        self.communication_us += alone_us
        return gangs

    def _gangs(self, kind: Kind, nbytes: int) -> tuple[Gang, ...]:
        assert self.strategy is not None
        if not self.strategy.mover.takes_units:
            return engine_gangs(self.machine, kind, nbytes)
        own, priority = self.units or None, self.strategy.priority
        if self.strategy.mover is Mover.SM:
            return (own_gang(self.machine, kind, nbytes, units=own, reserved=bool(own), priority=priority),)
        return library_gangs(self.machine, kind, nbytes, units=own, reserved=bool(own), priority=priority)

    def critical(self, run: DeviceRun) -> tuple[dict[str, float], tuple[TraceNode, ...]]:
        """Return the critical path: from the kernel that ends last to the one it waited for longest, and so on."""
        kernels = {kernel.name: kernel for kernel in self.listed}
        nodes = {str(node.ident): node for node in self.trace.nodes}
        found = dict.fromkeys(CLASSES, 0.0)
        path: list[TraceNode] = []
        name = max(run.ended_us, key=lambda one: run.ended_us[one])
        while name:
            before = max(kernels[name].after, key=lambda one: run.ended_us[one], default="")
            owner = name.partition(" ")[0]
            found[self.classes[owner]] += run.ended_us[name] - (run.ended_us[before] if before else 0.0)
            if not path or path[-1] is not nodes[owner]:
                path.append(nodes[owner])
            name = before
        return found, tuple(reversed(path))

    def ran(self, run: DeviceRun) -> tuple[TraceNode, ...]:
        """Return the nodes with their begins and durations in a run."""
        found = []
        for node in self.trace.nodes:
            began = run.began_us[self.begins[node.ident]]
            took = run.ended_us[str(node.ident)] - began
            found.append(dataclasses.replace(node, start_us=began, duration_us=took))
        return tuple(found)

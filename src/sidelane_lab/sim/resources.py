"""The resources of a machine as numbers, and which of them a command uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sidelane.program.caching import Once
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import MOVES, Broadcast, Copy, Engine, EngineKind, Move, Program, Reduce, Swap, spans
from sidelane_lab.machines.network import NetworkRoute, way_between
from sidelane_lab.machines.spec import Machine
from sidelane_lab.sim.fold import Fold

BYTES_PER_US = 1e3
"""Bytes a microsecond in 1 GB/s."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a command on a machine.

    Attributes:
        nbytes: of progress, counted at the source.
        weights: bytes of each resource that one of these takes.
        latency_us: beyond the engine's own, where the bytes leave the node.
        commands: commands that this stands for: moves of neighbouring bytes, one right after another.
    """

    nbytes: float
    weights: Mapping[int, float]
    latency_us: float
    commands: int = 1


class Resources:
    """Capacities, made on first use, of everything that a program's bytes pass.

    Args:
        machine: gives the capacities.
        program: its queues decide how engines are shared.
        fold: ranks that stand for all others; None: all are there.
    """

    def __init__(self, machine: Machine, program: Program, fold: Fold | None = None) -> None:
        self._fold = fold
        self.capacities: list[float] = []
        self.names: list[str] = []
        self._machine = machine
        self._index: dict[tuple[object, ...], int] = {}
        self._routes: dict[tuple[int, int], NetworkRoute] = {}
        self._orders = _orders_once(program)

    def demand(self, command: Move | Reduce, rank: int, engine: Engine, link_share: float = 1.0) -> Demand:
        """Return the demand of a command of a queue; ``link_share``: share of a link's bandwidth that it reaches."""
        weights: dict[int, float] = {}
        self._per_link = 1.0 / link_share
        match command:
            case Copy(dst, src):
                self._carry(weights, src, dst)
            case Broadcast(dsts, src):
                self._carry(weights, src, dsts[0])
                self._carry(weights, src, dsts[1])
                weights[self._memory(src.rank)] -= 1.0  # the source is read once (DMA collectives paper, 6.2)
            case Swap(a, src):
                self._carry(weights, a, src)
                self._carry(weights, src, a)
            case Reduce(dst, srcs) if engine.kind is EngineKind.DMA:
                # An engine that adds reads every operand and writes the sum: by links, from its memory and to it.
                for src in srcs:
                    self._carry(weights, src, dst)
                    self._add(weights, self._adder(rank, engine), 1.0)
                weights[self._memory(dst.rank)] -= len(srcs) - 1.0  # the sum is written once
                self._add(weights, self._engine(rank, engine), 1.0)
                return Demand(float(dst.nbytes), weights, self._latency_us(command))
            case Reduce(dst, srcs):
                # A kernel on a few compute units: they and the memory hold it.
                for span in (dst, *srcs):
                    if self._is_in_host(span):
                        self._pass_host(weights, rank, "out" if span is dst else "in")
                    else:
                        self._add(weights, self._memory(span.rank), 1.0)
                    self._add(weights, self._of(("reduction", rank), self._machine.dma.reduce_gbps), 1.0)
                return Demand(float(dst.nbytes), weights, 0.0)
            case _:
                raise ValueError(f"simulate: command (value={command!r}, allowed=copy, broadcast, swap, reduce)")
        if engine.kind is not EngineKind.COMPUTE:
            written = 2.0 if isinstance(command, Broadcast | Swap) else 1.0
            inside = len({span.rank for span in spans(command)}) == 1 and not any(map(self._is_in_host, spans(command)))
            if isinstance(command, Swap) and not inside:
                written = float(self._machine.dma.swap_bytes)
            self._add(weights, self._local(rank) if inside else self._engine(rank, engine), written)
        return Demand(float(src.nbytes), weights, self._latency_us(command))

    def _is_in_host(self, span: Span) -> bool:
        return self._machine.through_host and span.buffer == Buffer.STAGING

    def _pass_host(self, weights: dict[int, float], rank: int, direction: str) -> None:
        """Add what a byte takes between a GPU and host memory; ``direction``: ``out`` of the GPU, or ``in``."""
        host = self._machine.host
        assert host is not None
        root = rank // int(host.root_gpus)
        for key, gbps in (
            ((f"PCIe {direction}", rank), host.gpu_gbps),
            (("PCIe", rank), host.duplex_gbps),
            ((f"root {direction}", root), host.root_gbps),
            (("host memory",), host.memory_gbps),
        ):
            self._add(weights, self._of(key, gbps), 1.0)

    def _carry(self, weights: dict[int, float], src: Span, dst: Span) -> None:
        for span, other, direction in ((src, dst, "in"), (dst, src, "out")):
            if self._is_in_host(span):
                self._pass_host(weights, other.rank, direction)
                if not self._is_in_host(other):
                    self._add(weights, self._memory(other.rank), 1.0)
                return
        if self._machine.through_host and src.rank != dst.rank:  # as pieces would go, one behind the other
            self._pass_host(weights, src.rank, "out")
            self._pass_host(weights, dst.rank, "in")
        self._add(weights, self._memory(src.rank), 1.0)
        self._add(weights, self._memory(dst.rank), 1.0)
        if src.rank == dst.rank:
            return
        is_inside = self._machine.node_of(src.rank) == self._machine.node_of(dst.rank)
        for key, gbps in self._route(src.rank, dst.rank).passes:
            self._add(weights, self._of(key, gbps), self._per_link if is_inside else 1.0)

    def _adder(self, rank: int, engine: Engine) -> int:
        dma = self._machine.dma
        if not dma.add_gbps:
            raise ValueError(
                f"simulate: dma.add_gbps (value=0, allowed=above 0 for this program): {self._machine.name}"
            )
        return self._of(("adder", rank, engine.index % max(1, int(dma.engines))), dma.add_gbps)

    def _latency_us(self, command: Move | Reduce) -> float:
        """Return the latency of the longest way that bytes of a command take between nodes; 0 inside of one."""
        if self._machine.nodes == 1:
            return 0.0
        ranks, node_of = [span.rank for span in spans(command)], self._machine.node_of
        pairs = {(a, b) for a in ranks for b in ranks if node_of(a) != node_of(b)}
        return max((self._route(a, b).latency_us for a, b in pairs), default=0.0)

    def _route(self, source: int, target: int) -> NetworkRoute:
        pair = source, target
        if pair not in self._routes:
            self._routes[pair] = way_between(self._machine, source, target, self._machine.links.usable_gbps)
        return self._routes[pair]

    def _memory(self, rank: int) -> int:
        return self._of(("memory", rank), self._machine.gpu.memory_gbps)

    def _local(self, rank: int) -> int:
        return self._of(("local engine", rank), self._machine.dma.local_gbps)

    def _engine(self, rank: int, engine: Engine) -> int:
        dma = self._machine.dma
        engines = max(1, int(dma.engines))
        undisturbed = self._orders.get(rank, 0) <= engines
        gbps = dma.engine_gbps * (1.0 if undisturbed else dma.shared_queues)
        return self._of(("engine", rank, engine.index % engines), gbps)

    @staticmethod
    def _add(weights: dict[int, float], resource: int, weight: float) -> None:
        weights[resource] = weights.get(resource, 0.0) + weight

    def _of(self, key: tuple[object, ...], gbps: float) -> int:
        index = self._index.get(key)
        if index is None and self._fold is not None and (stands := self._fold.resource(key)) != key:
            index = self._index[key] = self._of(stands, gbps)
        if index is None:
            index = self._index[key] = len(self.capacities)
            self.capacities.append(gbps * BYTES_PER_US)
            self.names.append(" ".join(map(str, key)))
        return index


def _orders(program: Program) -> Mapping[int, int]:
    """Return how many orders of peers the engines of each rank have.

    Queues that serve the same peers in the same order do not disturb each other: those of ``striped``.
    """
    found: dict[int, set[tuple[frozenset[int], ...]]] = {}
    for queue in program.queues:
        served = tuple(frozenset(s.rank for s in spans(c)) for c in queue.commands if isinstance(c, MOVES))
        if queue.engine.kind is EngineKind.DMA and served:
            found.setdefault(queue.rank, set()).add(served)
    return {rank: len(orders) for rank, orders in found.items()}


_orders_once = Once(_orders)

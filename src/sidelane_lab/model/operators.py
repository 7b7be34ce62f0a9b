"""Three operators, fused and not (fused operators paper, section III): what their kernels are on a machine.

    embedding + all-to-all   a workgroup pools the rows of a bag      gathers
    GEMV + all-reduce        a workgroup has some rows of the weight  streams
    GEMM + all-to-all        a workgroup computes a tile              operations

Unfused, a computation's kernels end before the library's collective begins. Both are the same work by the same
workgroups; what differs is what the docstrings here say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from sidelane.c3.workload import Gemm
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine, Topology
from sidelane_lab.model.fused import FusedKernel, FusedRun, Work, run_fused
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.gemm_operators import (
    DispatchGemm,
    GatherGemm,
    GemmReduce,
    check_counts,
    check_sizes,
    tile_us,
)
from sidelane_lab.model.norm_operator import AllReduceNorm
from sidelane_lab.model.published import library_us
from sidelane_lab.model.workgroups import fused_figures, gather_gbps, resident, stream_gbps

REMOTE_FIRST, OBLIVIOUS = "remote_first", "oblivious"
ORDERS = (REMOTE_FIRST, OBLIVIOUS)
"""What a rank computes first: what its peers wait for, or what belongs to the lowest rank."""

GEMV_ROWS = 16
"""Of the weight, a workgroup."""
TILE = 128
"""Rows and columns of the result that a workgroup of a generic GEMM computes."""


WARP, BAG_WARPS = 32, 8192
"""Elements of a row that a warp of PyTorch's embedding bags sums up, and warps of its grid: 1024 blocks of 8 at any
size (ATen, EmbeddingBag.cu)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """``tables`` embedding bags on every rank for a ``batch`` of all ranks' samples; each gets those of its own.

    Unfused, every table is a kernel, as in DLRM: a small batch leaves units idle, and each kernel is launched.

    Attributes:
        pooling: rows of a bag.
        dim, element_bytes: of a row; the paper's: 256 (section IV), float32.
        slice_bags: that travel together over a network.
        at_once: unfused, one kernel pools all tables.
    """

    batch: int
    tables: int
    pooling: int
    dim: int = 256
    element_bytes: int = 4
    slice_bags: int = 32
    at_once: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)

    name = "embedding_all_to_all"
    kind = Kind.ALL_TO_ALL

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tables} tables a rank, pooling {self.pooling}, dim {self.dim}"

    @property
    def row_bytes(self) -> int:
        """Of a bag's result, too."""
        return self.dim * self.element_bytes

    def works(self, ranks: int) -> list[Work]:
        """By the rank that gets them."""
        return [
            Work(math.ceil(self.batch / ranks) * self.tables, ((to, float(self.row_bytes)),)) for to in range(ranks)
        ]

    def kernel(self, machine: Machine, occupancy: float) -> FusedKernel:
        """The fused one, without its work."""
        return FusedKernel((), resident(machine, occupancy), self._round_us(machine), self.slice_bags)

    def compute_us(self, machine: Machine) -> float:
        """All tables, one after another or at once."""
        kernels = 1 if self.at_once else self.tables
        bags = self.batch * self.tables // kernels
        one = _waves_us(bags, resident(machine), self._round_us(machine))
        fused = fused_figures(machine)
        rounds = math.ceil(bags * math.ceil(self.dim / WARP) / BAG_WARPS)  # a warp has a part of a bag at a time
        one = max(one, rounds * (self.pooling * fused.bag_row_us + fused.bag_us))
        return kernels * float(one + machine.matmul.launch_us)

    def collective_bytes(self) -> float:
        """Of a rank's buffer."""
        return float(self.batch * self.tables * self.row_bytes)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: results; tables may be of any size."""
        return self.collective_bytes()

    def _round_us(self, machine: Machine) -> Callable[[int], float]:
        nbytes = (self.pooling + 1) * self.row_bytes  # read, and the result written
        return lambda workgroups: workgroups * nbytes / (gather_gbps(machine, workgroups) * 1e3)


@dataclasses.dataclass(frozen=True, slots=True)
class Gemv:
    """A weight of ``rows`` x ``columns``, its columns spread over the ranks, for a few ``tokens``; ranks add up.

    Each rank adds up its share of the rows and sends it to all: two phases. Unfused: the same workgroups, which end
    before the library's all-reduce begins.
    """

    rows: int
    columns: int
    tokens: int = 1
    element_bytes: int = 2

    def __post_init__(self) -> None:
        check_sizes(self)

    name = "gemv_all_reduce"
    kind = Kind.ALL_REDUCE

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, {self.tokens} tokens"

    def works(self, ranks: int) -> list[Work]:
        """By the rank that adds them up."""
        count = math.ceil(self.rows / ranks / GEMV_ROWS)
        sent = float(self.rows / ranks / count * self.tokens * self.element_bytes)
        return [Work(count, ((to, sent),)) for to in range(ranks)]

    def kernel(self, machine: Machine, occupancy: float) -> FusedKernel:
        """The fused one, without its work."""
        ranks = machine.world_size
        part = self.rows / ranks * self.tokens * self.element_bytes
        held = resident(machine, occupancy)
        adding_us = (ranks + 1) * part / (stream_gbps(machine, held) * 1e3)
        return FusedKernel((), held, self._round_us(machine), reduce_us=adding_us, result_bytes=part)

    def compute_us(self, machine: Machine) -> float:
        """One kernel."""
        count = math.ceil(self.rows / GEMV_ROWS)
        return float(machine.matmul.launch_us) + _waves_us(count, resident(machine), self._round_us(machine))

    def collective_bytes(self) -> float:
        """Of a rank's buffer."""
        return float(self.rows * self.tokens * self.element_bytes)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: its columns of the weight."""
        return self.rows * self.columns / ranks * self.element_bytes + self.collective_bytes()

    def _round_us(self, machine: Machine) -> Callable[[int], float]:
        nbytes = GEMV_ROWS * self.columns / machine.world_size * self.element_bytes
        return lambda workgroups: workgroups * nbytes / (stream_gbps(machine, workgroups) * 1e3)


@dataclasses.dataclass(frozen=True, slots=True)
class TiledGemm:
    """``rows`` x ``depth`` times ``depth`` x ``columns`` on every rank; the rows of the result go to all.

    Attributes:
        counts: rows from rank i to rank j in row i, column j; none: as many to each.
        copies: ranks that get each row; with several, every tile has some for all.
        by_library: unfused, the GEMM is the vendor library's; False: the generic kernel that is fused as well.
    """

    rows: int
    depth: int
    columns: int
    copies: int = 1
    by_library: bool = True
    element_bytes: int = 2
    counts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.counts:
            check_counts(self.name, self.counts, self.rows)
            if self.copies > 1:
                raise ValueError(f"gemm_all_to_all: counts (value={self.copies} copies, allowed=1)")

    name = "gemm_all_to_all"
    kind = Kind.ALL_TO_ALL

    def __str__(self) -> str:
        copies = f", each to {self.copies}" if self.copies > 1 else ""
        evenly = "half for one peer" if self.counts else f"rows to all evenly{copies}"
        return f"{self.rows}x{self.depth}x{self.columns} a rank, {evenly}"

    @property
    def row_bytes(self) -> int:
        """Of a row that travels."""
        return self.columns * self.element_bytes

    def works(self, ranks: int) -> list[Work]:
        """By the rank that gets them, or one for all."""
        tile_bytes = float(self.rows * self.columns * self.element_bytes / self._tiles)
        if self.copies > 1:
            share = self.copies / ranks
            return [Work(self._tiles, tuple((to, share * tile_bytes) for to in range(ranks)))]
        each, more = divmod(self._tiles, ranks)
        counts = [each + (to < more) for to in range(ranks)]
        even = float(self.rows * self.columns * self.element_bytes / ranks)
        return [Work(count, ((to, even / count),)) for to, count in enumerate(counts) if count]

    def works_of(self, rank: int) -> list[Work]:
        """Of a rank, by the rank that gets them, where ``counts`` says how many rows; no tile is for two."""
        wide = math.ceil(self.columns / TILE)
        found = []
        for to, rows in enumerate(self.counts[rank]):
            tiles = math.ceil(rows / TILE) * wide
            found.append(Work(tiles, ((to, rows * self.row_bytes / max(1, tiles)),)))
        return found

    def kernel(self, machine: Machine, occupancy: float) -> FusedKernel:
        """The fused one, without its work: a tile a unit at a time."""
        units = max(1, int(machine.gpu.units * occupancy))
        return FusedKernel((), units, self._round_us(machine))

    def compute_us(self, machine: Machine) -> float:
        """One kernel."""
        if self.by_library:
            return gemm_us(machine, Gemm(self.rows, self.columns, self.depth))
        tiles = _waves_us(self._tiles, int(machine.gpu.units), self._round_us(machine))
        return float(machine.matmul.launch_us) + tiles

    def collective_bytes(self) -> float:
        """Of a rank's buffer."""
        return float(self.rows * self.columns * self.element_bytes * self.copies)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: its matrices."""
        return float(self._elements * self.element_bytes)

    @property
    def _elements(self) -> int:
        return self.rows * self.depth + self.depth * self.columns + self.rows * self.columns

    @property
    def _tiles(self) -> int:
        return math.ceil(self.rows / TILE) * math.ceil(self.columns / TILE)

    def _round_us(self, machine: Machine) -> Callable[[int], float]:
        computing = tile_us(machine, TILE, TILE, self.depth)
        # Nothing is faster than the bytes of the matrices, each read or written once.
        nbytes = self._elements * self.element_bytes / self._tiles
        reading = machine.gpu.memory_gbps * machine.matmul.memory_efficiency * 1e3
        return lambda workgroups: max(computing, workgroups * nbytes / reading)


FusedOperator = Embedding | Gemv | TiledGemm | DispatchGemm | AllReduceNorm
"""Operators that have a kernel."""
Operator = FusedOperator | GemmReduce | GatherGemm


@dataclasses.dataclass(frozen=True, slots=True)
class UnfusedTimes:
    """An operator on a machine: its computation, and then the library's collective."""

    compute_us: float
    collective_us: float

    @property
    def unfused_us(self) -> float:
        """Both, one after the other."""
        return self.compute_us + self.collective_us

    @property
    def bound_us(self) -> float:
        """The longer of both: what hiding all of the other would come to."""
        return max(self.compute_us, self.collective_us)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedTimes(UnfusedTimes):
    """The same, and ``fused``: the fused kernel on every rank, its launch included."""

    fused: FusedRun

    @property
    def lower_percent(self) -> float:
        """By how much the fused time is lower, in percent of the unfused one."""
        return 100 * (1 - self.fused.time_us / self.unfused_us)


def predict_unfused(machine: Machine, operator: Operator) -> UnfusedTimes:
    """Predict an operator unfused.

    Args:
        machine: one node, or several of one GPU each.
        operator: what is computed and sent.

    Raises:
        ValueError: nodes of several GPUs, counts of other ranks, or tensors that no memory of the machine holds.
    """
    if machine.nodes > 1 and machine.gpus > 1:
        text = "one node, or nodes of one GPU"
        raise ValueError(f"fused: {machine.name} (value={machine.nodes} nodes of {machine.gpus}, allowed={text})")
    if machine.nodes > 1 and not machine.links.network_gbps:
        raise ValueError(f"fused: links.network_gbps of {machine.name} (value=0, allowed=what joins nodes)")
    held_gb, memory_gb = operator.held_bytes(machine.world_size) / 1e9, float(machine.gpu.memory_gb)
    if held_gb > memory_gb:
        text = f"value={held_gb:.4g} GB on a rank, allowed={memory_gb:g}, which is gpu.memory_gb"
        raise ValueError(f"{operator.name}: {operator} ({text})")
    counts = operator.counts if isinstance(operator, TiledGemm | DispatchGemm) else ()
    if counts and len(counts) != machine.world_size:
        raise ValueError(
            f"{operator.name}: counts (value={len(counts)} rows, allowed={machine.world_size}, one a rank)"
        )
    collective_us = _collective_us(machine, operator.kind, _wire_equivalent(machine, operator))
    return UnfusedTimes(operator.compute_us(machine), collective_us)


def predict_fused(
    machine: Machine,
    operator: FusedOperator,
    order: str = REMOTE_FIRST,
    *,
    occupancy: float | None = None,
    starts_us: Sequence[float] = (),
    record: bool = False,
) -> FusedTimes:
    """Predict an operator, fused and not.

    Args:
        machine: one node, or several of one GPU each.
        operator: what is computed and sent.
        order: ``remote_first``, peers in turn from the next one; or ``oblivious``, ranks from 0.
        occupancy: of the fused kernel, from 0 to 1; None: all, less what calls of a network take in registers.
        starts_us: when each rank begins; none: all at once.
        record: keep the timeline.

    Raises:
        ValueError: another order or occupancy, a machine without figures of fused operators, nodes of several GPUs, or
            tensors that no memory of it holds.
    """
    ranks, across, unfused = machine.world_size, machine.nodes > 1, predict_unfused(machine, operator)
    if order not in ORDERS:
        raise ValueError(f"fused: order (value={order!r}, allowed={', '.join(ORDERS)})")
    if starts_us and (len(starts_us) != ranks or not all(0 <= start < math.inf for start in starts_us)):
        raise ValueError(f"fused: starts_us (value={list(starts_us)}, allowed={ranks} times, one a rank, 0 or more)")
    if occupancy is None:
        occupancy = float(fused_figures(machine).kept_share) if across else 1.0
    works = [_works_of(operator, rank, ranks) for rank in range(ranks)]
    plain = operator.kernel(machine, occupancy)
    own = [operator.kernel_of(rank, plain) if isinstance(operator, DispatchGemm) else plain for rank in range(ranks)]
    launch = float(machine.matmul.launch_us)
    kernels = [
        dataclasses.replace(
            own[rank],
            works=tuple(_ordered(works[rank], rank, ranks, order)),
            puts=across,
            slice_workgroups=plain.slice_workgroups if across else 1,
            start_us=launch + (starts_us[rank] if starts_us else 0.0),
        )
        for rank in range(ranks)
    ]
    run = run_fused(machine, kernels, record=record)
    return FusedTimes(unfused.compute_us, unfused.collective_us, run)


def _works_of(operator: FusedOperator, rank: int, ranks: int) -> list[Work]:
    if isinstance(operator, DispatchGemm) or (isinstance(operator, TiledGemm) and operator.counts):
        return operator.works_of(rank)
    return operator.works(ranks)


def _ordered(works: Sequence[Work], rank: int, ranks: int, order: str) -> list[Work]:
    if works[0].needs is not None:  # what is there, then what comes: from those behind this rank
        return [works[(rank - turn) % ranks] for turn in range(ranks)]
    if order == OBLIVIOUS or len(works) < ranks:
        return list(works)
    return [works[(rank + 1 + turn) % ranks] for turn in range(ranks)]


def _wire_equivalent(machine: Machine, operator: Operator) -> float:
    """Bytes of an even collective that sends as much over what is busiest: a port, or the link of a pair."""
    if not isinstance(operator, TiledGemm | DispatchGemm) or not operator.counts or machine.world_size == 1:
        return operator.collective_bytes()
    counts, ranks = operator.counts, machine.world_size
    leaves = [sum(row) - row[rank] for rank, row in enumerate(counts)]
    comes = [sum(row[rank] for row in counts) - counts[rank][rank] for rank in range(ranks)]
    most, share = max(leaves + comes), (ranks - 1) / ranks
    if machine.nodes == 1 and machine.links.topology is Topology.MESH:
        most, share = (
            max(rows for rank, row in enumerate(counts) for to, rows in enumerate(row) if to != rank),
            1 / ranks,
        )
    return most * operator.row_bytes / share


def _waves_us(workgroups: int, held: int, round_us: Callable[[int], float]) -> float:
    """A kernel of workgroups of which so many are resident at once."""
    whole, rest = divmod(workgroups, held)
    return whole * round_us(held) + (round_us(rest) if rest else 0.0)


def _collective_us(machine: Machine, kind: Kind, nbytes: float) -> float:
    """The library's, by kernels; between nodes of one GPU its time without bytes, and bytes over the network."""
    if machine.world_size == 1:  # nothing, or a copy of what is there
        moved = 0.0 if kind is Kind.ALL_REDUCE else 2 * nbytes
        return moved / (stream_gbps(machine, resident(machine)) * 1e3)
    if machine.nodes == 1:
        return library_us(machine, kind, round(nbytes))
    library, links, ranks = machine.library, machine.links, machine.world_size
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    fixed = float(library.all_reduce_us if kind is Kind.ALL_REDUCE else library.all_to_all_us)
    return fixed + rounds * float(links.network_us + (ranks - 1) / ranks * nbytes / (links.network_gbps * 1e3))

"""Operators, fused and not: what their kernels are on a machine (fused operators paper, section III, and ours).

    embedding + all-to-all   a workgroup pools the rows of a bag       gathers
    GEMV + all-reduce        a workgroup has some rows of the weight   streams
    all-reduce + norm        a block adds a slice, and sends it first  latencies and bytes
    GEMM + all-to-all        a workgroup computes a tile               operations
    all-to-all + GEMM        rows go first; tiles wait for their rank  operations
    GEMM + reduction         no kernel: unfused, or in parts (``model/split.py``)
    all-gather + GEMM        the same

Unfused, a computation's kernels end before the library's collective begins. Both are the same work by the same
workgroups; what differs is what the docstrings here say.

Over 400 lines, since all operators share the kinds of kernels that the table above names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from sidelane.program.collective import Kind
from sidelane_lab.machines.network import exchange_pace
from sidelane_lab.machines.spec import Machine, Topology
from sidelane_lab.model.blocks import occupancy as unit_limits
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.fused import FusedKernel, FusedRun, KernelWork, run_fused
from sidelane_lab.model.gemm import bags_us, gemm_us
from sidelane_lab.model.kernels import FLAGGED
from sidelane_lab.model.workgroups import fused_figures, gather_gbps, resident, stream_gbps, units_gbps
from sidelane_lab.pairs.workload import Gemm

REMOTE_FIRST, OBLIVIOUS = "remote_first", "oblivious"
ORDERS = (REMOTE_FIRST, OBLIVIOUS)
"""Orders of a rank's work: what its peers wait for first, or what belongs to the lowest rank."""
SECTIONS = frozenset({"gpu", "links", "library", "matmul", "fused"})
"""Sections of a description whose numbers matter to fused operators."""
GEMV_ROWS = 16
"""Rows of the weight that a workgroup has."""
TILE = 128
"""Rows and columns of the result that a workgroup of a generic GEMM computes."""
TILE_ROWS, TILE_COLUMNS = 128, 256
"""The same of the kernel of :mod:`sidelane.ops`, a workgroup a unit (``ops.gemm.TileSizes``)."""
SLICE_BYTES = 512
"""Size of a slice of a row that a block of a warp has in the fused norm (``ops/rms_norm_kernels.py``)."""
SLICES_A_UNIT, ROWS_A_UNIT = 16, 2
"""Blocks of it on a unit: of slices in cells, and of pushed rows (``ops/rms_norm.py``)."""
NORM_BLOCK = 2
"""Workgroups of 256 threads that a block of the framework's norm is worth: 8 or 16 warps for a row."""
ELEMENTS = 2048
"""Elements of a workgroup of an element-wise kernel: eight a thread."""
HALF = 2
"""Bytes of an element of a GEMM."""

RoundTime = Callable[[int], float]
"""Microseconds of a round of so many workgroups."""


class OperatorModel:
    """A computation next to a collective: a dataclass of whole numbers.

    Attributes:
        name: in studies.
        kind: of the collective.
        has_kernel: there is a fused one.
        counts: rows from rank i to rank j in row i, column j; none: as many to each.
        row_bytes: of a row that travels by these counts.
    """

    __slots__ = ()
    has_kernel: ClassVar[bool] = True
    name: ClassVar[str]
    kind: ClassVar[Kind]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name != "counts" and (not isinstance(value, int) or value < (field.type != "bool")):
                raise ValueError(f"{self.name}: {field.name} (value={value!r}, allowed=whole numbers from 1)")

    def compute_us(self, machine: Machine) -> float:
        """Return the time of the computation alone, unfused."""
        raise NotImplementedError

    def collective_bytes(self, ranks: int) -> float:
        """Return the bytes of a rank's buffer; gathered ones of an all-gather."""
        raise NotImplementedError

    def held_bytes(self, ranks: int) -> float:
        """Return the bytes of a rank's memory that it takes at the least."""
        return self.collective_bytes(ranks)

    def kernel(self, machine: Machine, occupancy: float, rank: int) -> FusedKernel:
        """Return the fused kernel of a rank, with its work by the rank that gets it, or that it comes from."""
        raise NotImplementedError

    def launch_us(self, machine: Machine) -> float:
        """Return the time that the fused kernel takes to start: that of a GEMM, where its own is not known."""
        return float(machine.matmul.launch_us)


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding(OperatorModel):
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

    name: ClassVar = "embedding_all_to_all"
    kind: ClassVar = Kind.ALL_TO_ALL

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tables} tables a rank, pooling {self.pooling}, dim {self.dim}"

    def kernel(self, machine: Machine, occupancy: float, rank: int) -> FusedKernel:
        ranks = machine.world_size
        bags, nbytes = math.ceil(self.batch / ranks) * self.tables, float(self.dim * self.element_bytes)
        works = tuple(KernelWork(bags, ((to, nbytes),)) for to in range(ranks))
        return FusedKernel(works, resident(machine, occupancy), self._round_us(machine), self.slice_bags)

    def compute_us(self, machine: Machine) -> float:
        kernels = 1 if self.at_once else self.tables
        bags = self.batch * self.tables // kernels
        one = _waves_us(bags, resident(machine), self._round_us(machine))
        one = max(one, bags_us(machine, bags, self.dim, self.pooling))
        return kernels * float(one + machine.matmul.launch_us)

    def alone_us(self, machine: Machine) -> float:
        """Return the time of the fused kernel where it sends nothing."""
        bags = _waves_us(self.batch * self.tables, resident(machine), self._round_us(machine))
        return float(machine.matmul.launch_us) + bags

    def collective_bytes(self, ranks: int) -> float:
        return float(self.batch * self.tables * self.dim * self.element_bytes)

    def _round_us(self, machine: Machine) -> RoundTime:
        nbytes = (self.pooling + 1) * self.dim * self.element_bytes  # read, and the result written
        return lambda workgroups: workgroups * nbytes / (gather_gbps(machine, workgroups) * 1e3)


@dataclasses.dataclass(frozen=True, slots=True)
class Gemv(OperatorModel):
    """A weight of ``rows`` x ``columns``, its columns spread over the ranks, for a few ``tokens``; ranks add up.

    Each rank adds up its share of the rows and sends it to all: two phases. Unfused: the same workgroups, which end
    before the library's all-reduce begins.
    """

    rows: int
    columns: int
    tokens: int = 1

    name: ClassVar = "gemv_all_reduce"
    kind: ClassVar = Kind.ALL_REDUCE

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, {self.tokens} tokens"

    def kernel(self, machine: Machine, occupancy: float, rank: int) -> FusedKernel:
        ranks, held = machine.world_size, resident(machine, occupancy)
        count = math.ceil(self.rows / ranks / GEMV_ROWS)
        part = self.rows / ranks * self.tokens * HALF
        works = tuple(KernelWork(count, ((to, float(part / count)),)) for to in range(ranks))
        adding_us = (ranks + 1) * part / (stream_gbps(machine, held) * 1e3)
        return FusedKernel(works, held, self._round_us(machine), reduce_us=adding_us, result_bytes=part)

    def compute_us(self, machine: Machine) -> float:
        count = math.ceil(self.rows / GEMV_ROWS)
        return float(machine.matmul.launch_us) + _waves_us(count, resident(machine), self._round_us(machine))

    def collective_bytes(self, ranks: int) -> float:
        return float(self.rows * self.tokens * HALF)

    def held_bytes(self, ranks: int) -> float:
        return self.rows * self.columns / ranks * HALF + self.collective_bytes(ranks)

    def _round_us(self, machine: Machine) -> RoundTime:
        nbytes = GEMV_ROWS * self.columns / machine.world_size * HALF
        return lambda workgroups: workgroups * nbytes / (stream_gbps(machine, workgroups) * 1e3)


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduceNorm(OperatorModel):
    """``tokens`` rows of ``hidden`` elements: the sum of all ranks' and a residual, and its RMSNorm.

    The kernel is the one of ``ops.rms_norm``. In cells every word of data travels with a flag of its own, so that twice
    the bytes cross a link and nobody waits for anything else. A block has a slice of a row, and the blocks of a row
    exchange sums of squares through memory; rows that find no room go in turns, behind each other. Pushed, a block has
    a row, which goes as it is; a fence waits until it is there, a flag follows, and the block counts itself behind its
    last row. Unfused: the library's all-reduce, an addition and a norm, a kernel each.

        cells     launch | load | bytes with flags -> crossing | turns of: load, sum to the team and back, bytes
        pushed    launch | load | bytes -> crossing, and back | flag crosses | rows of: load, bytes | count

    A load, a sum, and a count each take ``occupancy.step_us``, a crossing ``fused.flag_us``.

    Attributes:
        pushed: rows travel as they are; False: in cells.
    """

    tokens: int
    hidden: int
    pushed: bool = False

    name: ClassVar = "all_reduce_rms_norm"
    kind: ClassVar = Kind.ALL_REDUCE

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}"

    def kernel(self, machine: Machine, occupancy: float, rank: int) -> FusedKernel:
        ranks, units = machine.world_size, max(1, int(machine.gpu.units * occupancy))
        row, step_us = HALF * self.hidden, float(unit_limits(machine).step_us)
        slices = 1 if self.pushed else math.ceil(row / SLICE_BYTES)
        most = max(1, units * (ROWS_A_UNIT if self.pushed else SLICES_A_UNIT) // slices)
        turns, blocks = math.ceil(self.tokens / most), min(self.tokens, most) * slices
        flagged = 1 if self.pushed else FLAGGED
        again = self.pushed or turns > 1 or ranks == 1  # the own part, which one turn in cells has in registers
        passes = again + 1 + flagged * (ranks - 1) + 2  # the residual, what came, and both results
        adding_us = passes * row * self.tokens / self._bytes_a_us(machine, blocks) + turns * step_us
        if self.pushed:
            adding_us += step_us + (2 * float(fused_figures(machine).flag_us) if ranks > 1 else 0.0)
        elif slices > 1:
            adding_us += turns * step_us
        sent = float(flagged * row / slices)
        works = (KernelWork(self.tokens * slices, tuple((to, sent) for to in range(ranks))),)

        def round_us(count: int) -> float:
            return step_us + count * row / slices / self._bytes_a_us(machine, count) if ranks > 1 else 0.0

        return FusedKernel(works, blocks, round_us, reduce_us=adding_us)

    def alone_us(self, machine: Machine) -> float:
        """Return the time of the addition and the norm by one kernel, a block a row, which sends nothing."""
        silent = dataclasses.replace(self, pushed=True).kernel(dataclasses.replace(machine, gpus=1, nodes=1), 1.0, 0)
        return self.launch_us(machine) + silent.reduce_us

    def launch_us(self, machine: Machine) -> float:
        return OperatorModel.launch_us(self, machine) if machine.kernels is None else float(machine.kernels.launch_us)

    def compute_us(self, machine: Machine) -> float:
        rows = self.collective_bytes(machine.world_size)
        adding = stream_gbps(machine, min(resident(machine), max(1.0, self.tokens * self.hidden / ELEMENTS))) * 1e3
        norm = stream_gbps(machine, min(resident(machine), NORM_BLOCK * self.tokens)) * 1e3
        return 2 * float(machine.matmul.launch_us) + 3 * rows / adding + 2 * rows / norm

    def collective_bytes(self, ranks: int) -> float:
        return float(self.tokens * self.hidden * HALF)

    def held_bytes(self, ranks: int) -> float:
        return (4 + 2 * FLAGGED * ranks) * self.collective_bytes(ranks)  # inputs, results, and cells for two calls

    @staticmethod
    def _bytes_a_us(machine: Machine, blocks: int) -> float:
        return units_gbps(machine, min(int(machine.gpu.units), blocks)) * 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class GemmOperator(OperatorModel):
    """``rows`` x ``depth`` times ``depth`` x ``columns`` on every rank, by the vendor library where it is unfused."""

    rows: int
    depth: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns} a rank"

    def rows_us(self, machine: Machine, rows: int) -> float:
        """Return the time of the GEMM of some rows."""
        return gemm_us(machine, Gemm(rows, self.columns, self.depth)) if rows else 0.0

    def compute_us(self, machine: Machine) -> float:
        return self.rows_us(machine, self.rows)

    def collective_bytes(self, ranks: int) -> float:
        return float(self.rows * self.columns * HALF)

    def held_bytes(self, ranks: int) -> float:
        return float((self.rows * (self.depth + self.columns) + self.depth * self.columns) * HALF)

    def _check_counts(self, counts: Sequence[Sequence[int]]) -> None:
        sums = [sum(row) for row in (*counts, *zip(*counts, strict=True))]
        if not sums or max(sums) > self.rows or min(map(min, counts)) < 0:
            allowed = f"0 to {self.rows} rows"
            raise ValueError(f"{self.name}: counts (value={max(sums, default=0)} of a rank, allowed={allowed})")


@dataclasses.dataclass(frozen=True, slots=True)
class TiledGemm(GemmOperator):
    """The rows of the result go to all.

    Attributes:
        copies: ranks that get each row; with several, every tile has some for all.
        by_library: unfused, the GEMM is the vendor library's; False: the generic kernel that is fused as well.
        counts: see :class:`OperatorModel`.
    """

    copies: int = 1
    by_library: bool = True
    counts: tuple[tuple[int, ...], ...] = ()

    name: ClassVar = "gemm_all_to_all"
    kind: ClassVar = Kind.ALL_TO_ALL

    def __post_init__(self) -> None:
        OperatorModel.__post_init__(self)
        if self.counts:
            self._check_counts(self.counts)
            if self.copies > 1:
                raise ValueError(f"gemm_all_to_all: counts (value={self.copies} copies, allowed=1)")

    def __str__(self) -> str:
        copies = f", each to {self.copies}" if self.copies > 1 else ""
        evenly = "half for one peer" if self.counts else f"rows to all evenly{copies}"
        return f"{GemmOperator.__str__(self)}, {evenly}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that travels."""
        return self.columns * HALF

    def kernel(self, machine: Machine, occupancy: float, rank: int) -> FusedKernel:
        units = max(1, int(machine.gpu.units * occupancy))
        return FusedKernel(tuple(self._works(rank, machine.world_size)), units, self._round_us(machine))

    def _works(self, rank: int, ranks: int) -> list[KernelWork]:
        """Tiles by the rank that gets them, or for all; by counts no tile is for two."""
        if self.counts:
            wide = math.ceil(self.columns / TILE)
            tiles = [math.ceil(rows / TILE) * wide for rows in self.counts[rank]]
            sent = [rows * self.row_bytes / max(1, n) for rows, n in zip(self.counts[rank], tiles, strict=True)]
            return [KernelWork(n, ((to, nbytes),)) for to, (n, nbytes) in enumerate(zip(tiles, sent, strict=True))]
        whole = self.rows * self.columns * HALF
        if self.copies > 1:
            share = self.copies / ranks * float(whole / self._tiles)
            return [KernelWork(self._tiles, tuple((to, share) for to in range(ranks)))]
        each, more = divmod(self._tiles, ranks)
        counts = [each + (to < more) for to in range(ranks)]
        even = float(whole / ranks)
        return [KernelWork(count, ((to, even / count),)) for to, count in enumerate(counts) if count]

    def compute_us(self, machine: Machine) -> float:
        if self.by_library:
            return self.rows_us(machine, self.rows)
        tiles = _waves_us(self._tiles, int(machine.gpu.units), self._round_us(machine))
        return float(machine.matmul.launch_us) + tiles

    def collective_bytes(self, ranks: int) -> float:
        return float(self.rows * self.columns * HALF * self.copies)

    @property
    def _tiles(self) -> int:
        return math.ceil(self.rows / TILE) * math.ceil(self.columns / TILE)

    def _round_us(self, machine: Machine) -> RoundTime:
        computing = tile_us(machine, TILE, TILE, self.depth)
        # Nothing is faster than the bytes of the matrices, each read or written once.
        nbytes = self.held_bytes(1) / self._tiles
        reading = machine.gpu.memory_gbps * machine.matmul.memory_efficiency * 1e3
        return lambda workgroups: max(computing, workgroups * nbytes / reading)


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchGemm(GemmOperator):
    """Rows of ``depth`` go to the ranks that ``counts`` says, and are multiplied there.

    Attributes:
        counts: see :class:`OperatorModel`; ``rows`` are those of a rank at most, sent and got.
    """

    counts: tuple[tuple[int, ...], ...]

    name: ClassVar = "all_to_all_gemm"
    kind: ClassVar = Kind.ALL_TO_ALL

    def __post_init__(self) -> None:
        OperatorModel.__post_init__(self)
        self._check_counts(self.counts)

    def __str__(self) -> str:
        return f"{GemmOperator.__str__(self)}, half for one peer"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that travels."""
        return self.depth * HALF

    def kernel(self, machine: Machine, occupancy: float, rank: int) -> FusedKernel:
        wide, mine = math.ceil(self.columns / TILE_COLUMNS), self.counts[rank]
        works = tuple(
            KernelWork(math.ceil(row[rank] / TILE_ROWS) * wide, (), needs=source)
            for source, row in enumerate(self.counts)
        )
        whole_us = tile_us(machine, TILE_ROWS, TILE_COLUMNS, self.depth)  # however little of a tile is in the result
        return FusedKernel(
            works,
            max(1, int(machine.gpu.units * occupancy)),
            lambda workgroups: whole_us,
            first_shares=tuple(float((to != rank) * rows * self.row_bytes) for to, rows in enumerate(mine)),
            senders=sum(math.ceil(rows / TILE_ROWS) for to, rows in enumerate(mine) if to != rank),
        )

    def compute_us(self, machine: Machine) -> float:
        return self.rows_us(machine, max(map(sum, zip(*self.counts, strict=True))))  # the rank that gets the most

    def collective_bytes(self, ranks: int) -> float:
        return float(self.rows * self.row_bytes)

    def held_bytes(self, ranks: int) -> float:
        return GemmOperator.held_bytes(self, ranks) + self.collective_bytes(ranks)  # with the rows that come


@dataclasses.dataclass(frozen=True, slots=True)
class GemmReduce(GemmOperator):
    """Ranks add up the rows of their results, ``depth`` being a rank's.

    Attributes:
        gathers: what was added up goes to all: an all-reduce.
    """

    gathers: bool = False

    has_kernel: ClassVar = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name in studies."""
        return "gemm_all_reduce" if self.gathers else "gemm_reduce_scatter"

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Kind of the collective."""
        return Kind.ALL_REDUCE if self.gathers else Kind.REDUCE_SCATTER


@dataclasses.dataclass(frozen=True, slots=True)
class GatherGemm(GemmOperator):
    """Every rank's ``rows`` x ``depth`` go to all, and are multiplied by its own ``depth`` x ``columns``."""

    has_kernel: ClassVar = False
    name: ClassVar = "all_gather_gemm"
    kind: ClassVar = Kind.ALL_GATHER

    def compute_us(self, machine: Machine) -> float:
        return self.rows_us(machine, machine.world_size * self.rows)

    def collective_bytes(self, ranks: int) -> float:
        return float(ranks * self.rows * self.depth * HALF)

    def held_bytes(self, ranks: int) -> float:
        return float((ranks * self.rows * (self.depth + self.columns) + self.depth * self.columns) * HALF)


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
        """Percent of the unfused time by which the fused one is lower."""
        return 100 * (1 - self.fused.time_us / self.unfused_us)


def predict_unfused(machine: Machine, operator: OperatorModel) -> UnfusedTimes:
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
    require_room(machine, operator)
    counts = counts_of(operator)
    if counts and len(counts) != machine.world_size:
        raise ValueError(
            f"{operator.name}: counts (value={len(counts)} rows, allowed={machine.world_size}, one a rank)"
        )
    exchanged_us = collective_us(machine, operator.kind, _wire_equivalent(machine, operator))
    return UnfusedTimes(operator.compute_us(machine), exchanged_us)


def require_room(machine: Machine, operator: OperatorModel) -> None:
    """Refuse tensors that no memory of the machine holds.

    Raises:
        ValueError: they are larger.
    """
    held_gb, memory_gb = operator.held_bytes(machine.world_size) / 1e9, float(machine.gpu.memory_gb)
    if held_gb > memory_gb:
        text = f"value={held_gb:.4g} GB on a rank, allowed={memory_gb:g}, which is gpu.memory_gb"
        raise ValueError(f"{operator.name}: {operator} ({text})")


def predict_fused(
    machine: Machine,
    operator: OperatorModel,
    order: str = REMOTE_FIRST,
    *,
    occupancy: float | None = None,
    starts_us: Sequence[float] = (),
    record: bool = False,
) -> FusedTimes:
    """Predict an operator that has a kernel, fused and not.

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
    launch = operator.launch_us(machine)
    kernels = []
    for rank in range(ranks):
        kernel = operator.kernel(machine, occupancy, rank)
        kernels.append(
            dataclasses.replace(
                kernel,
                works=tuple(_ordered(kernel.works, rank, ranks, order)),
                puts=across,
                slice_workgroups=kernel.slice_workgroups if across else 1,
                start_us=launch + (starts_us[rank] if starts_us else 0.0),
            )
        )
    run = run_fused(machine, kernels, record=record)
    return FusedTimes(unfused.compute_us, unfused.collective_us, run)


def counts_of(operator: OperatorModel) -> tuple[tuple[int, ...], ...]:
    """Return the rows from rank to rank where an operator has such counts; else none."""
    return operator.counts if isinstance(operator, TiledGemm | DispatchGemm) else ()


def tile_us(machine: Machine, rows: int, columns: int, depth: int) -> float:
    """Return the time of a tile of the generic GEMM on a unit. It begins and ends as the library's do (``ramp_k``)."""
    gpu, matmul = machine.gpu, machine.matmul
    speed = gpu.peak_tflops * matmul.efficiency * fused_figures(machine).generic_share * 1e6 / gpu.units
    return float(2.0 * rows * columns * (depth + matmul.ramp_k) / speed)


def _ordered(works: Sequence[KernelWork], rank: int, ranks: int, order: str) -> list[KernelWork]:
    if works[0].needs is not None:  # what is there, then what comes: from those behind this rank
        return [works[(rank - turn) % ranks] for turn in range(ranks)]
    if order == OBLIVIOUS or len(works) < ranks:
        return list(works)
    return [works[(rank + 1 + turn) % ranks] for turn in range(ranks)]


def _wire_equivalent(machine: Machine, operator: OperatorModel) -> float:
    """Return the bytes of an even collective that sends as much over what is busiest: a port, or the link of a pair."""
    ranks, counts = machine.world_size, counts_of(operator)
    if not counts or ranks == 1:
        return operator.collective_bytes(ranks)
    assert isinstance(operator, TiledGemm | DispatchGemm)
    leaves = [sum(row) - row[rank] for rank, row in enumerate(counts)]
    comes = [sum(row[rank] for row in counts) - counts[rank][rank] for rank in range(ranks)]
    most, share = max(leaves + comes), (ranks - 1) / ranks
    if machine.nodes == 1 and machine.links.topology is Topology.MESH:
        most = max(rows for rank, row in enumerate(counts) for to, rows in enumerate(row) if to != rank)
        share = 1 / ranks
    return most * operator.row_bytes / share


def _waves_us(workgroups: int, held: int, round_us: RoundTime) -> float:
    """Return the time of a kernel of workgroups of which so many are resident at once."""
    whole, rest = divmod(workgroups, held)
    return whole * round_us(held) + (round_us(rest) if rest else 0.0)


def collective_us(machine: Machine, kind: Kind, nbytes: float) -> float:
    """Return the library's time; between nodes of one GPU its time without bytes, and bytes over the network."""
    if machine.world_size == 1:  # nothing, or a copy of what is there
        moved = 0.0 if kind is Kind.ALL_REDUCE else 2 * nbytes
        return moved / (stream_gbps(machine, resident(machine)) * 1e3)
    if machine.nodes == 1:
        return library_us(machine, kind, round(nbytes))
    library = machine.library
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    fixed = float(library.all_reduce_us if kind is Kind.ALL_REDUCE else library.all_to_all_us)
    latency_us, us_per_byte = exchange_pace(machine)
    return fixed + rounds * (latency_us + us_per_byte * nbytes)

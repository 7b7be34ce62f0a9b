"""GEMMs whose results are added up, or whose rows come from other ranks first.

    GEMM + reduction    unfused, or in parts (``model/split.py``)
    all-gather + GEMM   the same
    all-to-all + GEMM   a kernel, too: rows go first; tiles wait for the rank that their rows come from

The kernel is the one of :mod:`sidelane.ops`: a workgroup a unit, which goes over tiles of 128 x 256. Else the GEMM is
the vendor library's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from sidelane.c3.workload import Gemm
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.fused import FusedKernel, Work
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.workgroups import fused_figures

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of the result, a workgroup at a time (``ops.gemm.TileSizes``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GemmReduce:
    """``rows`` x ``depth`` times ``depth`` x ``columns`` on every rank, ``depth`` a rank's; ranks add up their rows.

    Attributes:
        gathers: what was added up goes to all: an all-reduce.
    """

    rows: int
    depth: int
    columns: int
    gathers: bool = False
    element_bytes: int = 2

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def name(self) -> str:
        """As the study has it."""
        return "gemm_all_reduce" if self.gathers else "gemm_reduce_scatter"

    @property
    def kind(self) -> Kind:
        """Of the collective."""
        return Kind.ALL_REDUCE if self.gathers else Kind.REDUCE_SCATTER

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns} a rank"

    def compute_us(self, machine: Machine) -> float:
        """The library's GEMM."""
        return gemm_us(machine, Gemm(self.rows, self.columns, self.depth))

    def collective_bytes(self) -> float:
        """Of a rank's buffer."""
        return float(self.rows * self.columns * self.element_bytes)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: its matrices."""
        return float((self.rows + self.columns) * self.depth * self.element_bytes) + self.collective_bytes()


@dataclasses.dataclass(frozen=True, slots=True)
class GatherGemm:
    """Every rank's ``rows`` x ``depth`` go to all, and are multiplied by its own ``depth`` x ``columns``."""

    rows: int
    depth: int
    columns: int
    ranks: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        check_sizes(self)

    name = "all_gather_gemm"
    kind = Kind.ALL_GATHER

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns} a rank"

    def compute_us(self, machine: Machine) -> float:
        """The library's GEMM of all rows."""
        return gemm_us(machine, Gemm(machine.world_size * self.rows, self.columns, self.depth))

    def collective_bytes(self) -> float:
        """Gathered."""
        return float(self.ranks * self.rows * self.depth * self.element_bytes)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: its matrices, with all rows."""
        elements = ranks * self.rows * (self.depth + self.columns) + self.depth * self.columns
        return float(elements * self.element_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchGemm:
    """Rows of ``depth`` go to the ranks that ``counts`` says, and are multiplied there by ``depth`` x ``columns``.

    Attributes:
        rows: of a rank, at most, sent and got.
        counts: rows from rank i to rank j in row i, column j.
    """

    rows: int
    depth: int
    columns: int
    counts: tuple[tuple[int, ...], ...]
    element_bytes: int = 2

    def __post_init__(self) -> None:
        check_sizes(self)
        check_counts(self.name, self.counts, self.rows)

    name = "all_to_all_gemm"
    kind = Kind.ALL_TO_ALL

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns} a rank, half for one peer"

    @property
    def row_bytes(self) -> int:
        """Of a row that travels."""
        return self.depth * self.element_bytes

    def works_of(self, rank: int) -> list[Work]:
        """By the rank whose rows they multiply."""
        return [Work(_tiles(row[rank], self.columns), (), needs=source) for source, row in enumerate(self.counts)]

    def kernel(self, machine: Machine, occupancy: float) -> FusedKernel:
        """The fused one, without its work and what it sends."""
        return FusedKernel((), max(1, int(machine.gpu.units * occupancy)), _tile_us(machine, self.depth))

    def kernel_of(self, rank: int, plain: FusedKernel) -> FusedKernel:
        """That of a rank, with what it sends first."""
        shares = tuple(float((to != rank) * rows * self.row_bytes) for to, rows in enumerate(self.counts[rank]))
        senders = sum(math.ceil(rows / TILE_ROWS) for to, rows in enumerate(self.counts[rank]) if to != rank)
        return dataclasses.replace(plain, first_shares=shares, senders=senders)

    def compute_us(self, machine: Machine) -> float:
        """The library's GEMM of the rows of the rank that gets the most."""
        return gemm_us(machine, Gemm(max(map(sum, zip(*self.counts, strict=True))), self.columns, self.depth))

    def collective_bytes(self) -> float:
        """Of a rank's buffer."""
        return float(self.rows * self.row_bytes)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: its matrices, with the rows that come."""
        elements = self.rows * (2 * self.depth + self.columns) + self.depth * self.columns
        return float(elements * self.element_bytes)


def check_counts(name: str, counts: Sequence[Sequence[int]], rows: int) -> None:
    """Refuse counts of more rows than a rank has. Raises ValueError."""
    sums = [sum(row) for row in (*counts, *zip(*counts, strict=True))]
    if not sums or max(sums) > rows or min(map(min, counts)) < 0:
        raise ValueError(f"{name}: counts (value={max(sums, default=0)} of a rank, allowed=0 to {rows} rows)")


def check_sizes(operator: object) -> None:
    """Refuse an operator's sizes that there are not. Raises ValueError."""
    for field in dataclasses.fields(operator):  # type: ignore[arg-type]
        value = getattr(operator, field.name)
        if field.name == "counts":
            continue
        if not isinstance(value, int) or value < (field.type != "bool"):
            name = getattr(operator, "name", "")
            raise ValueError(f"{name}: {field.name} (value={value!r}, allowed=whole numbers from 1)")


def _tiles(rows: int, columns: int) -> int:
    return math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)


def _tile_us(machine: Machine, depth: int) -> Callable[[int], float]:
    """A whole tile, however little of it is in the result."""
    return lambda workgroups: tile_us(machine, TILE_ROWS, TILE_COLUMNS, depth)


def tile_us(machine: Machine, rows: int, columns: int, depth: int) -> float:
    """A tile of the generic GEMM on a unit. It begins and ends as one of the library's does (``ramp_k``)."""
    gpu, matmul = machine.gpu, machine.matmul
    speed = gpu.peak_tflops * matmul.efficiency * fused_figures(machine).generic_share * 1e6 / gpu.units
    return float(2.0 * rows * columns * (depth + matmul.ramp_k) / speed)

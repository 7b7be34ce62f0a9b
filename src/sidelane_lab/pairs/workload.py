"""Workloads: one GEMM and one collective side by side, the classes of such pairs, and the arithmetic of speedups.

Classes are those of the ConCCL paper's section III, speedups those of its section IV-B3. In studies the vendor's
library is a baseline, and Sidelane one implementation of several.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from enum import StrEnum
from typing import Any, Protocol

from sidelane.c3.strategies import Mover, Partition, Strategy
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane.sizes import format_bytes, parse_bytes

COMPARABLE = 1.15
"""Largest factor between two isolated times that count as comparable (ConCCL paper, III)."""

LEAST_GAIN = 0.05
"""Ideal gain below which a percentage of it is meaningless."""

# Percent of ideal above which a row says that one of its times is wrong: noise reaches a few percent beyond 100.
MOST_PERCENT = 105.0

LIBRARY = ("nccl", "gloo")
"""Names of the vendor library's own kernels: whichever of these exists on the device."""

CPU_GEMM_FLOPS = 2_500_000_000
"""Largest GEMM that a CPU rank runs: 25 to 50 milliseconds on one core at 50 to 100 GFLOP/s."""

CPU_GEMM_BYTES = 64 << 20
"""Most bytes of its operands in bfloat16: twice as many in float32, which a core reads in some 20 milliseconds."""

GEMM_DTYPES = ("bfloat16", "float16", "float32")

# Table I of the ConCCL paper, in its order of dimensions: m x n x k. The paper does not say so; the models do. Every
# GEMM has one dimension of 8192, the tokens of an iteration. In cb2, cb4 and cb5 (LLaMA-405B: hidden size 16384, fused
# query, key and value 18432, fused gate and up projections 106496) the tokens come second and the hidden size last: a
# forward projection with n = tokens and k = hidden size. cb3, mb1 and mb2 end with the tokens: a weight gradient, in
# which tokens are summed over. The memory-bound ones are so by measured traffic: their outputs are the largest, and
# their minimal bytes would call them compute-bound too.
TABLE_I: dict[str, tuple[int, int, int]] = {
    "cb1": (8192, 8192, 8192),
    "cb2": (16384, 8192, 16384),
    "cb3": (16384, 16384, 8192),
    "cb4": (18432, 8192, 16384),
    "cb5": (106496, 8192, 16384),
    "mb1": (8192, 57344, 8192),
    "mb2": (16384, 106496, 8192),
}

# Kernels that read far more than they compute. An embedding table has as many rows as all bags read, over BAG_READS.
MEMORY_KERNELS: dict[str, tuple[int, int, int]] = {
    "add": (65536, 8192, 1),
    "bag": (65536, 256, 64),
    "attend": (2048, 128, 2048),
}

NAMED = TABLE_I | MEMORY_KERNELS
"""Dimensions of the computations that have names."""

BAG_READS = 4
"""Number of times that bags read each row of their table on average."""


class ComputeKind(StrEnum):
    """Computation beside a collective. All but ``product`` read far more than they compute.

    PRODUCT: ``C[m, n] = A[m, k] @ B[k, n]``. ADD: ``C[m, n] = A[m, n] + B[m, n]``, k is 1. BAG: ``m`` embedding bags of
    ``k`` rows each, of ``n`` elements. ATTEND: ``m`` queries of ``n`` elements, each over ``k`` keys and values of its
    own, as decoding reads its cache.
    """

    PRODUCT = "product"
    ADD = "add"
    BAG = "bag"
    ATTEND = "attend"


class C3Class(StrEnum):
    """Longer side of a pair, when each runs alone."""

    G_LONG = "G-long"
    C_LONG = "C-long"
    GC_EQUAL = "GC-equal"


class Bound(StrEnum):
    """Limit of a GEMM that runs alone."""

    COMPUTE = "compute"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product ``C[m, n] = A[m, k] @ B[k, n]``, or another computation by its tag (:class:`ComputeKind`).

    Attributes:
        m: number of rows of the result.
        n: number of columns of the result.
        k: length of the sums.
        dtype: dtype of all three matrices, as torch names it.
        tag: name in Table I of the ConCCL paper, or in ``MEMORY_KERNELS``, else empty.
        divisor: number by which every dimension of the named GEMM was divided (1: the GEMM itself).
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    tag: str = ""
    divisor: int = 1

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"Gemm: dimensions must be positive (value={self.m}x{self.n}x{self.k})")
        if self.dtype not in GEMM_DTYPES:
            raise ValueError(f"Gemm: dtype (value={self.dtype!r}, allowed={', '.join(GEMM_DTYPES)})")

    @property
    def name(self) -> str:
        """Name: ``cb1``, ``cb1/8`` (every dimension divided by 8) or ``512x512x2048``."""
        if not self.tag:
            return f"{self.m}x{self.n}x{self.k}"
        return self.tag if self.divisor == 1 else f"{self.tag}/{self.divisor}"

    @property
    def operation(self) -> ComputeKind:
        """Computation that is meant."""
        return ComputeKind(self.tag) if self.tag in MEMORY_KERNELS else ComputeKind.PRODUCT

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        each = {ComputeKind.PRODUCT: 2, ComputeKind.ADD: 1, ComputeKind.BAG: 1, ComputeKind.ATTEND: 4}
        return each[self.operation] * self.m * self.n * self.k

    @property
    def nbytes(self) -> int:
        """Fewest bytes that can move: each input read once, of tables as often as they are read; the result written."""
        result, rows = self.m * self.n, self.m * self.n * self.k
        inputs = {
            ComputeKind.PRODUCT: self.m * self.k + self.k * self.n,
            ComputeKind.ADD: 2 * result,
            ComputeKind.BAG: rows,
            ComputeKind.ATTEND: 2 * rows + result,
        }
        return (inputs[self.operation] + result) * ELEMENT_BYTES[self.dtype]

    def bound(self, machine_flops_per_byte: float, measured_bytes: float | None = None) -> Bound:
        """Return compute if the GEMM does more operations per byte than the machine can (ConCCL paper, section III).

        Args:
            machine_flops_per_byte: peak arithmetic rate over peak memory bandwidth.
            measured_bytes: traffic that counters saw; None takes ``nbytes``, which is the least possible and so
                calls some memory-bound GEMMs compute-bound.
        """
        intensity = self.flops / (self.nbytes if measured_bytes is None else measured_bytes)
        return Bound.COMPUTE if intensity > machine_flops_per_byte else Bound.MEMORY

    def scaled(self, divisor: int) -> Gemm:
        """Return the GEMM with every dimension divided (rounded up), for machines that cannot run the whole one."""
        if divisor < 1:
            raise ValueError(f"Gemm.scaled: divisor (value={divisor}, allowed=1 or more)")
        m, n, k = (-(-size // divisor) for size in (self.m, self.n, self.k))
        return dataclasses.replace(self, m=m, n=n, k=k, divisor=self.divisor * divisor)

    def for_cpu(self) -> Gemm:
        """Return the GEMM as a CPU core takes it: in float32, every dimension divided by the least power of two."""
        divisor = 1
        while (made := self.scaled(divisor)).flops > CPU_GEMM_FLOPS or made.nbytes > CPU_GEMM_BYTES:
            divisor *= 2
        return dataclasses.replace(made, dtype="float32")


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A GEMM and a collective without dependencies between them.

    Attributes:
        gemm: the computation, the same on every rank.
        collective: the communication.
        nbytes: gathered size of an all_gather, size of the local buffer for the others.
    """

    gemm: Gemm
    collective: Kind
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise ValueError(f"Workload: nbytes must be positive (value={self.nbytes})")

    @property
    def name(self) -> str:
        """Name in the style of the ConCCL paper's Table II: ``cb1_896M all_gather``."""
        return f"{self.gemm.name}_{format_bytes(self.nbytes)} {self.collective}"

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of result files for the workload."""
        gemm = {"gemm": self.gemm.name, "m": self.gemm.m, "n": self.gemm.n, "k": self.gemm.k, "dtype": self.gemm.dtype}
        return {**gemm, "collective": self.collective, "bytes": self.nbytes}

    def scaled_for_cpu(self) -> Workload:
        """Return the same pair at a size that a CPU core finishes in tens of milliseconds.

        The bytes are divided as the dimensions of the GEMM are. That about keeps the relation of the two times: a core
        does some 20 operations while it moves a byte, a GPU some 2000 while its link does.

        >>> parse_workload("cb1_896M").scaled_for_cpu().name
        'cb1/8_112M all_gather'
        """
        gemm = self.gemm.for_cpu()
        return dataclasses.replace(self, gemm=gemm, nbytes=max(1024, self.nbytes * self.gemm.divisor // gemm.divisor))


def classify(gemm_us: float, comm_us: float) -> C3Class:
    """Return the C3 type of a pair from isolated times in microseconds (ConCCL paper, section III).

    >>> str(classify(1410.0, 1840.0))
    'C-long'
    """
    if not (gemm_us > 0 and comm_us > 0 and math.isfinite(gemm_us) and math.isfinite(comm_us)):
        raise ValueError(f"classify: times must be positive (value={gemm_us}, {comm_us})")
    if gemm_us > COMPARABLE * comm_us:
        return C3Class.G_LONG
    return C3Class.C_LONG if comm_us > COMPARABLE * gemm_us else C3Class.GC_EQUAL


def ideal_speedup(gemm_us: float, comm_us: float) -> float:
    """Return the speedup over serial if the shorter of the two were hidden entirely (ConCCL paper, section IV-B3).

    >>> round(ideal_speedup(1410.0, 1840.0), 3)
    1.766
    """
    return (gemm_us + comm_us) / max(gemm_us, comm_us)


def speedup(gemm_us: float, comm_us: float, time_us: float) -> float:
    """Return the speedup of a concurrent run over the sum of the isolated times."""
    return (gemm_us + comm_us) / time_us


def percent_of_ideal(gemm_us: float, comm_us: float, time_us: float) -> float | None:
    """Return the reached share of the ideal gain: 0 is serial, 100 the longer of the two alone; it can be negative.

    It is undefined (None) if the shorter of the two is less than 5% of the longer: the possible gain is then no more
    than the noise from run to run, and the number would be meaningless.

    Args:
        gemm_us: isolated time of the GEMM in microseconds.
        comm_us: isolated time of the collective. The strict number takes the fastest measured implementation, the
            papers' number takes the vendor library's.
        time_us: time of both together.

    >>> round(percent_of_ideal(1410.0, 1840.0, 1860.0), 1)
    97.5
    >>> percent_of_ideal(1410.0, 10.0, 1430.0) is None
    True
    """
    possible = ideal_speedup(gemm_us, comm_us) - 1.0
    if possible < LEAST_GAIN:
        return None
    return 100.0 * (speedup(gemm_us, comm_us, time_us) - 1.0) / possible


def possible_percent(percent: float | None, least: float = -math.inf) -> float | None:
    """Return a percent of ideal; None for one that is set aside, by the same rule for predictions and measurements.

    Args:
        percent: of ideal, or None.
        least: percent below which it is set aside, too.

    >>> possible_percent(102.0), possible_percent(159.0)
    (102.0, None)
    """
    return None if percent is None or not least <= percent <= MOST_PERCENT else percent


def implementations_of(mover: Mover) -> tuple[str, ...]:
    """Return the names of implementations of a mover, in order of preference."""
    return LIBRARY if mover is Mover.LIBRARY else (str(mover),)


def implementation_of(strategy: Strategy, available: Collection[str]) -> str | None:
    """Return the implementation that a strategy uses here, or None if there is none."""
    return next((name for name in implementations_of(strategy.mover) if name in available), None)


def applies(partition: Partition, memory_bound: bool) -> bool:
    """Return True if units are taken from a GEMM, which is limited by its bytes or is not.

    >>> applies(Partition(memory_bound_only=True), memory_bound=False)
    False
    """
    return memory_bound or not partition.memory_bound_only


def parse_gemm(text: str, dtype: str = "bfloat16") -> Gemm:
    """Read a tag of Table I (``cb1``), one of ``MEMORY_KERNELS`` (``bag``) or ``MxNxK`` (``8192x8192x8192``).

    Raises:
        ValueError: the text is neither.
    """
    if text in NAMED:
        return Gemm(*NAMED[text], dtype, tag=text)
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise ValueError(f"not a GEMM (value={text!r}, allowed={', '.join(NAMED)} or MxNxK)")
    return Gemm(int(match[1]), int(match[2]), int(match[3]), dtype)


class GemmColumns(Protocol):
    """Columns of a row of a result file that describe its GEMM."""

    @property
    def gemm(self) -> str: ...
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def gemm_of(row: GemmColumns) -> Gemm:
    """Return the GEMM of a row, by its name in the table if it has these sizes, divided or not."""
    plain = Gemm(row.m, row.n, row.k, row.dtype)
    tag, _, divisor = row.gemm.partition("/")
    if tag not in NAMED:
        return plain
    named = parse_gemm(tag, row.dtype).scaled(int(divisor or 1))
    return named if (named.m, named.n, named.k) == (row.m, row.n, row.k) else plain


def parse_workload(text: str, collective: Kind = Kind.ALL_GATHER, dtype: str = "bfloat16") -> Workload:
    """Read a pair as Table II of the ConCCL paper writes it: ``cb1_896M``, ``mb2_3.25G``, ``4096x4096x4096_64M``.

    Raises:
        ValueError: the text has another form.
    """
    gemm, separator, size = text.rpartition("_")
    if not separator:
        raise ValueError(f"not a pair (value={text!r}, allowed=GEMM_BYTES, for example cb1_896M)")
    return Workload(parse_gemm(gemm, dtype), collective, parse_bytes(size))

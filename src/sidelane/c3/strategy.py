"""Strategies as values, under which a GEMM and a collective run; and the arithmetic of their speedups.

``c3.launch`` and ``c3.overlap`` turn the value into launches, ``model.strategies`` into a prediction. ``c3.strategies``
registers all strategies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from enum import StrEnum

from sidelane.fields import an, at_least, one_of, optional, settle, switch, text, whole

LEAST_GAIN = 0.05
"""Ideal gain below which a percentage of it is meaningless."""


class Order(StrEnum):
    """Order of the releases. ``serial``: the collective follows the GEMM on one stream."""

    SERIAL = "serial"
    GEMM_FIRST = "gemm first"
    COLLECTIVE_FIRST = "collective first"


class Mover(StrEnum):
    """Mover of the collective's bytes.

    LIBRARY: kernels of the vendor's library; on CPUs its threads.
    LIBRARY_CTAS: the same kernels with several numbers of workgroups, one after another.
    DMA: copy engines, by Sidelane. LIBRARY_DMA: copy engines, by the library. SM: Sidelane's kernels.
    DMA_LEFT: DMA for an all-to-all that leaves own parts in the input. DMA_IN_PLACE: DMA for one in place.
    """

    LIBRARY = "library"
    LIBRARY_CTAS = "nccl_ctas"
    DMA = "dma"
    DMA_LEFT = "dma_left"
    DMA_IN_PLACE = "dma_in_place"
    LIBRARY_DMA = "nccl_ce"
    SM = "sm"

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names of a study's implementations of this mover, in order of preference."""
        return LIBRARY if self is Mover.LIBRARY else (str(self),)

    @property
    def takes_units(self) -> bool:
        """True if it runs on compute units, as the GEMM does."""
        return self in (Mover.LIBRARY, Mover.LIBRARY_CTAS, Mover.SM)

    @property
    def as_asked(self) -> bool:
        """True if it makes exactly the requested call. Others do less, or need the tensors elsewhere: they are never
        chosen for a caller, and their times count for no ideal.
        """
        return self not in (Mover.DMA_LEFT, Mover.DMA_IN_PLACE)


LIBRARY = ("nccl", "gloo")
"""The vendor library's own kernels: whichever of these exists on the device."""


class Means(StrEnum):
    """Way to make a GEMM do without units.

    SPLIT: they are shut off from it (green contexts), and a collective made of kernels runs on them alone. TARGET: its
    library is asked to count on fewer (cuBLAS). CARVE_OUT: the same request through torch. GRID: a kernel of ours has
    fewer blocks. Under these three no kernel owns the units. THREADS: on a CPU, threads of the computation.
    """

    SPLIT = "split"
    TARGET = "target"
    CARVE_OUT = "carve_out"
    GRID = "grid"
    THREADS = "threads"


_UNITS, _MEANS = optional(at_least(1)), one_of(Means)


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """Compute units that the GEMM does without for its whole run.

    Attributes:
        units: number of units, 1 or more. None: powers of two are swept, and the best is taken (ConCCL paper, V-B).
        memory_bound_only: a GEMM that is limited by its operations keeps all.
        means: way in which they are taken.
    """

    units: int | None = None
    memory_bound_only: bool = False
    means: Means = Means.SPLIT

    def __post_init__(self) -> None:
        settle(self, units=_UNITS, memory_bound_only=switch, means=_MEANS)

    def taken(self, swept: int, memory_bound: bool) -> int:
        """Return the units taken from a GEMM.

        Args:
            swept: current number of the sweep.
            memory_bound: the GEMM is limited by its bytes.

        >>> Partition(8, memory_bound_only=True).taken(0, memory_bound=False)
        0
        """
        if self.memory_bound_only and not memory_bound:
            return 0
        return swept if self.units is None else self.units


_ORDER, _MOVER, _PARTITION = one_of(Order), one_of(Mover), optional(an(Partition))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run a pair.

    Attributes:
        name: name in commands and result files.
        order: order of the releases.
        mover: mover of the collective's bytes.
        recipe: description in one line.
        priority: priority of the collective's stream: 1 puts it before the GEMM's wherever the device schedules.
        partition: units taken from the GEMM; None: it competes for all.
        preference: rank in the order of trials without measurements; the lowest is first.

    Raises:
        ValueError: a priority or a partition for a serial strategy, or a priority that is neither 0 nor 1.
    """

    name: str
    order: Order
    mover: Mover
    recipe: str
    priority: int = 0
    partition: Partition | None = None
    preference: int = 100

    def __post_init__(self) -> None:
        settle(self, name=text, order=_ORDER, mover=_MOVER, recipe=text)
        settle(self, priority=whole, partition=_PARTITION, preference=whole)
        if self.priority not in (0, 1):
            raise ValueError(f"Strategy: priority (value={self.priority}, allowed=0, 1)")
        if not self.concurrent and (self.priority or self.partition):
            raise ValueError(f"Strategy: {self.name}: priority, partition (allowed=none of both where it is serial)")

    @property
    def concurrent(self) -> bool:
        """True if both run at once."""
        return self.order is not Order.SERIAL

    def implementation(self, available: Collection[str]) -> str | None:
        """Return the implementation that this strategy uses here, or None if there is none."""
        return next((name for name in self.mover.implementations if name in available), None)


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchMode:
    """A strategy, and the number of units that it takes from the computation."""

    strategy: Strategy
    units: int = 0

    def __str__(self) -> str:
        return self.strategy.name + (f" with {self.units} units" if self.units else "")


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

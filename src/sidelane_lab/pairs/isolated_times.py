"""Measured times of GEMMs and collectives alone, and of a few pairs.

The module is pure. ``sidelane tune --study c3`` measures; from the pairs ``pairs.expected_times`` gets the hidden
shares of strategies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from sidelane.program.collective import Kind
from sidelane_lab.pairs.workload import Bound, Gemm, Workload

EFFICIENCY = 0.7
"""Share of peak compute, memory and network bandwidth that is reached (ConCCL paper, V-C)."""

SPLIT = "split"
"""Name in result files of units that are shut off from a GEMM (green contexts): ``Partition``."""

SENSITIVE = 0.5
"""Share of the proportional loss below which a GEMM is memory-bound: the one definition, of measured times and of
predicted ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTimes:
    """Times of a GEMM by the units that it does without.

    Attributes:
        gemm: shape of the GEMM.
        means: way in which units were taken (``MEANS`` of ``studies.tune.isolated_measure``).
        units: number of units of the device, or threads of a CPU rank.
        times_us: times in microseconds by units taken; 0 is the whole device.
    """

    gemm: Gemm
    means: str
    units: int
    times_us: Mapping[int, float]

    def slowdown(self) -> dict[int, float]:
        """Return the ratio to the time with all units, by units taken."""
        return {taken: us / self.times_us[0] for taken, us in sorted(self.times_us.items()) if taken}

    def sensitivity(self) -> float | None:
        """Return the share of the proportional slowdown that it has, at the most units taken; None if it is unknown.

        >>> GemmTimes(Gemm(8, 8, 8), "split", 100, {0: 10.0, 50: 15.0}).sensitivity()
        0.5
        """
        table = self.slowdown()
        if not table:
            return None
        taken = max(table)
        return (table[taken] - 1) / (self.units / (self.units - taken) - 1)

    def bound(self) -> Bound | None:
        """Return the limit of the GEMM: memory if fewer units cost it less than half of their share; None if unknown.

        >>> str(GemmTimes(Gemm(8, 8, 8), "split", 100, {0: 10.0, 50: 11.0}).bound())
        'memory'
        """
        share = self.sensitivity()
        return None if share is None else Bound.COMPUTE if share >= SENSITIVE else Bound.MEMORY


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Times of a collective of one size by the units that it is given.

    Attributes:
        collective: kind of the collective.
        nbytes: bytes as in :class:`Workload`.
        implementation: implementation that ran it, in its fastest variant.
        times_us: times in microseconds by units given; 0: as many as it likes.
    """

    collective: Kind
    nbytes: int
    implementation: str
    times_us: Mapping[int, float]

    def slowdown(self) -> dict[int, float]:
        """Return the ratio to the time with as many units as it likes, by units given."""
        return {given: us / self.times_us[0] for given, us in sorted(self.times_us.items()) if given}


@dataclasses.dataclass(frozen=True, slots=True)
class PairTimes:
    """Times of a GEMM and a collective under several strategies, measured in turns.

    Attributes:
        gemm, collective, nbytes: the pair.
        implementation: implementation of the collective.
        comm_us: time of the collective alone in microseconds.
        serial_us: time of one after the other in microseconds.
        times_us: times in microseconds by name of a strategy and units taken from the GEMM.
    """

    gemm: Gemm
    collective: Kind
    nbytes: int
    implementation: str
    comm_us: float
    serial_us: float
    times_us: Mapping[tuple[str, int], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Isolated:
    """Measurements of a machine.

    Attributes:
        tflops: rate of the fastest GEMM in TFLOP/s.
        memory_gbps: bandwidth of a kernel that reads and writes memory, in GB/s.
        gemms: curves of GEMMs; several of one shape by several means.
        collectives: curves of collectives.
        pairs: times of both at once.
        predicted: function that returns the limit of a GEMM without measured losses, where the machine is described.
    """

    tflops: float
    memory_gbps: float
    gemms: tuple[GemmTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    pairs: tuple[PairTimes, ...] = ()
    predicted: Callable[[Gemm], Bound] | None = dataclasses.field(default=None, compare=False)

    @property
    def flops_per_byte(self) -> float:
        """Operations that the machine does in the time of a byte: above it a GEMM is compute-bound."""
        return self.tflops * 1e3 / self.memory_gbps

    def bound(self, gemm: Gemm, us: float | None = None) -> tuple[Bound, str]:
        """Return the limit of a GEMM with the reason: by its measured loss with fewer units, else by the predicted one.

        Where neither is known, its time or its operations a byte stand in: the least possible bytes call some
        memory-bound GEMMs compute-bound.

        Args:
            gemm: GEMM to classify.
            us: its time alone, if known: then a GEMM without measured losses counts as limited by its bytes also if it
                is much slower than the fastest.
        """
        for curve in self.curves(gemm):
            if (limit := curve.bound()) is not None:
                return limit, f"fewer units cost it {curve.sensitivity():.2f} of their share"
        if self.predicted is not None:
            return self.predicted(gemm), "as predicted of the described machine"
        best = max(curve.gemm.flops / curve.times_us[0] for curve in self.gemms) if self.gemms else 0.0
        if us is not None and gemm.flops / us < EFFICIENCY * best:
            return Bound.MEMORY, f"{gemm.flops / us / 1e6:.0f} TFLOP/s, the fastest GEMM {best / 1e6:.0f}"
        bound = gemm.bound(self.flops_per_byte)
        return bound, f"{gemm.flops / gemm.nbytes:.0f} operations a byte, the machine {self.flops_per_byte:.0f}"

    def comm_us(self, workload: Workload, among: Collection[str] | None = None) -> float:
        """Return the time of a collective alone: of the nearest measured size, in proportion to its bytes.

        Args:
            workload: pair with the collective.
            among: implementations; None: all. The fastest counts.

        Raises:
            ValueError: no size of it was measured.
        """
        known = [c for c in self.collectives if c.collective is workload.collective]
        known = [c for c in known if among is None or c.implementation in among]
        curve = min(self._nearest(workload, known), key=lambda one: one.times_us[0])
        return curve.times_us[0] * workload.nbytes / curve.nbytes

    def gemm_table(self, gemm: Gemm, means: str | None = None, us: float | None = None) -> GemmTimes | None:
        """Return the profiled GEMM whose slowdowns hold for another: of its bound if there is one, then of the nearest
        size.

        Args:
            gemm: any GEMM.
            means: way in which it lost units; None: any.
            us: see :meth:`bound`.
        """
        able = [curve for curve in self.gemms if curve.slowdown() and means in (None, curve.means)]
        bound = self.bound(gemm, us)[0]
        alike = [curve for curve in able if self.bound(curve.gemm)[0] is bound]
        return min(alike or able, key=lambda one: apart(one.gemm.flops, gemm.flops), default=None)

    def comm_table(self, workload: Workload, among: Collection[str] | None = None) -> CollectiveTimes | None:
        """Return the profiled collective whose slowdowns hold for another: of the nearest size, and then the fastest.

        Args:
            workload: pair with the collective.
            among: implementations; None: all.
        """
        able = [c for c in self.collectives if c.collective is workload.collective and c.slowdown()]
        able = [c for c in able if among is None or c.implementation in among]
        return min(self._nearest(workload, able), key=lambda one: one.times_us[0]) if able else None

    def curves(self, gemm: Gemm) -> list[GemmTimes]:
        """Return the curves of this shape, those with the most points first."""
        same = [c for c in self.gemms if (c.gemm.m, c.gemm.n, c.gemm.k, c.gemm.dtype) == _shape(gemm)]
        return sorted(same, key=lambda one: (one.means == "grid", -len(one.times_us)))

    def _nearest(self, workload: Workload, curves: Sequence[CollectiveTimes]) -> list[CollectiveTimes]:
        if not curves:
            raise ValueError(f"comm_us: collective (value={workload.collective}, allowed={self.names()})")
        nearest = min(apart(curve.nbytes, workload.nbytes) for curve in curves)
        return [curve for curve in curves if apart(curve.nbytes, workload.nbytes) == nearest]

    def names(self) -> str:
        """Return the names of measured collectives, for errors."""
        return ", ".join(dict.fromkeys(str(curve.collective) for curve in self.collectives)) or "none was measured"


def _shape(gemm: Gemm) -> tuple[int, int, int, str]:
    return gemm.m, gemm.n, gemm.k, gemm.dtype


def apart(one: float, other: float) -> float:
    """Return the ratio of the greater of two numbers to the smaller."""
    return max(one, other) / min(one, other)

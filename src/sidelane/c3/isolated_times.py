"""Measured times of GEMMs and collectives alone, their classes, and the partition heuristic's choices.

The module is pure: numbers in, choices with reasons out. ``sidelane tune --study c3`` measures, and adds a few pairs,
from which ``c3.expected_times`` gets the hidden shares of strategies.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from sidelane.c3 import heuristic
from sidelane.c3.strategies import named
from sidelane.c3.strategy import Means
from sidelane.c3.workload import COMPARABLE, Bound, C3Class, Gemm, Workload, classify
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

SENSITIVE = 0.5
"""Share of the proportional loss below which a GEMM counts as limited by its bytes."""

LATENCY_FACTOR = 2.0
"""Factor over the time of the smallest size below which a collective counts as limited by its latency."""


class Limit(StrEnum):
    """Main part of a collective's time."""

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTimes:
    """Times of a GEMM by the units that it does without.

    Attributes:
        gemm: shape of the GEMM.
        means: way in which units were taken (``strategy.Means``, or ``grid``).
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
    """

    tflops: float
    memory_gbps: float
    gemms: tuple[GemmTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    pairs: tuple[PairTimes, ...] = ()

    @property
    def flops_per_byte(self) -> float:
        """Operations that the machine does in the time of a byte: above it a GEMM is compute-bound."""
        return self.tflops * 1e3 / self.memory_gbps

    def bound(self, gemm: Gemm, us: float | None = None) -> tuple[Bound, str]:
        """Return the limit of a GEMM with the reason: by its measured loss with fewer units, else its operations a
        byte.

        The least possible bytes call some memory-bound GEMMs compute-bound; the loss of units does not.

        Args:
            gemm: GEMM to classify.
            us: its time alone, if known: then a GEMM without measured losses counts as limited by its bytes also if it
                is much slower than the fastest.
        """
        known = [curve.sensitivity() for curve in self._curves(gemm)]
        found = next((one for one in known if one is not None), None)
        if found is not None:
            bound = Bound.COMPUTE if found >= SENSITIVE else Bound.MEMORY
            return bound, f"fewer units cost it {found:.2f} of their share"
        best = max(curve.gemm.flops / curve.times_us[0] for curve in self.gemms) if self.gemms else 0.0
        if us is not None and gemm.flops / us < heuristic.EFFICIENCY * best:
            return Bound.MEMORY, f"{gemm.flops / us / 1e6:.0f} TFLOP/s, the fastest GEMM {best / 1e6:.0f}"
        bound = gemm.bound(self.flops_per_byte)
        return bound, f"{gemm.flops / gemm.nbytes:.0f} operations a byte, the machine {self.flops_per_byte:.0f}"

    def gemm_us(self, gemm: Gemm) -> float:
        """Return the time of a GEMM alone: measured, or at the rate of the GEMM whose table it takes.

        Without a table it is the roofline of the ConCCL paper (V-C), 70% of the fastest rate: on two H200s that
        was 40% too long for GEMMs that were not measured, and predicted hidden collectives that were not hidden.
        """
        for curve in self._curves(gemm):
            return curve.times_us[0]
        table = self.gemm_table(gemm)
        if table is not None:
            return table.times_us[0] * gemm.flops / table.gemm.flops
        return heuristic.expected_gemm_us(gemm.flops, gemm.nbytes, self.tflops, self.memory_gbps)

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
        return min(alike or able, key=lambda one: _apart(one.gemm.flops, gemm.flops), default=None)

    def comm_table(self, workload: Workload, among: Collection[str] | None = None) -> CollectiveTimes | None:
        """Return the profiled collective whose slowdowns hold for another: of the nearest size, and then the fastest.

        Args:
            workload: pair with the collective.
            among: implementations; None: all.
        """
        able = [c for c in self.collectives if c.collective is workload.collective and c.slowdown()]
        able = [c for c in able if among is None or c.implementation in among]
        return min(self._nearest(workload, able), key=lambda one: one.times_us[0]) if able else None

    def kind(self, workload: Workload) -> C3Class:
        """Return the class of a pair: G-long, C-long or GC-equal."""
        return classify(self.gemm_us(workload.gemm), self.comm_us(workload))

    def limit(self, collective: Kind, nbytes: int) -> Limit:
        """Return the limit of a collective of some size: latency or bandwidth.

        Raises:
            ValueError: no size of it was measured.
        """
        known = [curve for curve in self.collectives if curve.collective is collective]
        if not known:
            raise ValueError(f"limit: collective (value={collective}, allowed={self._names()})")
        smallest = min(known, key=lambda one: (one.nbytes, one.times_us[0]))
        nearest = min(known, key=lambda one: (_apart(one.nbytes, nbytes), one.times_us[0]))
        within = nearest.times_us[0] < LATENCY_FACTOR * smallest.times_us[0]
        return Limit.LATENCY if within else Limit.BANDWIDTH

    def allocate(self, workload: Workload, implementation: str | None = None) -> heuristic.UnitAllocation:
        """Return the units for a collective next to a GEMM, by the measured look-up tables (ConCCL paper, V-C).

        Args:
            workload: pair to run.
            implementation: implementation of the collective; None: the fastest that has a table.

        Raises:
            ValueError: no GEMM of its bound, or no size of the collective, was measured with fewer units.
        """
        bound, why = self.bound(workload.gemm)
        gemm = self.gemm_table(workload.gemm)
        comm = self.comm_table(workload, None if implementation is None else (implementation,))
        if gemm is None or comm is None:
            what = "GEMM" if gemm is None else f"{workload.collective}"
            raise ValueError(f"allocate: no {what} was measured with fewer units (value={workload.name})")
        shared = sorted(set(gemm.slowdown()) & set(comm.slowdown()))
        slower = self.slowed_beside(workload.collective, comm.implementation)
        found = heuristic.allocate(
            self.gemm_us(workload.gemm),
            slower * self.comm_us(workload, (comm.implementation,)),
            {units: gemm.slowdown()[units] for units in shared},
            {units: comm.slowdown()[units] for units in shared},
        )
        like = f"{comm.implementation} {comm.collective} {format_bytes(comm.nbytes)}"
        beside = f", which takes {slower:.2f} of its time beside a GEMM" if slower > 1 else ""
        reason = f"{found.reason}{beside}; {bound}-bound ({why}), as {gemm.gemm.name} by {gemm.means} and {like}"
        return dataclasses.replace(found, reason=reason)

    def slowed_beside(self, collective: Kind, implementation: str) -> float:
        """Return the factor by which a GEMM slows a collective with units of its own: memory and links are shared.

        It is the median over measured pairs in which the collective was the longer part by far; of the same collective,
        if there are such. It is 1 without such pairs, as the ConCCL paper's heuristic assumes.
        """
        found: dict[Kind, list[float]] = {}
        for pair in self.pairs:
            table = self.comm_table(Workload(pair.gemm, pair.collective, pair.nbytes), (implementation,))
            gemm = self.gemm_table(pair.gemm, Means.SPLIT)
            if pair.implementation != implementation or table is None or gemm is None:
                continue
            for (name, units), time_us in pair.times_us.items():
                partition = named(name).partition
                if not units or partition is None or partition.means is not Means.SPLIT:
                    continue
                given, taken = table.slowdown().get(units), gemm.slowdown().get(units)
                if given is None or taken is None or not named(name).mover.takes_units:
                    continue
                if given * pair.comm_us > COMPARABLE * taken * (pair.serial_us - pair.comm_us):
                    found.setdefault(pair.collective, []).append(time_us / (given * pair.comm_us))
        ratios = found.get(collective) or [one for alike in found.values() for one in alike]
        return max(1.0, statistics.median(ratios)) if ratios else 1.0

    def spare(self, gemm: Gemm) -> heuristic.Spared:
        """Return the units to take from a GEMM next to copy engines (ConCCL paper, VI-G): by the memory-bound table."""
        bound, why = self.bound(gemm)
        tables = [c for c in self.gemms if c.slowdown() and self.bound(c.gemm)[0] is Bound.MEMORY]
        nearest = min(tables, key=lambda one: _apart(one.gemm.flops, gemm.flops), default=None)
        found = heuristic.spare(bound is Bound.MEMORY, {} if nearest is None else nearest.slowdown())
        return dataclasses.replace(found, reason=f"{found.reason} ({why})")

    def _curves(self, gemm: Gemm) -> list[GemmTimes]:
        """Return the curves of this shape, those with the most points first."""
        same = [c for c in self.gemms if (c.gemm.m, c.gemm.n, c.gemm.k, c.gemm.dtype) == _shape(gemm)]
        return sorted(same, key=lambda one: (one.means == "grid", -len(one.times_us)))

    def _nearest(self, workload: Workload, curves: Sequence[CollectiveTimes]) -> list[CollectiveTimes]:
        if not curves:
            raise ValueError(f"comm_us: collective (value={workload.collective}, allowed={self._names()})")
        nearest = min(_apart(curve.nbytes, workload.nbytes) for curve in curves)
        return [curve for curve in curves if _apart(curve.nbytes, workload.nbytes) == nearest]

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(str(curve.collective) for curve in self.collectives)) or "none was measured"


def _shape(gemm: Gemm) -> tuple[int, int, int, str]:
    return gemm.m, gemm.n, gemm.k, gemm.dtype


def _apart(one: float, other: float) -> float:
    """Return the ratio of the greater of two numbers to the smaller."""
    return max(one, other) / min(one, other)

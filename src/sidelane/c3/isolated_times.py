"""What was measured of GEMMs and collectives alone, and what follows: classes, and the partition heuristic's choices.

Pure: numbers in, choices with reasons out. ``sidelane tune --study c3`` measures, with a
few pairs among it, from which ``c3.expected`` has what strategies hide.
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
"""A GEMM that loses less than this share of what its lost units would cost in proportion is limited by its bytes."""

LATENCY_FACTOR = 2.0
"""A collective that takes less than so many times what the smallest one takes is limited by its latency."""


class Limit(StrEnum):
    """What a collective's time consists of, mostly."""

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTimes:
    """A GEMM by the units that it does without.

    Attributes:
        gemm: its shape.
        means: how they were taken (``strategy.Means``, or ``grid``).
        units: of the device, or threads of a CPU rank.
        times_us: by units taken; 0 is the whole device.
    """

    gemm: Gemm
    means: str
    units: int
    times_us: Mapping[int, float]

    def slowdown(self) -> dict[int, float]:
        """Times over that with all units, by units taken."""
        return {taken: us / self.times_us[0] for taken, us in sorted(self.times_us.items()) if taken}

    def sensitivity(self) -> float | None:
        """How much of the slowdown in proportion to the units lost it has, at the most that were taken; None: unknown.

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
    """A collective of one size by the units that it is given.

    Attributes:
        collective: which.
        nbytes: as in :class:`Workload`.
        implementation: who ran it, in the variant that was fastest.
        times_us: by units given; 0: as many as it likes.
    """

    collective: Kind
    nbytes: int
    implementation: str
    times_us: Mapping[int, float]

    def slowdown(self) -> dict[int, float]:
        """Times over that with as many units as it likes, by units given."""
        return {given: us / self.times_us[0] for given, us in sorted(self.times_us.items()) if given}


@dataclasses.dataclass(frozen=True, slots=True)
class PairTimes:
    """A GEMM and a collective under several strategies, measured in turns.

    Attributes:
        gemm, collective, nbytes: the pair.
        implementation: who ran the collective.
        comm_us: of the collective alone.
        serial_us: of one after the other.
        times_us: by name of a strategy and units taken from the GEMM.
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
    """Everything measured of a machine.

    Attributes:
        tflops: of the fastest GEMM.
        memory_gbps: that a kernel reads and writes.
        gemms: the curves; several of one shape by several means.
        collectives: the curves.
        pairs: both at once.
    """

    tflops: float
    memory_gbps: float
    gemms: tuple[GemmTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    pairs: tuple[PairTimes, ...] = ()

    @property
    def flops_per_byte(self) -> float:
        """Operations that the machine does while a byte moves: above it a GEMM is compute-bound."""
        return self.tflops * 1e3 / self.memory_gbps

    def bound(self, gemm: Gemm, us: float | None = None) -> tuple[Bound, str]:
        """What limits a GEMM, and why: how it took the loss of units if that was measured, else its operations a byte.

        The least possible bytes call some memory-bound GEMMs compute-bound; the loss of units does not.

        Args:
            gemm: which.
            us: that it takes alone, if that is known: then one that was not measured with fewer units is limited by its
                bytes also where it is much slower than the fastest.
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
        """Time of a GEMM alone: measured, else at the rate of the one whose table it takes.

        Where there is no table, by the roofline of the ConCCL paper (V-C), 70% of the fastest rate: which on two H200s
        was 40% too long for GEMMs that were not measured, and hid collectives that were not hidden.
        """
        for curve in self._curves(gemm):
            return curve.times_us[0]
        table = self.gemm_table(gemm)
        if table is not None:
            return table.times_us[0] * gemm.flops / table.gemm.flops
        return heuristic.expected_gemm_us(gemm.flops, gemm.nbytes, self.tflops, self.memory_gbps)

    def comm_us(self, workload: Workload, among: Collection[str] | None = None) -> float:
        """Time of a collective alone: of the nearest size that was measured, in proportion to its bytes.

        Args:
            workload: the pair.
            among: implementations; None: all. The fastest counts.

        Raises:
            ValueError: no size of it was measured.
        """
        known = [c for c in self.collectives if c.collective is workload.collective]
        known = [c for c in known if among is None or c.implementation in among]
        curve = min(self._nearest(workload, known), key=lambda one: one.times_us[0])
        return curve.times_us[0] * workload.nbytes / curve.nbytes

    def gemm_table(self, gemm: Gemm, means: str | None = None, us: float | None = None) -> GemmTimes | None:
        """The profiled GEMM whose slowdowns hold for another: of its bound if there is one, then of the nearest size.

        Args:
            gemm: any.
            means: by which it lost units; None: any.
            us: see :meth:`bound`.
        """
        able = [curve for curve in self.gemms if curve.slowdown() and means in (None, curve.means)]
        bound = self.bound(gemm, us)[0]
        alike = [curve for curve in able if self.bound(curve.gemm)[0] is bound]
        return min(alike or able, key=lambda one: _apart(one.gemm.flops, gemm.flops), default=None)

    def comm_table(self, workload: Workload, among: Collection[str] | None = None) -> CollectiveTimes | None:
        """The profiled collective whose slowdowns hold for one: of the nearest size, and then the fastest.

        Args:
            workload: the pair.
            among: implementations; None: all.
        """
        able = [c for c in self.collectives if c.collective is workload.collective and c.slowdown()]
        able = [c for c in able if among is None or c.implementation in among]
        return min(self._nearest(workload, able), key=lambda one: one.times_us[0]) if able else None

    def kind(self, workload: Workload) -> C3Class:
        """G-long, C-long or GC-equal."""
        return classify(self.gemm_us(workload.gemm), self.comm_us(workload))

    def limit(self, collective: Kind, nbytes: int) -> Limit:
        """Whether a size of a collective is limited by latency or by bandwidth.

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
        """Units for a collective next to a GEMM, by the look-up tables that were measured (ConCCL paper, V-C).

        Args:
            workload: the pair.
            implementation: whose collective; None: the fastest that has a table.

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
        """By how much a GEMM slows a collective that has units of its own: memory and links are shared.

        The median over pairs that were measured, of times in which the collective was the longer part by far; of the
        same collective, if there are such. 1 where there are none: the ConCCL paper's heuristic takes it so.
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
        """Units to take from a GEMM next to copy engines (ConCCL paper, VI-G): needs the memory-bound table only."""
        bound, why = self.bound(gemm)
        tables = [c for c in self.gemms if c.slowdown() and self.bound(c.gemm)[0] is Bound.MEMORY]
        nearest = min(tables, key=lambda one: _apart(one.gemm.flops, gemm.flops), default=None)
        found = heuristic.spare(bound is Bound.MEMORY, {} if nearest is None else nearest.slowdown())
        return dataclasses.replace(found, reason=f"{found.reason} ({why})")

    def _curves(self, gemm: Gemm) -> list[GemmTimes]:
        """Of this shape, those with the most points first."""
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
    """How many times the greater of two is the smaller."""
    return max(one, other) / min(one, other)

"""Times of GEMMs and collectives alone, and of a few pairs: of a machine, and of the file that holds them.

``sidelane tune --study c3`` measures them and keeps a file of a user; heuristics go by them (``pairs.heuristics``).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sidelane.choice.key import key_here
from sidelane.choice.store import user_file
from sidelane.program.collective import Kind
from sidelane.user_files import bytes_of, json_of
from sidelane_lab.harness.files import text_of
from sidelane_lab.pairs.workload import Bound, Gemm, GemmColumns, Workload, gemm_of

EFFICIENCY = 0.7
"""Share of peak compute, memory and network bandwidth that is reached (ConCCL paper, V-C)."""

SPLIT = "split"
"""Name in result files of units that are shut off from a GEMM (green contexts): ``Partition``."""

SENSITIVE = 0.5
"""Share of the proportional loss below which a GEMM is memory-bound: the one definition, of measured times and of
predicted ones. With counted bytes it is the share of the bandwidth from which one can be."""

GEMM, COLLECTIVE, MEMORY, BESIDE, PAIR = "gemm", "collective", "memory", "beside", "pair"
COUNTERS = "counters"
Shape = tuple[int, int, int, str]
SERIAL = "serial"
"""``means`` of the row of a pair with which the other rows of the pair are compared."""


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
        counted: bytes that GEMMs move to and from memory, and percent of hits in the last-level cache, and
            GB/s, by counters.
        predicted: function that returns the limit of a GEMM without measured losses, where the machine is described.
    """

    tflops: float
    memory_gbps: float
    gemms: tuple[GemmTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    pairs: tuple[PairTimes, ...] = ()
    counted: Mapping[Shape, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    predicted: Callable[[Gemm], Bound] | None = dataclasses.field(default=None, compare=False)

    @property
    def flops_per_byte(self) -> float:
        """Operations that the machine does in the time of a byte: above it a GEMM is compute-bound."""
        return self.tflops * 1e3 / self.memory_gbps

    def bound(self, gemm: Gemm) -> tuple[Bound, str]:
        """Return the limit of a GEMM with the reason: by its counted bytes, else by its measured loss with fewer units,
        else by the predicted one.

        Where none is known, the least possible bytes stand in, which call some memory-bound GEMMs compute-bound.
        """
        if shape_of(gemm) in self.counted:
            moved, hits, gbps = self.counted[shape_of(gemm)]
            why = f"{gemm.flops / moved:.0f} operations a byte by counters, {hits:.0f}% in the cache"
            why += f", {100 * gbps / self.memory_gbps:.0f}% of the bandwidth; the machine {self.flops_per_byte:.0f}"
            idle = gbps < SENSITIVE * self.memory_gbps  # limited by neither, as bags by their rows: units count
            return Bound.COMPUTE if idle else gemm.bound(self.flops_per_byte, moved), why
        for curve in self.curves(gemm):
            if (limit := curve.bound()) is not None:
                return limit, f"fewer units cost it {curve.sensitivity():.2f} of their share"
        if self.predicted is not None:
            return self.predicted(gemm), "as predicted of the described machine"
        why = f"{gemm.flops / gemm.nbytes:.0f} operations a byte of the least possible; the machine"
        return gemm.bound(self.flops_per_byte), f"{why} {self.flops_per_byte:.0f}"

    def bytes_of(self, gemm: Gemm) -> float:
        """Return the bytes of a GEMM: counted ones, else the least possible."""
        return self.counted.get(shape_of(gemm), (gemm.nbytes,))[0]

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

    def gemm_table(self, gemm: Gemm, means: str | None = None) -> GemmTimes | None:
        """Return the profiled GEMM whose slowdowns hold for another: of its bound if there is one, then of the nearest
        size.

        Args:
            gemm: any GEMM.
            means: way in which it lost units; None: any.
        """
        able = [curve for curve in self.gemms if curve.slowdown() and means in (None, curve.means)]
        bound = self.bound(gemm)[0]
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
        same = [c for c in self.gemms if shape_of(c.gemm) == shape_of(gemm)]
        return sorted(same, key=lambda one: (one.means == "grid", -len(one.times_us)))

    def _nearest(self, workload: Workload, curves: Sequence[CollectiveTimes]) -> list[CollectiveTimes]:
        if not curves:
            raise ValueError(f"comm_us: collective (value={workload.collective}, allowed={self.names()})")
        nearest = min(apart(curve.nbytes, workload.nbytes) for curve in curves)
        return [curve for curve in curves if apart(curve.nbytes, workload.nbytes) == nearest]

    def names(self) -> str:
        """Return the names of measured collectives, for errors."""
        return ", ".join(dict.fromkeys(str(curve.collective) for curve in self.collectives)) or "none was measured"


def shape_of(gemm: Gemm) -> Shape:
    """Return what GEMMs of one shape have in common."""
    return gemm.m, gemm.n, gemm.k, gemm.dtype


def apart(one: float, other: float) -> float:
    """Return the ratio of the greater of two numbers to the smaller."""
    return max(one, other) / min(one, other)


class CurvePoint(GemmColumns, Protocol):
    """A row of the file, as ``sidelane tune --study c3`` writes it."""

    @property
    def what(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def implementation(self) -> str: ...
    @property
    def means(self) -> str: ...
    @property
    def units(self) -> int: ...
    @property
    def device_units(self) -> int: ...
    @property
    def time_us(self) -> float | None: ...
    @property
    def alone_us(self) -> float | None: ...
    @property
    def gbps(self) -> float | None: ...
    @property
    def moved_bytes(self) -> float | None: ...
    @property
    def hit_percent(self) -> float | None: ...


def isolated_file(device_type: str, ranks: int) -> Path | None:
    """Return the user's file of this machine; None without a home."""
    from sidelane.machine import local  # imports torch, which the command line does without

    return user_file(key_here(device_type, ranks).between(local.peers_here(device_type)), "{}-c3.json")


def isolated_text(path: Path | None) -> str:
    """Return the text of a user's file; "" if there is none that this user can read."""
    try:
        return "" if path is None else bytes_of(path).decode()
    except OSError:
        return ""
    except ValueError as problem:
        raise ValueError(f"{path}: cannot be read as text: {problem}") from problem


def isolated_times(path: Path | None, device_type: str, ranks: int) -> Isolated | None:
    """Return the contents of a file of isolated times; None: the user's of this machine, which need not exist.

    Raises:
        ValueError: there is no such file, it has another format, or lacks measurements.
    """
    if path is None:
        path = isolated_file(device_type, ranks)
        text = isolated_text(path)
        return parse_isolated(text, str(path)) if text else None
    if not path.exists():
        raise ValueError(f"isolated times: no such file (value={str(path)!r}, allowed=of sidelane tune --study c3)")
    return parse_isolated(text_of(path), str(path))


def parse_isolated(text: str, where: str) -> Isolated:
    """Return the contents of a file from its text.

    Args:
        text: text of the file.
        where: path of the file, for errors.

    Raises:
        ValueError: it has another format, or lacks measurements.
    """
    try:
        content = json_of(text)
        if content["study"] != "isolated":
            raise KeyError("study")
        return isolated_of([types.SimpleNamespace(**row) for row in content["rows"]])
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as problem:
        raise ValueError(
            f"isolated times: not such a file (value={where!r}, allowed=of sidelane tune --study c3): {problem!r}"
        ) from None


def isolated_of(rows: Sequence[CurvePoint]) -> Isolated:
    """Return the curves of measured rows.

    Raises:
        ValueError: rows of GEMMs or of the memory are missing.
    """
    timed = [row for row in rows if row.time_us is not None]
    gemms = tuple(_gemms([row for row in timed if row.what == GEMM]))
    memory = max((row.gbps for row in timed if row.what == MEMORY and row.gbps), default=0.0)
    if not gemms or not memory:
        raise ValueError("isolated_of: rows (value=none of a GEMM, or none of the memory; sidelane tune --study c3)")
    tflops = max(curve.gemm.flops / curve.times_us[0] / 1e6 for curve in gemms)
    collectives = tuple(_collectives([row for row in timed if row.what == COLLECTIVE]))
    pairs = tuple(_pairs([row for row in timed if row.what == PAIR]))
    counted = {
        shape_of(gemm_of(row)): (row.moved_bytes, row.hit_percent or 0.0, row.gbps or 0.0)
        for row in timed
        if row.what == COUNTERS and row.moved_bytes
    }
    return Isolated(tflops, memory, gemms, collectives, pairs, counted)


def _gemms(rows: Sequence[CurvePoint]) -> Iterable[GemmTimes]:
    for (*_, means), same in _alike(rows, "m", "n", "k", "dtype", "means"):
        times = {row.units: row.time_us for row in same if row.time_us is not None}
        if 0 in times:
            yield GemmTimes(gemm_of(same[0]), str(means), same[0].device_units, times)


def _collectives(rows: Sequence[CurvePoint]) -> Iterable[CollectiveTimes]:
    for (collective, nbytes, implementation), same in _alike(rows, "collective", "bytes", "implementation"):
        times: dict[int, float] = {}
        for row in same:  # the fastest of several variants
            if row.time_us is not None:
                times[row.units] = min(row.time_us, times.get(row.units, row.time_us))
        if 0 in times:
            yield CollectiveTimes(Kind(collective), int(nbytes), str(implementation), times)


def _pairs(rows: Sequence[CurvePoint]) -> Iterable[PairTimes]:
    by = _alike(rows, "m", "n", "k", "dtype", "collective", "bytes", "implementation")
    for (*_, collective, nbytes, implementation), same in by:
        serial = next((row for row in same if row.means == SERIAL), None)
        if serial is None or serial.time_us is None or serial.alone_us is None:
            continue
        others = [row for row in same if row.means != SERIAL]
        times = {(row.means, row.units): row.time_us for row in others if row.time_us is not None}
        comm_us, serial_us = serial.alone_us, serial.time_us
        yield PairTimes(gemm_of(serial), Kind(collective), int(nbytes), str(implementation), comm_us, serial_us, times)


def _alike(rows: Sequence[CurvePoint], *names: str) -> Iterator[tuple[tuple[Any, ...], list[CurvePoint]]]:
    found: dict[tuple[Any, ...], list[CurvePoint]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return iter(found.items())

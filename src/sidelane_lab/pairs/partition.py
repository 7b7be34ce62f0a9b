"""The partition heuristic of the ConCCL paper (V-C and VI-G): units for a collective, and units that a GEMM spares.

Pure functions of numbers with reasons: ``allocate`` and ``spare`` of look-up tables, ``units_for`` and
``units_to_spare`` of what a machine has measured. ``model/heuristic.py`` has the tables of a described machine. The
library chooses by expected times instead (``c3.expected_times``).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from enum import StrEnum

from sidelane.c3.heuristic import EFFICIENCY
from sidelane.c3.isolated_times import Isolated, apart
from sidelane.c3.strategies import named
from sidelane.c3.strategy import Means
from sidelane.c3.workload import COMPARABLE, Bound, C3Class, Gemm, Workload, classify
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

TIE = 1.001
"""Ratio of times below which two allocations count as equal."""

LATENCY_FACTOR = 2.0
"""Factor over the time of the smallest size below which a collective counts as limited by its latency."""


class Limit(StrEnum):
    """Main part of a collective's time."""

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"


@dataclasses.dataclass(frozen=True, slots=True)
class UnitAllocation:
    """Units for a collective.

    Attributes:
        units: chosen number of units: the fewest of ``equal``.
        equal: allocations that are expected to be best, and equally good.
        expected_us: expected time of both together in microseconds, by allocation.
        reason: reason of the choice, in words.
    """

    units: int
    equal: tuple[int, ...]
    expected_us: tuple[tuple[int, float], ...]
    reason: str


def allocate(
    gemm_us: float, comm_us: float, gemm_slowdown: Mapping[int, float], comm_slowdown: Mapping[int, float]
) -> UnitAllocation:
    """Take the allocation with the least ``max(GEMM, collective)`` (ConCCL paper, V-C).

    Args:
        gemm_us: expected time of the GEMM with all units (:func:`expected_gemm_us`).
        comm_us: expected time of the collective with the units that it takes alone (:func:`expected_comm_us`).
        gemm_slowdown: slowdown of a profiled GEMM of the same bound, by the units that it lost; the look-up table.
        comm_slowdown: slowdown of the profiled collective of the nearer size, by the units that it has.

    Raises:
        ValueError: the two tables are empty, or not of the same units.

    >>> allocate(1000.0, 900.0, {32: 1.1, 64: 1.25}, {32: 1.5, 64: 1.0}).reason
    '64 units: GEMM 1000 x 1.25, collective 900 x 1.00 = 1250 us expected, next 32 units 1350 us'
    """
    if not gemm_slowdown or set(gemm_slowdown) != set(comm_slowdown):
        units = sorted(gemm_slowdown), sorted(comm_slowdown)
        raise ValueError(f"allocate: tables must be of the same units (value={units[0]}, {units[1]})")
    expected = {n: max(gemm_us * gemm_slowdown[n], comm_us * comm_slowdown[n]) for n in sorted(gemm_slowdown)}
    least = min(expected.values())
    equal = tuple(n for n, us in expected.items() if us <= least * TIE)
    chosen = equal[0]
    reason = (
        f"{chosen} units: GEMM {gemm_us:.0f} x {gemm_slowdown[chosen]:.2f}, "
        f"collective {comm_us:.0f} x {comm_slowdown[chosen]:.2f} = {expected[chosen]:.0f} us expected"
    )
    others = [n for n in expected if n != chosen]
    if others:
        following = min(others, key=lambda n: expected[n])
        reason += f", next {following} units {expected[following]:.0f} us"
    return UnitAllocation(chosen, equal, tuple(expected.items()), reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Spared:
    """Units that a GEMM next to copy engines does without, with the reason."""

    units: int
    reason: str


def spare(memory_bound: bool, slowdown: Mapping[int, float]) -> Spared:
    """Return the units to take from a GEMM whose collective needs none (ConCCL paper, VI-G).

    Args:
        memory_bound: the GEMM is limited by its bytes; one that is limited by its operations keeps all.
        slowdown: slowdown of a profiled memory-bound GEMM by the units that it lost, below 1 if it is faster. No other
            table is needed.

    >>> spare(True, {8: 0.95, 16: 0.97, 32: 1.0}).reason
    '8 units fewer: a memory-bound GEMM takes 0.95 of its time'
    """
    if not memory_bound:
        return Spared(0, "no units: the GEMM is compute-bound")
    least = min((1.0, *slowdown.values()))
    if least * TIE >= 1.0:
        return Spared(0, "no units: a memory-bound GEMM gains nothing here by having fewer")
    units = min(n for n, slower in slowdown.items() if slower <= least * TIE)
    return Spared(units, f"{units} units fewer: a memory-bound GEMM takes {slowdown[units]:.2f} of its time")


def expected_gemm_us(flops: float, traffic_bytes: float, peak_tflops: float, memory_gbps: float) -> float:
    """Return the roofline time of a GEMM in microseconds at ``EFFICIENCY`` of the peaks."""
    return max(flops / (peak_tflops * EFFICIENCY * 1e6), traffic_bytes / (memory_gbps * EFFICIENCY * 1e3))


def expected_comm_us(sent_bytes: float, peak_gbps: float) -> float:
    """Return the roofline time of a collective in microseconds, from a GPU's sent bytes and its links' bandwidth."""
    return sent_bytes / (peak_gbps * EFFICIENCY * 1e3)


def units_for(known: Isolated, workload: Workload, implementation: str | None = None) -> UnitAllocation:
    """Return the units for a collective next to a GEMM, by the measured look-up tables (ConCCL paper, V-C).

    Args:
        known: measurements of the machine.
        workload: pair to run.
        implementation: implementation of the collective; None: the fastest that has a table.

    Raises:
        ValueError: no GEMM of its bound, or no size of the collective, was measured with fewer units.
    """
    bound, why = known.bound(workload.gemm)
    gemm = known.gemm_table(workload.gemm)
    comm = known.comm_table(workload, None if implementation is None else (implementation,))
    if gemm is None or comm is None:
        what = "GEMM" if gemm is None else f"{workload.collective}"
        raise ValueError(f"allocate: no {what} was measured with fewer units (value={workload.name})")
    shared = sorted(set(gemm.slowdown()) & set(comm.slowdown()))
    slower = slowed_beside(known, workload.collective, comm.implementation)
    found = allocate(
        expected_time_us(known, workload.gemm),
        slower * known.comm_us(workload, (comm.implementation,)),
        {units: gemm.slowdown()[units] for units in shared},
        {units: comm.slowdown()[units] for units in shared},
    )
    like = f"{comm.implementation} {comm.collective} {format_bytes(comm.nbytes)}"
    beside = f", which takes {slower:.2f} of its time beside a GEMM" if slower > 1 else ""
    reason = f"{found.reason}{beside}; {bound}-bound ({why}), as {gemm.gemm.name} by {gemm.means} and {like}"
    return dataclasses.replace(found, reason=reason)


def slowed_beside(known: Isolated, collective: Kind, implementation: str) -> float:
    """Return the factor by which a GEMM slows a collective with units of its own: memory and links are shared.

    It is the median over measured pairs in which the collective was the longer part by far; of the same collective,
    if there are such. It is 1 without such pairs, as the ConCCL paper's heuristic assumes.
    """
    found: dict[Kind, list[float]] = {}
    for pair in known.pairs:
        table = known.comm_table(Workload(pair.gemm, pair.collective, pair.nbytes), (implementation,))
        gemm = known.gemm_table(pair.gemm, Means.SPLIT)
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


def units_to_spare(known: Isolated, gemm: Gemm) -> Spared:
    """Return the units to take from a GEMM next to copy engines (ConCCL paper, VI-G): by the memory-bound table."""
    bound, why = known.bound(gemm)
    tables = [c for c in known.gemms if c.slowdown() and known.bound(c.gemm)[0] is Bound.MEMORY]
    nearest = min(tables, key=lambda one: apart(one.gemm.flops, gemm.flops), default=None)
    found = spare(bound is Bound.MEMORY, {} if nearest is None else nearest.slowdown())
    return dataclasses.replace(found, reason=f"{found.reason} ({why})")


def expected_time_us(known: Isolated, gemm: Gemm) -> float:
    """Return the time of a GEMM alone: measured, or at the rate of the GEMM whose table it takes.

    Without a table it is the roofline of the ConCCL paper (V-C), 70% of the fastest rate: on two H200s that
    was 40% too long for GEMMs that were not measured, and predicted hidden collectives that were not hidden.
    """
    for curve in known.curves(gemm):
        return curve.times_us[0]
    table = known.gemm_table(gemm)
    if table is not None:
        return table.times_us[0] * gemm.flops / table.gemm.flops
    return expected_gemm_us(gemm.flops, gemm.nbytes, known.tflops, known.memory_gbps)


def class_of(known: Isolated, workload: Workload) -> C3Class:
    """Return the class of a pair: G-long, C-long or GC-equal."""
    return classify(expected_time_us(known, workload.gemm), known.comm_us(workload))


def limit_of(known: Isolated, collective: Kind, nbytes: int) -> Limit:
    """Return the limit of a collective of some size: latency or bandwidth.

    Raises:
        ValueError: no size of it was measured.
    """
    curves = [curve for curve in known.collectives if curve.collective is collective]
    if not curves:
        raise ValueError(f"limit: collective (value={collective}, allowed={known.names()})")
    smallest = min(curves, key=lambda one: (one.nbytes, one.times_us[0]))
    nearest = min(curves, key=lambda one: (apart(one.nbytes, nbytes), one.times_us[0]))
    within = nearest.times_us[0] < LATENCY_FACTOR * smallest.times_us[0]
    return Limit.LATENCY if within else Limit.BANDWIDTH

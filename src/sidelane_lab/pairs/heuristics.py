"""Heuristics for a GEMM and a collective at once.

Pure functions of numbers, with reasons. They go by isolated times of a machine, measured or predicted
(``pairs.isolated``):

* the order of launches, by workgroups (ConCCL paper, V-C; for several kernels, VII-B1): ``launch_order``;
* units for collectives, by look-up tables (V-C, VI-G): ``allocate``, and ``units_for`` by measured tables;
* units that a GEMM beside copy engines does without: ``spare``, and ``units_to_spare`` by measured tables;
* the strategy by the rule of ``overlap`` under ``auto``: ``rule_of``.

``pairs.sweep`` judges them by a pair's times under every strategy.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence

from sidelane.c3.strategies import LaunchMode, choose_strategy, strategies
from sidelane.choice.selection import Selection
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.pairs.isolated import EFFICIENCY, SPLIT, Isolated, apart
from sidelane_lab.pairs.workload import (
    COMPARABLE,
    Bound,
    C3Class,
    ComputeKind,
    Gemm,
    Workload,
    classify,
)

TIE = 1.001
"""Ratio of times below which two allocations count as equal."""

LATENCY_FACTOR = 2.0
"""Factor over the time of the smallest size below which a collective counts as limited by its latency."""


# --- the order of launches --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class KernelDemand:
    """A kernel that a runtime is about to launch.

    Attributes:
        name: name of the kernel in texts.
        workgroups: number of workgroups of its grid, a proxy for the units that it wants; 0 on copy engines.
        priority: priority of its stream; the greater comes first, whatever the workgroups.
    """

    name: str
    workgroups: int
    priority: int = 0


def launch_order(kernels: Sequence[KernelDemand]) -> Selection[tuple[KernelDemand, ...]]:
    """Launch by number of workgroups, low to high, so that none starves (ConCCL paper, V-C; for several, VII-B1).

    A priority supersedes that, and equals stay in the order given.

    Raises:
        ValueError: no kernel, or one of less than no workgroups.

    >>> launch_order([KernelDemand("GEMM", 1216), KernelDemand("all_gather", 64)]).reason
    'fewest workgroups first: all_gather (64), GEMM (1216)'
    """
    if not kernels or min(kernel.workgroups for kernel in kernels) < 0:
        raise ValueError(f"launch_order: kernels (value={list(kernels)}, allowed=one or more, of 0 workgroups or more)")
    ordered = tuple(sorted(kernels, key=lambda kernel: (-kernel.priority, kernel.workgroups)))
    by_priority = len({kernel.priority for kernel in kernels}) > 1
    rule = "highest priority, then fewest workgroups first" if by_priority else "fewest workgroups first"
    names = ", ".join(
        f"{kernel.name} ({kernel.workgroups}{f', priority {kernel.priority}' if by_priority else ''})"
        for kernel in ordered
    )
    return Selection(ordered, f"{rule}: {names}")


# --- units for collectives, and units that a GEMM spares --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class SlowedKernel:
    """A kernel with its look-up table.

    Attributes:
        name: name of the kernel in reasons.
        us: expected time in microseconds, with all units that it takes alone.
        slowdown: slowdown of a profiled kernel like it; of a collective by the units that it has, of a GEMM by those
            that it lost.
    """

    name: str
    us: float
    slowdown: Mapping[int, float]

    def after_loss(self, lost: int) -> float | None:
        """Return the slowdown by a loss of units, between two that were profiled in proportion; None beyond them."""
        table = {0: 1.0, **self.slowdown}
        fewer, more = [n for n in table if n <= lost], [n for n in table if n >= lost]
        if not more:
            return None
        low, high = max(fewer), min(more)
        share = 0.0 if high == low else (lost - low) / (high - low)
        return table[low] + share * (table[high] - table[low])


def allocate(gemm: SlowedKernel, collectives: Sequence[SlowedKernel]) -> Selection[tuple[int, ...]]:
    """Take the units whose slowest kernel is expected to be the fastest (ConCCL paper, V-C; for several, VII-B1).

    Every number of units of every collective's table is combined with those of all others. The GEMM loses their sum; no
    more is taken than it was profiled with. Memory interference is not part of the model. Of allocations that are
    expected to be equally good the one with the fewest units in all is taken.

    Args:
        gemm: GEMM, with the table of a profiled one of the same bound (:func:`expected_gemm_us`).
        collectives: one collective or several that run at once, each with the table of the profiled one of the nearer
            size (:func:`expected_comm_us`).

    Returns:
        Units of each collective, and expected times of all together by such units.

    Raises:
        ValueError: a table is empty, or the GEMM was not profiled with so few units.

    >>> table = {32: 1.5, 64: 1.0}
    >>> allocate(SlowedKernel("GEMM", 1000.0, {32: 1.1, 64: 1.25}), [SlowedKernel("collective", 900.0, table)]).reason
    '64 units: GEMM 1000 x 1.25, collective 900 x 1.00 = 1250 us expected, next 32 units 1350 us'
    """
    expected: dict[tuple[int, ...], float] = {}
    for shares in itertools.product(*(sorted(one.slowdown) for one in collectives)):
        lost = gemm.after_loss(sum(shares))
        if lost is not None and shares:
            slowed = (one.us * one.slowdown[units] for one, units in zip(collectives, shares, strict=True))
            expected[shares] = max(gemm.us * lost, *slowed)
    if not gemm.slowdown or not expected:
        tables = [sorted(one.slowdown) for one in (gemm, *collectives)]
        raise ValueError(f"allocate: tables (value={tables}, allowed=units of collectives that the GEMM has lost)")
    least = min(expected.values())
    chosen = min((one for one, us in expected.items() if us <= least * TIE), key=lambda one: (sum(one), one))
    words = [f"{gemm.name} {gemm.us:.0f} x {gemm.after_loss(sum(chosen)):.2f}"]
    words += [f"{one.name} {one.us:.0f} x {one.slowdown[n]:.2f}" for one, n in zip(collectives, chosen, strict=True)]
    chosen_us = expected.pop(chosen)
    reason = f"{_units(chosen)}: {', '.join(words)} = {chosen_us:.0f} us expected"
    others = sorted(expected.items(), key=lambda one: one[1])
    if others:
        reason += f", next {_units(others[0][0])} {others[0][1]:.0f} us"
    return Selection(chosen, reason, ((chosen, chosen_us), *others))


def _units(shares: tuple[int, ...]) -> str:
    return f"{' and '.join(map(str, shares))} units"


def spare(memory_bound: bool, slowdown: Mapping[int, float]) -> Selection[int]:
    """Return the units to take from a GEMM whose collective needs none (ConCCL paper, VI-G).

    Args:
        memory_bound: the GEMM is limited by its bytes; one that is limited by its operations keeps all.
        slowdown: slowdown of a profiled memory-bound GEMM by the units that it lost, below 1 if it is faster. No other
            table is needed.

    >>> spare(True, {8: 0.95, 16: 0.97, 32: 1.0}).reason
    '8 units fewer: a memory-bound GEMM takes 0.95 of its time'
    """
    if not memory_bound:
        return Selection(0, "no units: the GEMM is compute-bound")
    least = min((1.0, *slowdown.values()))
    if least * TIE >= 1.0:
        return Selection(0, "no units: a memory-bound GEMM gains nothing here by having fewer")
    units = min(n for n, slower in slowdown.items() if slower <= least * TIE)
    return Selection(units, f"{units} units fewer: a memory-bound GEMM takes {slowdown[units]:.2f} of its time")


def expected_gemm_us(flops: float, traffic_bytes: float, peak_tflops: float, memory_gbps: float) -> float:
    """Return the roofline time of a GEMM in microseconds at ``EFFICIENCY`` of the peaks."""
    return max(flops / (peak_tflops * EFFICIENCY * 1e6), traffic_bytes / (memory_gbps * EFFICIENCY * 1e3))


def expected_comm_us(sent_bytes: float, peak_gbps: float) -> float:
    """Return the roofline time of a collective in microseconds, from a GPU's sent bytes and its links' bandwidth."""
    return sent_bytes / (peak_gbps * EFFICIENCY * 1e3)


def units_for(
    known: Isolated, workload: Workload, implementation: str | None = None, others: Sequence[Workload] = ()
) -> Selection[tuple[int, ...]]:
    """Return the units for collectives next to a GEMM, by the measured look-up tables (ConCCL paper, V-C, VII-B1).

    Args:
        known: measurements of the machine.
        workload: pair to run.
        implementation: implementation of the collectives; None: the fastest that has a table.
        others: workloads whose collectives run at the same time; their GEMM is that of ``workload``.

    Raises:
        ValueError: no GEMM of its bound, or no size of a collective, was measured with fewer units.
    """
    bound, why = known.bound(workload.gemm)
    gemm = known.gemm_table(workload.gemm)
    kernels, notes = [], []
    for one in (workload, *others):
        comm = known.comm_table(one, None if implementation is None else (implementation,))
        if gemm is None or comm is None:
            what = "GEMM" if gemm is None else f"{one.collective}"
            raise ValueError(f"allocate: no {what} was measured with fewer units (value={one.name})")
        slower = slowed_beside(known, one.collective, comm.implementation)
        table = {units: ratio for units, ratio in comm.slowdown().items() if units in gemm.slowdown()}
        name = str(one.collective) if others else "collective"
        kernels.append(SlowedKernel(name, slower * known.comm_us(one, (comm.implementation,)), table))
        beside = f", which takes {slower:.2f} of its time beside a GEMM" if slower > 1 else ""
        notes.append((beside, f"{comm.implementation} {comm.collective} {format_bytes(comm.nbytes)}"))
    assert gemm is not None
    found = allocate(SlowedKernel("GEMM", expected_time_us(known, workload.gemm), gemm.slowdown()), kernels)
    slowed, like = "".join(dict.fromkeys(note for note, _ in notes)), " and ".join(like for _, like in notes)
    reason = f"{found.reason}{slowed}; {bound}-bound ({why}), as {gemm.gemm.name} by {gemm.means} and {like}"
    return dataclasses.replace(found, reason=reason)


def slowed_beside(known: Isolated, collective: Kind, implementation: str) -> float:
    """Return the factor by which a GEMM slows a collective with units of its own: memory and links are shared.

    It is the median over measured pairs in which the collective was the longer part by far; of the same collective,
    if there are such. It is 1 without such pairs, as the ConCCL paper's heuristic assumes.
    """
    found: dict[Kind, list[float]] = {}
    confined = {one.code for one in strategies() if one.partition is not None and one.mover.takes_units}
    for pair in known.pairs:
        table = known.comm_table(Workload(pair.gemm, pair.collective, pair.nbytes), (implementation,))
        gemm = known.gemm_table(pair.gemm, SPLIT)
        if pair.implementation != implementation or table is None or gemm is None:
            continue
        for (name, units), time_us in pair.times_us.items():
            given, taken = table.slowdown().get(units), gemm.slowdown().get(units)
            if name not in confined or given is None or taken is None:
                continue
            if given * pair.comm_us > COMPARABLE * taken * (pair.serial_us - pair.comm_us):
                found.setdefault(pair.collective, []).append(time_us / (given * pair.comm_us))
    ratios = found.get(collective) or [one for alike in found.values() for one in alike]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def units_to_spare(known: Isolated, gemm: Gemm) -> Selection[int]:
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


def is_latency_bound(known: Isolated, collective: Kind, nbytes: int) -> bool:
    """Return True if a collective of some size is limited by its latency, False if by its bandwidth.

    Raises:
        ValueError: no size of it was measured.
    """
    curves = [curve for curve in known.collectives if curve.collective is collective]
    if not curves:
        raise ValueError(f"is_latency_bound: collective (value={collective}, allowed={known.names()})")
    smallest = min(curves, key=lambda one: (one.nbytes, one.times_us[0]))
    nearest = min(curves, key=lambda one: (apart(one.nbytes, nbytes), one.times_us[0]))
    return nearest.times_us[0] < LATENCY_FACTOR * smallest.times_us[0]


# --- the rule of overlap ----------------------------------------------------------------------------------------------


def rule_of(
    workload: Workload,
    gemm_us: float,
    *,
    alone_us: float | None,
    engines_us: float | None,
    ways: Collection[tuple[str, int]],
) -> Selection[LaunchMode]:
    """Return the choice of ``overlap`` under ``auto`` for a pair.

    Args:
        workload: the pair.
        gemm_us: time of its GEMM alone in microseconds.
        alone_us: time of its collective alone, in the fastest way; None: unknown.
        engines_us: time of its collective alone on copy engines; None: unknown.
        ways: names of strategies that ran, with the units that they took.

    Raises:
        ValueError: none ran.
    """
    gemm = workload.gemm
    product = (gemm.m, gemm.n, gemm.k, gemm.dtype) if gemm.operation is ComputeKind.PRODUCT else None
    return choose_strategy(
        gemm_us,
        product,
        [(workload.collective, workload.nbytes)],
        alone_us=alone_us,
        engines_us=engines_us,
        is_possible=lambda mode: (mode.strategy.code, mode.units) in ways,
    )

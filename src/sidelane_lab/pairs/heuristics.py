"""Heuristics held against the best of a sweep: what each would take for a pair, why, and what that loses.

Pure: a pair's times under every strategy in, verdicts out. The times are measured (``studies/c3/heuristics.py``) or
those of a described machine (``model/heuristic.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from sidelane.c3.strategies import Mover, Order, Strategy, named
from sidelane_lab.pairs.expected_times import decide
from sidelane_lab.pairs.isolated_times import Isolated
from sidelane_lab.pairs.launch_order import KernelDemand, launch_order
from sidelane_lab.pairs.movers import implementations_of
from sidelane_lab.pairs.outcome import rule_of
from sidelane_lab.pairs.partition import units_for, units_to_spare
from sidelane_lab.pairs.workload import Workload

RIGHT_WITHIN = 0.005
"""A choice that loses less is right: medians of a few rounds repeat no better."""

LAUNCH_ORDER, LAUNCH_ORDERS, PARTITION, PARTITIONS = "launch_order", "launch_order_3", "partition", "partition_3"
SPARED, CURVES, CHOICE = "spared", "curves", "auto"
HEURISTICS = (LAUNCH_ORDER, LAUNCH_ORDERS, PARTITION, PARTITIONS, SPARED, CURVES, CHOICE)
"""The first of two kernels and of more, units for one collective and for two, units that a GEMM spares, and the
strategy: by measured curves, and by the rule of ``overlap`` under ``auto``."""

Way = tuple[str, int]
"""Name of a strategy, and units taken from the GEMM."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """A pair under every strategy that runs.

    Attributes:
        workload: the pair.
        gemm_us: of the GEMM alone.
        times_us: by way.
        kernels: the GEMM and the library's collective, as a runtime sees them before their launch.
        others: the same with further kernels.
        orders_us: times of the latter, by the names in the order of their launches.
        splits_us: times of the GEMM and two collectives, each of which has units of its own, by these units.
        second: workload with the second of them.
        why_not: no such times.
        alone_us: time of the collective alone in microseconds, in the fastest way; None: unknown.
        engines_us: time of the collective alone on copy engines; None: unknown.
    """

    workload: Workload
    gemm_us: float
    times_us: Mapping[Way, float]
    kernels: tuple[KernelDemand, KernelDemand]
    others: tuple[KernelDemand, ...] = ()
    orders_us: Mapping[tuple[str, ...], float] = dataclasses.field(default_factory=dict)
    why_not: str = ""
    splits_us: Mapping[tuple[int, ...], float] = dataclasses.field(default_factory=dict)
    second: Workload | None = None
    alone_us: float | None = None
    engines_us: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HeuristicVerdict:
    """The choice of a heuristic for a pair; without times where ``reason`` says why nothing could be judged.

    Attributes:
        heuristic: one of ``HEURISTICS``.
        seen: the GEMM is one that was profiled.
        chosen: by the heuristic, and ``best``, of the sweep; in words.
        chosen_us: what both take so.
        best_us: likewise.
        reason: that the heuristic gave.
    """

    heuristic: str
    seen: bool
    chosen: str = ""
    best: str = ""
    chosen_us: float | None = None
    best_us: float | None = None
    reason: str = ""

    @property
    def lost(self) -> float | None:
        """0.01: the choice takes 1% longer than the best."""
        return None if self.chosen_us is None or self.best_us is None else self.chosen_us / self.best_us - 1

    @property
    def right(self) -> bool | None:
        lost = self.lost
        return None if lost is None else lost <= RIGHT_WITHIN


def judge(sweep: Sweep, known: Isolated) -> Iterator[HeuristicVerdict]:
    """Every heuristic on one pair.

    Args:
        sweep: of the pair.
        known: what was profiled of the machine, by which the heuristics go.
    """
    gemm = sweep.workload.gemm
    profiled = {(one.gemm.m, one.gemm.n, one.gemm.k, one.gemm.dtype) for one in known.gemms}
    seen = (gemm.m, gemm.n, gemm.k, gemm.dtype) in profiled
    for verdict in (
        _launch_order(sweep),
        _launch_orders(sweep),
        _partition(sweep, known),
        _partitions(sweep, known),
        _spared(sweep, known),
        _curves(sweep, known),
        _choice(sweep),
    ):
        yield dataclasses.replace(verdict, seen=seen)


def _launch_order(sweep: Sweep) -> HeuristicVerdict:
    order = launch_order(sweep.kernels)
    first = Order.GEMM_FIRST if order.kernels[0] is sweep.kernels[0] else Order.COLLECTIVE_FIRST
    times = {
        way: us
        for way, us in sweep.times_us.items()
        if (one := named(way[0])).concurrent and (one.mover, one.priority, one.partition) == (Mover.LIBRARY, 0, None)
    }
    chosen = next((way for way in times if named(way[0]).order is first), None)
    if chosen is None or len(times) < 2:
        return HeuristicVerdict(LAUNCH_ORDER, False, reason="the two launch orders were not both run")
    return _verdict(LAUNCH_ORDER, chosen, times, order.reason)


def _launch_orders(sweep: Sweep) -> HeuristicVerdict:
    if not sweep.orders_us:
        return HeuristicVerdict(LAUNCH_ORDERS, False, reason=sweep.why_not or "no third kernel was run")
    order = launch_order(sweep.others)
    chosen = tuple(kernel.name for kernel in order.kernels)
    best = min(sweep.orders_us, key=sweep.orders_us.__getitem__)
    words = (" > ".join(chosen), " > ".join(best))
    return HeuristicVerdict(LAUNCH_ORDERS, False, *words, sweep.orders_us[chosen], sweep.orders_us[best], order.reason)


def _partition(sweep: Sweep, known: Isolated) -> HeuristicVerdict:
    """Units of the first swept strategy of the library's kernels that ran."""
    names = [name for name, units in sweep.times_us if units and _is_swept(named(name))]
    times = {way: us for way, us in sweep.times_us.items() if names and way[0] == names[0]}
    if not times:
        return HeuristicVerdict(PARTITION, False, reason="no partition was run")
    try:
        found = units_for(known, sweep.workload, _library(known))
    except ValueError as problem:
        return HeuristicVerdict(PARTITION, False, reason=str(problem))
    chosen = (names[0], found.units)
    if chosen not in times:
        return HeuristicVerdict(PARTITION, False, reason=f"{found.units} units were not run: {found.reason}")
    return _verdict(PARTITION, chosen, times, found.reason)


def _partitions(sweep: Sweep, known: Isolated) -> HeuristicVerdict:
    """Units of two collectives of the library beside one GEMM."""
    if not sweep.splits_us or sweep.second is None:
        return HeuristicVerdict(PARTITIONS, False, reason="no second collective was run on units of its own")
    found = units_for(known, sweep.workload, _library(known), (sweep.second,))
    best = min(sweep.splits_us, key=sweep.splits_us.__getitem__)
    chosen, most = (" and ".join(map(str, shares)) for shares in (found.shares, best))
    times = sweep.splits_us[found.shares], sweep.splits_us[best]
    return HeuristicVerdict(PARTITIONS, False, chosen, most, *times, found.reason)


def _library(known: Isolated) -> str | None:
    """Return the implementation of the vendor's library that was profiled."""
    measured = {curve.implementation for curve in known.collectives}
    return next((name for name in implementations_of(Mover.LIBRARY) if name in measured), None)


def _is_swept(strategy: Strategy) -> bool:
    return strategy.partition is not None and strategy.mover is Mover.LIBRARY


def _spared(sweep: Sweep, known: Isolated) -> HeuristicVerdict:
    """Beside copy engines: with all units, or with what was spared."""
    times = {way: us for way, us in sweep.times_us.items() if named(way[0]).mover is Mover.DMA}
    if len(times) < 2:
        return HeuristicVerdict(
            SPARED, False, reason="copy engines were not run with and without units taken from the GEMM"
        )
    found = units_to_spare(known, sweep.workload.gemm)
    # A sweep that has other units than were spared is judged by those that come nearest.
    chosen = min(times, key=lambda way: (abs(way[1] - found.units), named(way[0]).preference))
    return _verdict(SPARED, chosen, times, found.reason)


def _as_asked(sweep: Sweep) -> dict[Way, float]:
    """Return the times of the strategies that make the call as it was asked for."""
    return {way: us for way, us in sweep.times_us.items() if named(way[0]).mover.makes_whole_call}


def _choice(sweep: Sweep) -> HeuristicVerdict:
    """Judge the rule of ``overlap`` under ``auto``."""
    times = _as_asked(sweep)
    given = {"alone_us": sweep.alone_us, "engines_us": sweep.engines_us}
    try:
        found = rule_of(sweep.workload, sweep.gemm_us, **given, ways=times)
    except ValueError as problem:
        return HeuristicVerdict(CHOICE, False, reason=str(problem))
    return _verdict(CHOICE, (found.candidate.strategy.name, found.candidate.units), times, found.reason)


def _curves(sweep: Sweep, known: Isolated) -> HeuristicVerdict:
    """Judge the least expected time, by measured curves."""
    times = _as_asked(sweep)
    able = [named(name) for name in dict.fromkeys(name for name, _ in times)]
    try:
        found = decide(sweep.workload, sweep.gemm_us, able, known)
    except ValueError as problem:
        return HeuristicVerdict(CURVES, False, reason=str(problem))
    name = found.candidate.strategy.name
    chosen = (name, found.candidate.units)
    if chosen not in times:  # a strategy that keeps its units from a GEMM that is not limited by its bytes
        chosen = next(way for way in times if way[0] == name)
    return _verdict(CURVES, chosen, times, found.reason)


def _verdict(heuristic: str, chosen: Way, times: Mapping[Way, float], reason: str) -> HeuristicVerdict:
    best = min(times, key=times.__getitem__)
    return HeuristicVerdict(heuristic, False, _words(chosen), _words(best), times[chosen], times[best], reason)


def _words(way: Way) -> str:
    return way[0] + (f" {way[1]}" if way[1] else "")

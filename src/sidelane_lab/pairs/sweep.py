"""A pair under every strategy, and how the heuristics for it do against the best of them.

Pure: times in, rows out. The times are measured (``studies/c3/heuristics.py``) or those of a described machine
(``model/heuristic.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from sidelane.c3.strategies import Mover, Order, Partition, named
from sidelane_lab.harness.study import FlatRow
from sidelane_lab.pairs.heuristics import KernelDemand, launch_order, rule_of, units_for, units_to_spare
from sidelane_lab.pairs.isolated import Isolated
from sidelane_lab.pairs.workload import Workload, implementations_of

RIGHT_WITHIN = 0.005
"""A choice that loses less is right: medians of a few rounds repeat no better."""

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
class HeuristicRow(FlatRow):
    """The choice of a heuristic for a pair, against the best of a sweep.

    Attributes:
        heuristic: name of the heuristic. ``launch_order``: order of two kernels by workgroups; ``launch_order_3``: of
            three kernels; ``partition``: units for the collective, by look-up tables; ``partition_3``: units for two
            collectives at once; ``spared``: units that a GEMM beside copy engines does without; ``auto``: the strategy
            by the rule of ``overlap``; ``curves``, in files of November 2026: the strategy by measured curves.
        gemm: GEMM as in :class:`C3Row`.
        bytes: bytes of the collective as in :class:`C3Row`.
        seen: True if the GEMM was profiled.
        chosen: choice of the heuristic, in words: the name of a strategy, the paper's code in files of November 2026.
        best: best choice of the sweep, in the same words.
        time_us: time under the heuristic's choice.
        best_us: time under the best choice.
        lost_percent: share of time that the choice loses.
        right: True if the choice loses half a percent at most.
        note: the reason that the heuristic gave, or why nothing could be judged.
    """

    figures = ("time_us",)

    heuristic: str
    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    seen: bool
    chosen: str
    best: str
    time_us: float | None
    best_us: float | None
    lost_percent: float | None
    right: bool | None
    note: str


Judged = tuple[str, str | None, Mapping[str, float]]
"""The reason that a rule gives, its choice, and the times of the sweep by choices; no choice: nothing can be judged."""


def judge(sweep: Sweep, known: Isolated) -> Iterator[HeuristicRow]:
    """Judge every heuristic on one pair.

    Args:
        sweep: of the pair.
        known: what was profiled of the machine, by which the heuristics go.
    """
    gemm = sweep.workload.gemm
    profiled = {(one.gemm.m, one.gemm.n, one.gemm.k, one.gemm.dtype) for one in known.gemms}
    seen = (gemm.m, gemm.n, gemm.k, gemm.dtype) in profiled
    for heuristic, rule in RULES.items():
        try:
            reason, chosen, times = rule(sweep, known)
        except ValueError as problem:
            reason, chosen, times = str(problem), None, {}
        best = None if chosen is None else min(times, key=times.__getitem__)
        lost = None if chosen is None or best is None else times[chosen] / times[best] - 1
        yield HeuristicRow(
            heuristic=heuristic,
            **sweep.workload.columns,
            seen=seen,
            chosen=chosen or "",
            best=best or "",
            time_us=None if chosen is None else times[chosen],
            best_us=None if best is None else times[best],
            lost_percent=None if lost is None else 100 * lost,
            right=None if lost is None else lost <= RIGHT_WITHIN,
            note=reason,
        )


def _launch_order(sweep: Sweep, known: Isolated) -> Judged:
    """Order the pair: the library's kernels before the GEMM, or after it."""
    order = launch_order(sweep.kernels)
    first = Order.GEMM_FIRST if order.candidate[0] is sweep.kernels[0] else Order.COLLECTIVE_FIRST
    times = {
        way: us
        for way, us in sweep.times_us.items()
        if (one := named(way[0])).concurrent and (one.mover, one.priority, one.partition) == (Mover.LIBRARY, 0, None)
    }
    chosen = next((way for way in times if named(way[0]).order is first), None)
    if chosen is None or len(times) < 2:
        return "the two launch orders were not both run", None, {}
    return _judged(order.reason, chosen, times)


def _launch_orders(sweep: Sweep, known: Isolated) -> Judged:
    """Order more than two kernels."""
    if not sweep.orders_us:
        return sweep.why_not or "no third kernel was run", None, {}
    order = launch_order(sweep.others)
    times = {" > ".join(names): us for names, us in sweep.orders_us.items()}
    return order.reason, " > ".join(kernel.name for kernel in order.candidate), times


def _partition(sweep: Sweep, known: Isolated) -> Judged:
    """Take units for the first swept strategy of the library's kernels that ran."""
    swept = (named(name) for name, units in sweep.times_us if units)
    name = next((one.code for one in swept if one.partition is not None and one.mover is Mover.LIBRARY), None)
    times = {way: us for way, us in sweep.times_us.items() if way[0] == name}
    if name is None:
        return "no partition was run", None, {}
    found = units_for(known, sweep.workload, _library(known))
    chosen = (name, sum(found.candidate))
    if chosen not in times:
        return f"{chosen[1]} units were not run: {found.reason}", None, {}
    return _judged(found.reason, chosen, times)


def _partitions(sweep: Sweep, known: Isolated) -> Judged:
    """Take units for two collectives of the library beside one GEMM."""
    if not sweep.splits_us or sweep.second is None:
        return "no second collective was run on units of its own", None, {}
    found = units_for(known, sweep.workload, _library(known), (sweep.second,))
    return found.reason, _and(found.candidate), {_and(shares): us for shares, us in sweep.splits_us.items()}


def _library(known: Isolated) -> str | None:
    """Return the implementation of the vendor's library that was profiled."""
    measured = {curve.implementation for curve in known.collectives}
    return next((name for name in implementations_of(Mover.LIBRARY) if name in measured), None)


def _spared(sweep: Sweep, known: Isolated) -> Judged:
    """Run beside copy engines with all units, or without those to spare."""
    engines = (Mover.DMA, None), (Mover.DMA, Partition(memory_bound_only=True))
    times = {way: us for way, us in sweep.times_us.items() if (named(way[0]).mover, named(way[0]).partition) in engines}
    if len(times) < 2:
        return "copy engines were not run with and without units taken from the GEMM", None, {}
    found = units_to_spare(known, sweep.workload.gemm)
    # A sweep that has other units than were spared is judged by those that come nearest.
    chosen = min(times, key=lambda way: (abs(way[1] - found.candidate), named(way[0]).preference))
    return _judged(found.reason, chosen, times)


def _choice(sweep: Sweep, known: Isolated) -> Judged:
    """Take the strategy by the rule of ``overlap`` under ``auto``."""
    times = _as_asked(sweep)
    given = {"alone_us": sweep.alone_us, "engines_us": sweep.engines_us}
    found = rule_of(sweep.workload, sweep.gemm_us, **given, ways=times)
    return _judged(found.reason, (found.candidate.strategy.code, found.candidate.units), times)


def _as_asked(sweep: Sweep) -> dict[Way, float]:
    """Return the times of the strategies that make the call as it was asked for."""
    return {way: us for way, us in sweep.times_us.items() if named(way[0]).mover.makes_whole_call}


def _and(shares: tuple[int, ...]) -> str:
    return " and ".join(map(str, shares))


def _judged(reason: str, chosen: Way, times: Mapping[Way, float]) -> Judged:
    return reason, _words(chosen), {_words(way): us for way, us in times.items()}


def _words(way: Way) -> str:
    return named(way[0]).name + (f" {way[1]}" if way[1] else "")


LAUNCH_ORDER, LAUNCH_ORDERS, PARTITION, PARTITIONS = "launch_order", "launch_order_3", "partition", "partition_3"
SPARED, CHOICE = "spared", "auto"
RULES: Mapping[str, Callable[[Sweep, Isolated], Judged]] = {
    LAUNCH_ORDER: _launch_order,
    LAUNCH_ORDERS: _launch_orders,
    PARTITION: _partition,
    PARTITIONS: _partitions,
    SPARED: _spared,
    CHOICE: _choice,
}
"""Heuristics by their names in result files."""

"""From times to figures: what a pair took under every strategy, and how much of the ideal that is."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from sidelane.c3.strategies import ENGINES, LaunchMode, Mover, Strategy, choose_strategy
from sidelane.choice.selection import Selection
from sidelane_lab.harness.ways import Problem
from sidelane_lab.pairs.ideal import ideal_speedup, percent_of_ideal, speedup
from sidelane_lab.pairs.movers import LIBRARY, implementation_of, implementations_of
from sidelane_lab.pairs.workload import C3Class, ComputeKind, Workload, classify

GEMM = "gemm"
"""Name of the GEMM alone among the times."""

NOTHING_TAKEN: Mapping[str, Sequence[int]] = {}
"""No strategy took units."""


class Configuration(Protocol):
    """One way to call a collective implementation. ``label`` is unique in a pair."""

    @property
    def implementation(self) -> str: ...

    @property
    def in_place(self) -> bool: ...

    @property
    def label(self) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Alone:
    """A collective implementation alone. ``time_us`` is None where ``failure`` says why."""

    implementation: str
    label: str
    in_place: bool
    time_us: float | None
    failure: Problem | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyResult:
    """A strategy in its best configuration, figures as medians over the rounds; None where ``failure`` says why.

    Attributes:
        label: how the collective was called.
        units: taken from the GEMM.
        by_units: times of a sweep, microseconds by units.
        comm_us: isolated time of that call.
    """

    strategy: str
    label: str = ""
    units: int = 0
    by_units: tuple[tuple[int, float], ...] = ()
    comm_us: float | None = None
    time_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None
    percent_of_ideal_library: float | None = None
    failure: Problem | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PairOutcome:
    """Everything measured about a pair.

    Attributes:
        best: label of the fastest configuration of the collective; None if none works, and then ``best_comm_us``,
            ``c3_class`` and ``choice`` are None as well.
    """

    workload: Workload
    gemm_us: float
    best: str | None
    best_comm_us: float | None
    c3_class: C3Class | None
    isolated: tuple[Alone, ...]
    results: tuple[StrategyResult, ...]
    choice: Selection[LaunchMode] | None


def pair_label(strategy: Strategy, configuration: Configuration, units: int = 0) -> str:
    """Name of a strategy with one configuration, and with units taken from the GEMM, among the times."""
    return f"{strategy.name}: {configuration.label}" + (f", {units} units" if units else "")


def judge(
    workload: Workload,
    configurations: Sequence[Configuration],
    strategies: Sequence[Strategy],
    times: Mapping[str, Sequence[float]],
    failures: Mapping[str, Problem],
    unavailable: Mapping[str, str],
    tried: Mapping[str, Sequence[int]] = NOTHING_TAKEN,
) -> PairOutcome:
    """Turn times into figures: ratios in each round first, then their medians.

    Args:
        workload: the pair.
        configurations: every way in which the collective was to be called.
        strategies: what was to be run.
        times: microseconds, one for each round, of the GEMM alone (``GEMM``), of configurations alone (their labels)
            and of strategies (``pair_label``). What failed is not there.
        failures: by the same names, and by the names of strategies that cannot run here.
        unavailable: implementations that should be here and are not, with the reason.
        tried: units that a strategy took from the GEMM, one number after another; none where it is not named.
    """
    best = _fastest(_as_asked(configurations), times)
    isolated = tuple(
        Alone(
            c.implementation,
            c.label,
            c.in_place,
            statistics.median(times[c.label]) if c.label in times else None,
            failures.get(c.label),
        )
        for c in configurations
    )
    gemm_us = statistics.median(times[GEMM])
    best_us = None if best is None else statistics.median(times[best.label])
    results = tuple(
        _judge_strategy(strategy, configurations, times, failures, unavailable, tried.get(strategy.name, (0,)))
        for strategy in strategies
    )
    return PairOutcome(
        workload=workload,
        gemm_us=gemm_us,
        best=None if best is None else best.label,
        best_comm_us=best_us,
        c3_class=None if best_us is None else classify(gemm_us, best_us),
        isolated=isolated,
        results=results,
        choice=_choice(workload, gemm_us, best_us, results, strategies),
    )


def _choice(
    workload: Workload,
    gemm_us: float,
    best_us: float | None,
    results: Sequence[StrategyResult],
    strategies: Sequence[Strategy],
) -> Selection[LaunchMode] | None:
    """Return the choice of ``overlap`` under ``auto`` among the strategies that ran; None if none did."""
    able = {one.name for one in strategies if one.mover.makes_whole_call}
    ran = {one.strategy: one for one in results if one.strategy in able and one.time_us is not None}
    if not ran:
        return None
    return rule_of(
        workload,
        gemm_us,
        alone_us=best_us,
        engines_us=ran[ENGINES].comm_us if ENGINES in ran else None,
        ways={(name, units) for name, one in ran.items() for units in (0, *dict(one.by_units))},
    )


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
        is_possible=lambda mode: (mode.strategy.name, mode.units) in ways,
    )


def _judge_strategy(
    strategy: Strategy,
    configurations: Sequence[Configuration],
    times: Mapping[str, Sequence[float]],
    failures: Mapping[str, Problem],
    unavailable: Mapping[str, str],
    tried: Sequence[int],
) -> StrategyResult:
    """The result of a strategy."""
    if strategy.name in failures:
        return StrategyResult(strategy.name, failure=failures[strategy.name])
    here = dict.fromkeys(c.implementation for c in configurations)
    name = implementation_of(strategy, here)
    if name is None:
        wanted = implementations_of(strategy.mover)
        reasons = [unavailable[one] for one in wanted if one in unavailable]
        absent = f"no {' or '.join(wanted)} among what runs here ({', '.join(here) or 'nothing'})"
        return StrategyResult(strategy.name, failure=Problem(f"not available: {(reasons or [absent])[0]}"))
    own = [(c, units) for c in configurations if c.implementation == name for units in tried]
    timed = [one for one in own if pair_label(strategy, *one) in times]
    if not timed:
        found = (failures.get(label) for c, units in own for label in (pair_label(strategy, c, units), c.label))
        failure = next(filter(None, found), Problem("no configuration could run"))
        return StrategyResult(strategy.name, failure=failure)
    chosen, units = min(timed, key=lambda one: statistics.median(times[pair_label(strategy, *one)]))
    best = _fastest(_as_asked(configurations), times) or chosen
    library = _fastest([c for c in configurations if c.implementation in LIBRARY], times)
    gemm, pair = times[GEMM], times[pair_label(strategy, chosen, units)]
    return StrategyResult(
        strategy=strategy.name,
        label=chosen.label,
        units=units,
        by_units=tuple((one, statistics.median(times[pair_label(strategy, c, one)])) for c, one in timed if one),
        comm_us=statistics.median(times[chosen.label]),
        time_us=statistics.median(pair),
        speedup=median_of_rounds(speedup, gemm, times[best.label], pair),
        ideal=median_of_rounds(ideal_speedup, gemm, times[best.label]),
        percent_of_ideal=percent_of_rounds(gemm, times[best.label], pair),
        percent_of_ideal_library=percent_of_rounds(gemm, times[library.label], pair) if library else None,
    )


def _as_asked(configurations: Sequence[Configuration]) -> list[Configuration]:
    """But for those of movers that make another call."""
    others = {name for mover in Mover if not mover.makes_whole_call for name in implementations_of(mover)}
    return [one for one in configurations if one.implementation not in others]


def _fastest(configurations: Sequence[Configuration], times: Mapping[str, Sequence[float]]) -> Configuration | None:
    timed = [c for c in configurations if c.label in times]
    return min(timed, key=lambda c: statistics.median(times[c.label]), default=None)


def median_of_rounds(figure: Callable[..., float], *series: Sequence[float]) -> float:
    """Return the median of a figure of each round."""
    return statistics.median(figure(*values) for values in zip(*series, strict=True))


def percent_of_rounds(*series: Sequence[float]) -> float | None:
    """Return the median percent of ideal, where most rounds have one."""
    found = [percent_of_ideal(*values) for values in zip(*series, strict=True)]
    defined = [percent for percent in found if percent is not None]
    return statistics.median(defined) if 2 * len(defined) > len(found) else None

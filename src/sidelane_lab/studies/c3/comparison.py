"""A pair under every strategy on this rank: rounds in turns, and what they say of the ideal.

A strategy with a partition is tried with each of its numbers of units, with the call of its implementation that is
fastest alone. One with several calls has each of them tried in a short look; those that are as fast as its best, or
nearly, get all rounds (``narrowed``). What is the same launch as another strategy's is not launched twice. What cannot
run here at all becomes a row with the reason, and what is wrong (``pairs.pair``) is not timed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from sidelane.c3.partitions import DevicePartitions, PairStreams, units_to_try
from sidelane.c3.strategies import LaunchMode, Mover, Strategy
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.choice.selection import Selection
from sidelane.collectives.plan import AUTO
from sidelane.errors import UnavailableError
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Job, Problem
from sidelane_lab.pairs.beside import RoundTimes
from sidelane_lab.pairs.heuristics import rule_of, units_for
from sidelane_lab.pairs.isolated import Isolated
from sidelane_lab.pairs.pair import (
    GEMM,
    HIDE_LAUNCH_US,
    CollectiveRun,
    Configuration,
    GemmRun,
    Pair,
    PairLaunch,
    Workers,
    check_launch,
    refusal,
    run_alone,
)
from sidelane_lab.pairs.spans import Trace, Traced
from sidelane_lab.pairs.workload import (
    LIBRARY,
    Workload,
    applies,
    classify,
    implementation_of,
    implementations_of,
    percent_of_ideal,
    possible_percent,
)
from sidelane_lab.studies.c3.rows import CONCCL, C3Row

NO_TIMES: Mapping[str, Any] = dict.fromkeys(
    ("comm_us", "time_us", "speedup", "ideal", "percent_of_ideal", "percent_of_ideal_nccl")
)
"""Columns of a strategy that has no time."""

WORTH = 1.15
"""A call whose best round of the look took longer than that many times the best of its strategy goes. Rounds of one
launch differ by some percent, and by half where a kernel runs beside a GEMM or in turns with it."""

LOOKS = 2
"""Rounds of a look: each call has run before, in its check."""

Times = Mapping[str, Sequence[float]]
"""Microseconds by names, one for each round, of the slowest rank."""


C = TypeVar("C", bound=Any)
Launches = dict[str, PairLaunch]
"""Launches of calls, with the GEMM or alone, by names."""

Planned = Mapping[str, tuple[Strategy, C, int]]
"""A strategy, a call and units taken from the GEMM, by names."""


class Instruments:
    """The meter of pairs: rounds are interleaved behind a warm-up, and every sample hides what a launch takes the host.

    Every rank makes the same calls.

    Attributes:
        late: samples that hid too little, by name, of what was timed last.
    """

    def __init__(self, meter: Meter, warmup: int, repeats: int) -> None:
        self._meter, self._warmup, self._repeats = meter, warmup, repeats
        self.late: dict[str, int] = {}
        self.on_stream, self.attempt, self.finish = meter.on_stream, meter.attempt, meter.finish

    def time(self, runs: Mapping[str, Callable[[], None]]) -> Times:
        """Time every run."""
        return self._timed(runs, self._warmup, self._repeats)

    def look(self, runs: Mapping[str, Callable[[], None]]) -> Times:
        """Time every run in few rounds."""
        return self._timed(runs, 0, LOOKS)

    def _timed(self, runs: Mapping[str, Callable[[], None]], warmup: int, repeats: int) -> Times:
        hide_us = 0.0 if self._meter.device.type == "cpu" else HIDE_LAUNCH_US
        jobs = {name: Job(run, hide_launch_us=hide_us) for name, run in runs.items()}
        rounds = self._meter.rounds(jobs, warmup=warmup, repeats=repeats)
        self.late = {name: measured.late for name, measured in rounds.items() if measured.late}
        return {name: measured.times_us for name, measured in rounds.items()}


def run_workload(
    workload: Workload,
    collectives: Sequence[CollectiveRun],
    instruments: Any,
    *,
    device: torch.device,
    streams: PairStreams | None = None,
    partitions: DevicePartitions | None = None,
    no_partitions: str = "there are no green contexts here",
    memory_bound: bool = False,
    strategies: Sequence[Strategy] | None = None,
    unavailable: Mapping[str, str] | None = None,
    seed: int = 0,
    known: Isolated | None = None,
    on_trace: Callable[[str, Trace], None] | None = None,
    on_launch: Callable[[str, Callable[[], None], float], None] | None = None,
) -> PairOutcome:
    """Measure a pair under every strategy. Collective: all ranks call it with the same arguments.

    Args:
        workload: the pair.
        collectives: every configuration of every implementation, ready to run.
        instruments: how to agree and to measure.
        device: of this rank.
        streams: streams, on an accelerator.
        partitions: what takes units from a GEMM; None: nothing does here, and ``no_partitions`` says why.
        no_partitions: see there.
        memory_bound: the GEMM is limited by its bytes, which some strategies go by.
        strategies: what to run; None: all that there are.
        unavailable: implementations that should be here and are not, with the reason.
        seed: of the random inputs.
        known: isolated times, by which the partition heuristic is held against a sweep.
        on_trace: gets, for every strategy in its best configuration, when both ran in a run of its own. Every rank's
            is called in the same order.
        on_launch: gets, for every strategy in its best configuration, what launches the pair, and its time in
            microseconds. Every rank's is called in the same order.
    """
    seeds = itertools.count(seed + 1)
    strategies = all_strategies() if strategies is None else strategies
    confined = [strategy for strategy in strategies if strategy.partition is not None]
    refused = {
        strategy.code: Problem(f"it takes compute units from the GEMM: {reason}")
        for strategy in confined
        if (reason := refusal(strategy, partitions, no_partitions, instruments))
    }
    tried = {
        strategy.code: units_to_try(strategy.partition, partitions.units)
        if applies(strategy.partition, memory_bound)
        else (0,)
        for strategy in confined
        if strategy.partition is not None and partitions is not None
    }
    with instruments.on_stream(), Workers() as workers:
        gemm = GemmRun(workload.gemm, device)
        gemm.fill(next(seeds))
        instruments.finish("the GEMM's inputs")
        pair = Pair(gemm, streams, workers, partitions)
        able = [strategy for strategy in strategies if strategy.code not in refused]
        times, failures = _compare(pair, gemm, collectives, able, tried, instruments, seeds)
        outcome = judge(workload, collectives, strategies, times, failures | refused, unavailable or {}, tried, known)
        by_label, by_name = {run.label: run for run in collectives}, {one.code: one for one in strategies}
        if on_launch is not None:
            for row in (row for row in outcome.rows if row.strategy in outcome.calls):
                label, units = outcome.calls[row.strategy]
                assert row.time_us is not None
                on_launch(row.strategy, pair.launch(by_name[row.strategy], by_label[label], units), row.time_us)
        if on_trace is not None:
            for name, (label, units) in outcome.calls.items():
                traced = Traced(gemm, by_label[label], on_cpu=device.type == "cpu")
                launch = Pair(traced, streams, workers, partitions).launch(by_name[name], traced, units)
                instruments.time({f"{name}, traced": traced.launched(launch)})
                on_trace(name, traced.read())
    return outcome


def _compare(
    pair: Pair,
    gemm: GemmRun,
    collectives: Sequence[CollectiveRun],
    strategies: Sequence[Strategy],
    tried: Mapping[str, Sequence[int]],
    instruments: Any,
    seeds: Iterator[int],
) -> tuple[dict[str, Sequence[float]], dict[str, Problem]]:
    """Return times and failures by names, of the GEMM, of collectives alone, and of strategies with each of them."""
    by_itself = {run.label: PairLaunch(run.label, functools.partial(run_alone, run), run) for run in collectives}
    alone, failed_alone = _check(by_itself, instruments, seeds)
    looked = instruments.look({label: way.run for label, way in alone.items()}) if alone else {}
    every = _plan_of(strategies, [run for run in collectives if run.label in alone], collectives, looked, tried)
    aliases = aliases_of(every)
    planned = {
        label: PairLaunch(label, pair.launch(strategy, run, units), run, (gemm,))
        for label, (strategy, run, units) in every.items()
        if label not in aliases
    }
    together, failed_together = _check(planned, instruments, seeds)
    kept = narrowed(every, together, instruments)
    by_library: dict[str, list[str]] = {}
    for run in (run for run in collectives if run.label in alone):
        by_library.setdefault(run.implementation, []).append(run.label)
    needed = {every[label][1].label for label in kept} | lasting(by_library.values(), looked) | set(kept)
    launches = {label: way.run for label, way in {**alone, **kept}.items() if label in needed}
    times = dict(instruments.time({GEMM: gemm.run, **launches}))
    for label, twin in aliases.items():
        if twin in times:
            times[label] = times[twin]
        elif twin in failed_together:
            failed_together[label] = failed_together[twin]
    return times, failed_alone | failed_together


def _plan_of(
    strategies: Sequence[Strategy],
    right: Sequence[CollectiveRun],
    all_runs: Sequence[CollectiveRun],
    looked: Times,
    tried: Mapping[str, Sequence[int]],
) -> Planned[CollectiveRun]:
    """Return each strategy's launches: the right calls of its implementation, with each number of units.

    Where units are taken only the call that is fastest alone is planned.
    """
    here = {run.implementation for run in all_runs}
    planned: dict[str, tuple[Strategy, CollectiveRun, int]] = {}
    for strategy in strategies:
        units = tried.get(strategy.code, (0,))
        mine = [run for run in right if run.implementation == implementation_of(strategy, here)]
        if any(units):
            mine = sorted(mine, key=lambda run: statistics.median(looked[run.label]))[:1]
        planned |= {pair_label(strategy, run, taken): (strategy, run, taken) for run in mine for taken in units}
    return planned


def _check(launches: Launches, instruments: Any, seeds: Iterator[int]) -> tuple[Launches, dict[str, Problem]]:
    """Keep those launches that are right on every rank; the others with what was wrong."""
    found = {label: check_launch(instruments, way, next(seeds)) for label, way in launches.items()}
    failures = {label: problem for label, problem in found.items() if problem is not None}
    return {label: way for label, way in launches.items() if label not in failures}, failures


def aliases_of(planned: Planned[C]) -> dict[str, str]:
    """Return names of launches that are the same as another one: of strategies that would take units, and take none.

    Returns:
        The name of that other one, by name.
    """
    plain = {
        (dataclasses.replace(strategy, name="", code="", recipe="", preference=0), run.label): label
        for label, (strategy, run, _) in planned.items()
        if strategy.partition is None
    }
    found = {}
    for label, (strategy, run, units) in planned.items():
        if strategy.partition is not None and not units:
            twin = dataclasses.replace(strategy, name="", code="", recipe="", preference=0, partition=None)
            if (twin, run.label) in plain:
                found[label] = plain[twin, run.label]
    return found


def narrowed(planned: Planned[C], launches: Launches, instruments: Any) -> Launches:
    """Return what is left of launches after a look at those that have rivals. Collective.

    Args:
        planned: what each of them is.
        launches: that are right.
        instruments: that look.
    """
    rivals: dict[tuple[str, int], list[str]] = {}
    for label in launches:
        strategy, _, units = planned[label]
        rivals.setdefault((strategy.code, units), []).append(label)
    asked = [label for labels in rivals.values() if len(labels) > 1 for label in labels]
    if not asked:
        return launches
    looked = instruments.look({label: launches[label].run for label in asked})
    gone = set(asked) - lasting(rivals.values(), looked)
    return {label: launch for label, launch in launches.items() if label not in gone}


def lasting(rivals: Iterable[Sequence[str]], looked: Mapping[str, Sequence[float]]) -> set[str]:
    """Return those of several groups of names that are as fast as the fastest of their group, or nearly.

    >>> sorted(lasting([("a", "b", "c")], {"a": [100.0, 180.0], "b": [110.0, 105.0], "c": [120.0, 116.0]}))
    ['a', 'b']
    """
    best_us = {label: min(times) for label, times in looked.items()}
    timed = [[label for label in labels if label in best_us] for labels in rivals]
    return {
        label
        for labels in timed
        for label in labels
        if best_us[label] <= WORTH * min(best_us[other] for other in labels)
    }


@dataclasses.dataclass(frozen=True, slots=True)
class PairOutcome:
    """Everything measured about a pair.

    Attributes:
        rows: one for each strategy in its best configuration, and one of the strategy that ``auto`` picks.
        calls: label of the collective's call and units taken from the GEMM, by names of strategies that ran.
        alone_us: time of each call of the collective alone; None of one that failed, or was slower in a look.
        failures: problems by labels of calls, and by names of strategies that cannot run here.
        choice: choice of ``overlap`` under ``auto`` among the strategies that ran; None if none did.
    """

    rows: tuple[C3Row, ...]
    calls: Mapping[str, tuple[str, int]]
    alone_us: Mapping[str, float | None]
    failures: Mapping[str, Problem]
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
    tried: Mapping[str, Sequence[int]] = MappingProxyType({}),
    known: Isolated | None = None,
) -> PairOutcome:
    """Turn times into rows: ratios in each round first, then their medians.

    Args:
        workload: the pair.
        configurations: every way in which the collective was to be called.
        strategies: what was to be run.
        times: microseconds, one for each round, of the GEMM alone (``GEMM``), of configurations alone (their labels)
            and of strategies (``pair_label``). What failed is not there.
        failures: by the same names, and by the names of strategies that cannot run here.
        unavailable: implementations that should be here and are not, with the reason.
        tried: units that a strategy took from the GEMM, one number after another; (0,) where it is not named.
        known: isolated times, by which the partition heuristic's choice is held against a sweep's.

    Raises:
        UnavailableError: no implementation of the collective works, so nothing can be compared.
    """
    best = _fastest(_as_asked(configurations), times)
    if best is None:
        reasons = "; ".join(f"{c.label}: {failures[c.label].text}" for c in configurations if c.label in failures)
        raise UnavailableError(f"{workload.name}: no implementation works: {reasons}")
    gemm_us, best_us = statistics.median(times[GEMM]), statistics.median(times[best.label])
    library = _fastest([c for c in configurations if c.implementation in LIBRARY], times)
    whole: dict[str, Any] = {**workload.columns, "c3_class": classify(gemm_us, best_us), "chosen": ""}
    rows: dict[str, C3Row] = {}
    calls: dict[str, tuple[str, int]] = {}
    swept: dict[str, dict[int, float]] = {}
    for strategy in strategies:
        timed = _timed(strategy, configurations, times, failures, unavailable, tried.get(strategy.code, (0,)))
        columns: dict[str, Any] = {**whole, "strategy": strategy.code, "gemm_us": gemm_us, "best_comm_us": best_us}
        if isinstance(timed, Problem):
            correct = False if timed.wrong else None
            rows[strategy.code] = C3Row(**columns, **NO_TIMES, correct=correct, note=timed.text)
            continue
        chosen, units = min(timed, key=lambda one: statistics.median(times[pair_label(strategy, *one)]))
        sweep = {n: statistics.median(times[pair_label(strategy, one, n)]) for one, n in timed if n}
        together = times[pair_label(strategy, chosen, units)]
        rounds = RoundTimes(times[GEMM], times[best.label], times[chosen.label], together)
        of_library = None if library is None else dataclasses.replace(rounds, best=times[library.label])
        rows[strategy.code] = C3Row(
            **columns | rounds.columns(),
            time_us=statistics.median(together),
            percent_of_ideal_nccl=None if of_library is None else of_library.percent_of_ideal(),
            correct=True,
            note=chosen.label + _heuristic(workload, chosen.implementation, sweep, known),
            units=units,
            sweep=", ".join(f"{n} {time_us:.6g}" for n, time_us in sweep.items()),
        )
        calls[strategy.code], swept[strategy.code] = (chosen.label, units), sweep
    choice = _choice(workload, rows, strategies, swept)
    found = list(rows.values())
    if choice is not None:
        name, units = choice.candidate.strategy.code, choice.candidate.units
        picked = _with_units(rows[name], units, swept[name].get(units))
        found.append(dataclasses.replace(picked, strategy=AUTO, chosen=name, note=f"picked: {choice.reason}"))
    alone_us = {c.label: statistics.median(times[c.label]) if c.label in times else None for c in configurations}
    return PairOutcome(tuple(found), calls, alone_us, failures, choice)


def _choice(
    workload: Workload,
    rows: Mapping[str, C3Row],
    strategies: Sequence[Strategy],
    swept: Mapping[str, Mapping[int, float]],
) -> Selection[LaunchMode] | None:
    """Return the choice of ``overlap`` under ``auto`` among the strategies that ran; None if none did."""
    ran = [rows[one.code] for one in strategies if one.mover.makes_whole_call and one.code in swept]
    if not ran:
        return None
    assert ran[0].gemm_us is not None
    return rule_of(
        workload,
        ran[0].gemm_us,
        alone_us=ran[0].best_comm_us,
        engines_us=rows[CONCCL].comm_us if CONCCL in swept else None,
        ways={(row.strategy, units) for row in ran for units in (0, *swept[row.strategy])},
    )


def _timed(
    strategy: Strategy,
    configurations: Sequence[C],
    times: Mapping[str, Sequence[float]],
    failures: Mapping[str, Problem],
    unavailable: Mapping[str, str],
    tried: Sequence[int],
) -> list[tuple[C, int]] | Problem:
    """Return the configurations of a strategy and units that have times; the reason if there are none."""
    if strategy.code in failures:
        return failures[strategy.code]
    here = dict.fromkeys(c.implementation for c in configurations)
    name = implementation_of(strategy, here)
    if name is None:
        wanted = implementations_of(strategy.mover)
        reasons = [unavailable[one] for one in wanted if one in unavailable]
        absent = f"no {' or '.join(wanted)} among what runs here ({', '.join(here) or 'nothing'})"
        return Problem(f"not available: {(reasons or [absent])[0]}")
    own = [(c, units) for c in configurations if c.implementation == name for units in tried]
    timed = [one for one in own if pair_label(strategy, *one) in times]
    if timed:
        return timed
    found = (failures.get(label) for c, units in own for label in (pair_label(strategy, c, units), c.label))
    return next(filter(None, found), Problem("no configuration could run"))


def _with_units(picked: C3Row, units: int, time_us: float | None) -> C3Row:
    """Return the row of a swept strategy with the units that were chosen, which need not be the best."""
    if units == picked.units or time_us is None or picked.time_us is None or picked.speedup is None:
        return picked
    assert picked.gemm_us is not None
    assert picked.best_comm_us is not None
    return dataclasses.replace(
        picked,
        units=units,
        time_us=time_us,
        speedup=picked.speedup * picked.time_us / time_us,
        percent_of_ideal=possible_percent(percent_of_ideal(picked.gemm_us, picked.best_comm_us, time_us)),
        percent_of_ideal_nccl=None,
        percent_least=None,
        percent_most=None,
    )


def _heuristic(workload: Workload, implementation: str, times: Mapping[int, float], known: Isolated | None) -> str:
    """Say what the partition heuristic would have chosen, what that costs, and why; empty where there was no sweep."""
    if known is None or len(times) < 2:
        return ""
    try:
        found = units_for(known, workload, implementation)
    except ValueError as problem:
        return f"; no heuristic: {problem}"
    units = sum(found.candidate)
    if units not in times:
        return f"; heuristic: {units} units, which were not tried ({found.reason})"
    loss = times[units] / min(times.values()) - 1
    return f"; heuristic: {units} units, {loss:.1%} behind the best ({found.reason})"


def _as_asked(configurations: Sequence[Configuration]) -> list[Configuration]:
    """But for those of movers that make another call."""
    others = {name for mover in Mover if not mover.makes_whole_call for name in implementations_of(mover)}
    return [one for one in configurations if one.implementation not in others]


def _fastest(configurations: Sequence[Configuration], times: Mapping[str, Sequence[float]]) -> Configuration | None:
    timed = [c for c in configurations if c.label in times]
    return min(timed, key=lambda c: statistics.median(times[c.label]), default=None)

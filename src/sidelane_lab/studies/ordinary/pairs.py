"""Collectives next to a GEMM: every way, released first and on its own stream, as the strategy ``conccl`` has it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sidelane.c3.lanes import Lanes
from sidelane.c3.strategies import named
from sidelane.c3.strategy import ideal_speedup, percent_of_ideal, speedup
from sidelane.c3.workload import Workload
from sidelane_lab.baselines.candidate import Entrant, Prepared
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Job, Meter, Problem
from sidelane_lab.pairs.product import GemmRun
from sidelane_lab.pairs.run import Pairs, Workers
from sidelane_lab.studies.ordinary.alone import candidates_for, ready
from sidelane_lab.studies.ordinary.checks import row_of, with_late
from sidelane_lab.studies.ordinary.rows import OrdinaryRow
from sidelane_lab.studies.ordinary.ways import Way

HIDE_LAUNCH_US = 500.0
"""As in the C3 study."""

GEMM = "gemm"
Times = Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True)
class PairTimes:
    """Of one way, microseconds, one a round: the GEMM alone, the fastest collective alone, its own, and both."""

    gemm: Times
    best: Times
    alone: Times
    together: Times

    def columns(self) -> dict[str, Any]:
        """What a row has of them: ratios in each round first, then medians."""
        rounds = list(zip(self.gemm, self.best, self.together, strict=True))
        percents = [percent for one in rounds if (percent := percent_of_ideal(*one)) is not None]
        return {
            "gemm_us": statistics.median(self.gemm),
            "comm_us": statistics.median(self.alone),
            "best_comm_us": statistics.median(self.best),
            "speedup": statistics.median(speedup(*one) for one in rounds),
            "ideal": statistics.median(ideal_speedup(gemm, best) for gemm, best, _ in rounds),
            "percent_of_ideal": statistics.median(percents) if 2 * len(percents) > len(rounds) else None,
        }


def measure_pair(
    meter: Meter,
    ways: Mapping[str, Way],
    workload: Workload,
    case: Case,
    *,
    lanes: Lanes | None,
    warmup: int,
    repeats: int,
    seeds: Iterator[int],
) -> Iterator[OrdinaryRow]:
    """Check every way alone and next to the GEMM, time all in the same rounds, and check once more. Collective.

    Args:
        meter: of this rank.
        ways: with buffers that are large enough.
        workload: the pair.
        case: its collective.
        lanes: streams, on an accelerator.
        warmup: rounds before the measured ones.
        repeats: measured rounds.
        seeds: of random inputs.
    """
    beside = {name: way.next_to_computation() for name, way in ways.items()}
    candidates = candidates_for(beside, case, (False,))
    problems: dict[Entrant, Problem] = {}
    said: dict[Entrant, tuple[str, str]] = {}
    runs = {candidate: Prepared(candidate, case, way) for candidate, way in candidates.items()}
    with meter.on_stream(), Workers() as workers:
        gemm = GemmRun(workload.gemm, case.device)
        pairs = Pairs(gemm, lanes, workers)
        launches = {candidate: pairs.launch(named("conccl"), run) for candidate, run in runs.items()}

        def right(candidate: Entrant) -> Problem | None:
            return _check_pair(meter, gemm, runs[candidate], launches[candidate], next(seeds))

        for candidate, way in candidates.items():
            problem = ready(meter, way, runs[candidate], next(seeds)) or right(candidate)
            if problem is not None:
                problems[candidate] = problem
        able = [candidate for candidate in candidates if candidate not in problems]
        hide_us = 0.0 if case.device.type == "cpu" else HIDE_LAUNCH_US
        jobs = {GEMM: Job(gemm.run, hide_launch_us=hide_us)}
        for candidate in able:
            jobs[f"{candidate}, alone"] = Job(runs[candidate].run, hide_launch_us=hide_us)
            jobs[f"{candidate}, next to a GEMM"] = Job(launches[candidate], hide_launch_us=hide_us)
        rounds = meter.rounds(jobs, warmup=warmup, repeats=repeats) if able else {}
        for candidate in able:
            problem = right(candidate)
            if problem is None:
                said[candidate] = candidates[candidate].said()
            else:
                problems[candidate] = problem
    times = {name: measured.times_us for name, measured in rounds.items()}
    alone = [times[f"{candidate}, alone"] for candidate in able if candidate not in problems]
    best = min(alone, key=statistics.median, default=())
    for candidate, way in candidates.items():
        problem = problems.get(candidate)
        variant, reason = said.get(candidate, ("", ""))
        both = times.get(f"{candidate}, next to a GEMM", ())
        late = rounds[f"{candidate}, next to a GEMM"].late if candidate in able else 0
        reason = with_late(reason, late)
        columns = _dimensions(workload)
        if problem is None:
            columns |= PairTimes(times[GEMM], best, times[f"{candidate}, alone"], both).columns()
        yield row_of(case, way, variant, both, problem, reason, **columns)


def _check_pair(meter: Meter, gemm: GemmRun, run: Prepared, launch: Callable[[], None], seed: int) -> Problem | None:
    """Launch both on fresh inputs and poisoned outputs, and compare the results of both. Collective."""

    def execute() -> None:
        run.fill(seed)
        gemm.fill(seed)
        launch()

    return meter.check(f"{run.label}, next to a GEMM", execute, lambda: run.error(seed) or gemm.error())


def _dimensions(workload: Workload) -> dict[str, Any]:
    gemm = workload.gemm
    return {"gemm": gemm.name, "m": gemm.m, "n": gemm.n, "k": gemm.k}

"""Collectives alone, on tensors that stay: every way side by side in one run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sidelane.c3.lanes import Lanes
from sidelane.c3.strategies import named
from sidelane.c3.strategy import ideal_speedup, percent_of_ideal, speedup
from sidelane.c3.workload import Workload
from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US, Entrant, Prepared
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds, outcome
from sidelane_lab.pairs.product import GemmRun
from sidelane_lab.pairs.run import Pairs, Workers
from sidelane_lab.studies.collectives.rows import bus_gbps
from sidelane_lab.studies.collectives.study import calls_per_sample, checked, hides_launches
from sidelane_lab.studies.ordinary.rows import LEARNED, OrdinaryRow
from sidelane_lab.studies.ordinary.ways import LEARNING_CALLS, PLACES, Way


def with_late(said: str, late: int) -> str:
    """What a call said, and in how many rounds some host had not queued everything when the clock started."""
    return "; ".join(filter(None, (said, f"the host was late in {late} rounds" if late else "")))


def row_of(
    case: Case,
    way: Way,
    variant: str,
    times_us: Sequence[float],
    problem: Problem | None,
    said: str,
    *,
    in_place: bool = False,
    **more: Any,
) -> OrdinaryRow:
    """A row of a collective.

    Args:
        case: what it did.
        way: how.
        variant: see ``OrdinaryRow``.
        times_us: of a call, one a round.
        problem: why there are none.
        said: why it ran as it did.
        in_place: input and output share memory.
        more: columns of what was next to it, or of the host.
    """
    columns = outcome(Rounds(tuple(times_us)) if times_us else None, problem, said)
    median = columns["time_us"]
    rate = None
    if median is not None and "gemm" not in more:
        rate = bus_gbps(case.kind, case.nbytes, case.world_size, median)
    return OrdinaryRow(
        collective=case.kind,
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=in_place,
        launch="eager",
        implementation=way.name,
        variant=variant,
        prelaunch=False,
        bus_gbps=rate,
        energy_mj=None,
        reach=way.reach,
        **columns,
        **more,
    )


TOGETHER_EVERY = 4
"""Of these, behind which hosts wait for their devices. Hosts that are 16 calls apart learn nothing
(docs/internals/reach.md), and then most of the rounds would time calls that are staged."""


def measure_alone(
    meter: Meter, ways: Mapping[str, Way], case: Case, *, warmup: int, repeats: int, seeds: Iterator[int]
) -> Iterator[OrdinaryRow]:
    """Check every way, in and out of place, let it learn, time all that are right, and check once more. Collective.

    Args:
        meter: of this rank.
        ways: with buffers that are large enough.
        case: what to do.
        warmup: rounds before the measured ones.
        repeats: measured rounds.
        seeds: of random inputs.
    """
    calls = calls_per_sample(case.kind, case.nbytes, case.device.type)
    bound: dict[Entrant, Prepared] = {}
    problems: dict[Entrant, Problem] = {}
    said: dict[Entrant, tuple[str, str]] = {}
    candidates = candidates_for(ways, case)
    with meter.on_stream():
        for candidate, way in candidates.items():
            prepared = Prepared(candidate, case, way, calls)
            problem = ready(meter, way, prepared, next(seeds))
            if problem is None:
                bound[candidate] = prepared
            else:
                problems[candidate] = problem
        jobs = {
            candidate: prepared.job(HIDDEN_LAUNCH_US if hides_launches(case, candidate) else 0.0)
            for candidate, prepared in bound.items()
        }
        rounds = meter.rounds(jobs, warmup=warmup, repeats=repeats) if jobs else {}
        for candidate, prepared in bound.items():
            found = checked(meter, prepared, next(seeds), runs=2 if prepared.repeatable else 1)
            if found is None:
                said[candidate] = candidates[candidate].said()
            else:
                problems[candidate] = found
    for candidate, way in candidates.items():
        variant, reason = said.get(candidate, ("", ""))
        timed = rounds.get(candidate)
        times = () if timed is None else timed.times_us
        note = with_late(reason, 0 if timed is None else timed.late)
        yield row_of(case, way, variant, times, problems.get(candidate), note, in_place=candidate.in_place)


def candidates_for(ways: Mapping[str, Way], case: Case, places: tuple[bool, ...] | None = None) -> dict[Entrant, Way]:
    """What can be run of a case.

    Args:
        ways: that there are.
        case: what to do.
        places: out of place, in place; None for what is measured alone.
    """
    return {
        Entrant(way.name, variant, in_place): way
        for way in ways.values()
        for in_place in (PLACES[case.kind] if places is None else places)
        for variant in way.variants(case.kind, in_place)
    }


def ready(meter: Meter, way: Way, prepared: Prepared, seed: int) -> Problem | None:
    """Check a call, and repeat it until its ranks know what comes. Collective.

    Returns:
        What is wrong, also if peers do not reach the tensors in the way that the row would claim.
    """

    def learn() -> None:
        for number in range(LEARNING_CALLS if way.reach == LEARNED else 1):
            prepared.run()
            if number % TOGETHER_EVERY == 0:
                meter.finish(prepared.label)

    problem = checked(meter, prepared, seed) or meter.run(prepared.label, learn)
    if problem is None:
        objection = meter.attempt(lambda: way.objection(prepared.tensors))
        problem = None if objection is None else Problem(objection)
    return problem


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

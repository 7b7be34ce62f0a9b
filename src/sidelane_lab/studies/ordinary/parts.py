"""The parts of the study: collectives alone, and next to a GEMM.

All ways of a case take turns round by round. Each is checked, timed and checked once more.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sidelane.c3.partitions import PairStreams
from sidelane.c3.strategies import named
from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US, Entrant, ReadyCall
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds, WayComparison, outcome
from sidelane_lab.pairs.comparison import median_of_rounds, percent_of_rounds
from sidelane_lab.pairs.pair import HIDE_LAUNCH_US, GemmRun, Pair, Workers, check_launch
from sidelane_lab.pairs.workload import Workload, ideal_speedup, speedup
from sidelane_lab.studies.collectives import bus_gbps, calls_per_sample, checked, hides_launches
from sidelane_lab.studies.ordinary.rows import OrdinaryRow
from sidelane_lab.studies.ordinary.ways import PLACES, Way

GEMM = "gemm"
Times = Sequence[float]
Said = tuple[str, str]
"""The variant that a way ran its last call as, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTimes:
    """Times of one way, microseconds, one a round: the GEMM and the fastest collective alone, its own, and both."""

    gemm: Times
    best: Times
    alone: Times
    together: Times

    def columns(self) -> dict[str, Any]:
        """Return what a row has of them: ratios in each round first, then medians."""
        return {
            "gemm_us": statistics.median(self.gemm),
            "comm_us": statistics.median(self.alone),
            "best_comm_us": statistics.median(self.best),
            "speedup": median_of_rounds(speedup, self.gemm, self.best, self.together),
            "ideal": median_of_rounds(ideal_speedup, self.gemm, self.best),
            "percent_of_ideal": percent_of_rounds(self.gemm, self.best, self.together),
        }


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts on this rank; every rank makes the same calls.

    Attributes:
        meter: of this rank.
        ways: what is compared, with buffers that are large enough.
        warmup: rounds before the measured ones.
        repeats: measured rounds.
        seeds: of random inputs.
    """

    meter: Meter
    ways: Mapping[str, Way]
    warmup: int
    repeats: int
    seeds: Iterator[int]

    def alone(self, case: Case) -> Iterator[OrdinaryRow]:
        """Measure every way in and out of place. Collective."""
        calls = calls_per_sample(case.kind, case.nbytes, case.device.type)
        candidates = candidates_for(self.ways, case, PLACES[case.kind])
        said: dict[Entrant, Said] = {}
        compared = WayComparison[Entrant, ReadyCall]()

        def check(candidate: Entrant, call: ReadyCall) -> Problem | None:
            problem = checked(self.meter, call, next(self.seeds), runs=2 if call.repeatable else 1)
            if problem is None:
                said[candidate] = candidates[candidate].said()
            return problem

        with self.meter.on_stream():
            for candidate, way in candidates.items():
                call = ReadyCall(candidate, case, way, calls)
                compared.add(candidate, self._ready(way, call) or call)
            compared.rounds = self._rounds(
                {
                    candidate: call.job(HIDDEN_LAUNCH_US if hides_launches(case, candidate) else 0.0)
                    for candidate, call in compared.ready.items()
                }
            )
            compared.check_again(check)
        for candidate, way in candidates.items():
            timed, problem = compared.rounds.get(candidate), compared.problems.get(candidate)
            variant, reason = said.get(candidate, ("", ""))
            note = _with_late(reason, timed)
            yield row_of(case, way, variant, timed, problem, note, in_place=candidate.in_place)

    def pair(self, workload: Workload, case: Case, streams: PairStreams | None) -> Iterator[OrdinaryRow]:
        """Measure every way alone and next to a GEMM, as the strategy ``conccl`` has it. Collective.

        Args:
            workload: the pair.
            case: its collective.
            streams: streams, on an accelerator.
        """
        beside = {name: way.next_to_computation() for name, way in self.ways.items()}
        candidates = candidates_for(beside, case, (False,))
        problems: dict[Entrant, Problem] = {}
        said: dict[Entrant, Said] = {}
        runs = {candidate: ReadyCall(candidate, case, way) for candidate, way in candidates.items()}
        with self.meter.on_stream(), Workers() as workers:
            gemm = GemmRun(workload.gemm, case.device)
            gemm.fill(next(self.seeds))
            pairs = Pair(gemm, streams, workers)
            launches = {candidate: pairs.launch(named("conccl"), run) for candidate, run in runs.items()}

            def right(candidate: Entrant) -> Problem | None:
                label, seed = f"{candidate}, next to a GEMM", next(self.seeds)
                return check_launch(self.meter, label, launches[candidate], runs[candidate], (gemm,), seed)

            for candidate, way in candidates.items():
                problem = self._ready(way, runs[candidate]) or right(candidate)
                if problem is not None:
                    problems[candidate] = problem
            able = [candidate for candidate in candidates if candidate not in problems]
            hide_us = 0.0 if case.device.type == "cpu" else HIDE_LAUNCH_US
            jobs: dict[object, Job] = {GEMM: Job(gemm.run, hide_launch_us=hide_us)} if able else {}
            for candidate in able:
                jobs[candidate, "alone"] = Job(runs[candidate].run, hide_launch_us=hide_us)
                jobs[candidate, "both"] = Job(launches[candidate], hide_launch_us=hide_us)
            rounds = self._rounds(jobs)
            for candidate in able:
                self._note(candidate, candidates[candidate], right(candidate), problems, said)
        alone = [rounds[candidate, "alone"].times_us for candidate in able if candidate not in problems]
        best = min(alone, key=statistics.median, default=())
        for candidate, way in candidates.items():
            problem, both = problems.get(candidate), rounds.get((candidate, "both"))
            variant, reason = said.get(candidate, ("", ""))
            columns: dict[str, Any] = {"gemm": workload.gemm.name, **{n: getattr(workload.gemm, n) for n in "mnk"}}
            if problem is None and both is not None:
                own = rounds[candidate, "alone"].times_us
                columns |= RoundTimes(rounds[GEMM].times_us, best, own, both.times_us).columns()
            yield row_of(case, way, variant, both, problem, _with_late(reason, both), **columns)

    def _rounds(self, jobs: Mapping[Any, Job]) -> dict[Any, Rounds]:
        return self.meter.rounds(jobs, warmup=self.warmup, repeats=self.repeats) if jobs else {}

    def _ready(self, way: Way, prepared: ReadyCall) -> Problem | None:
        """Check a call. Collective.

        Returns:
            What is wrong, also if peers do not reach the tensors in the way that the row would claim.
        """
        problem = checked(self.meter, prepared, next(self.seeds)) or self.meter.run(prepared.label, prepared.run)
        if problem is None:
            objection = self.meter.attempt(lambda: way.objection(prepared.tensors))
            problem = None if objection is None else Problem(objection)
        return problem

    def _note(
        self,
        candidate: Entrant,
        way: Way,
        problem: Problem | None,
        problems: dict[Entrant, Problem],
        said: dict[Entrant, Said],
    ) -> None:
        """Keep what is wrong, or what the last call says of itself."""
        if problem is None:
            said[candidate] = way.said()
        else:
            problems[candidate] = problem


def candidates_for(ways: Mapping[str, Way], case: Case, places: tuple[bool, ...]) -> dict[Entrant, Way]:
    """Return what can be run of a case, out of place and in place as ``places`` says."""
    return {
        Entrant(way.name, variant, in_place): way
        for way in ways.values()
        for in_place in places
        for variant in way.variants(case.kind, in_place)
    }


def _with_late(said: str, rounds: Rounds | None) -> str:
    """Say in how many rounds some host had not queued everything when the clock started, too."""
    late = 0 if rounds is None else rounds.late
    return "; ".join(filter(None, (said, f"the host was late in {late} rounds" if late else "")))


def row_of(
    case: Case,
    way: Way,
    variant: str,
    rounds: Rounds | None,
    problem: Problem | None,
    note: str,
    *,
    in_place: bool = False,
    **more: Any,
) -> OrdinaryRow:
    """Make a row of a collective.

    Args:
        case: what it did.
        way: how.
        variant: see ``OrdinaryRow``.
        rounds: times of a call.
        problem: why there are none.
        note: why it ran as it did.
        in_place: input and output share memory.
        more: columns of what was next to it, or of the host.
    """
    columns = outcome(rounds, problem, note)
    median, beside = columns["time_us"], "gemm" in more
    return OrdinaryRow(
        collective=case.kind,
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=in_place,
        launch="eager",
        implementation=way.name,
        variant=variant,
        prelaunch=False,
        bus_gbps=None if median is None or beside else bus_gbps(case.kind, case.nbytes, case.world_size, median),
        energy_mj=None,
        reach=way.reach,
        **columns,
        **more,
    )

"""The parts of the study: collectives alone, next to a GEMM, and on tensors that change from call to call.

All ways of a case take turns round by round. Each is checked, let learn, timed and checked once more.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sidelane.c3.partitions import PairStreams
from sidelane.c3.strategies import named
from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US, Entrant, ReadyCall, Tensors, check_call
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds, WayComparison, outcome
from sidelane_lab.pairs.ideal import ideal_speedup, speedup
from sidelane_lab.pairs.outcome import median_of_rounds, percent_of_rounds
from sidelane_lab.pairs.run import HIDE_LAUNCH_US, GemmRun, Pairs, Workers, check_launch
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.studies.collectives import bus_gbps, calls_per_sample, checked, hides_launches
from sidelane_lab.studies.ordinary.programs import SETTLING, ChangingProgram, Room
from sidelane_lab.studies.ordinary.rows import LEARNED, NEW_SEGMENT, REPEATED, SYMMETRIC, OrdinaryRow
from sidelane_lab.studies.ordinary.ways import LEARNING_CALLS, PLACES, Way

GEMM = "gemm"
TOGETHER_EVERY = 4
"""Learning calls, behind which hosts wait for their devices. Hosts that are 16 calls apart learn nothing
(docs/internals/reach.md), and then most of the rounds would time calls that are staged."""

CALLS, FEW_CALLS = 10, 2
"""Calls of a sample on tensors that change, and of one whose tensors lie in new segments."""

ROUNDS, FEW_ROUNDS = 15, 5
"""Rounds at most. Calls in new segments map memory, and keep it; ranks that find nothing that comes again in a thousand
calls stage them from then on."""

HOST_CALLS, FEW_HOST_CALLS = 25, 5
"""Calls of which the host's median counts."""

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
            pairs = Pairs(gemm, streams, workers)
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

    def changing(self, case: Case) -> Iterator[OrdinaryRow]:
        """Run every program of ``SETTLING`` in every way, one after another. Collective.

        Symmetric tensors do not move: all ranks allocate them together. They have the program that repeats only.
        """
        rooms: dict[str, Room] = {}
        lacking: dict[str, Problem] = {}
        with self.meter.on_stream():
            for name, way in self.ways.items():

                def make(name: str = name, way: Way = way) -> None:
                    rooms[name] = Room(way, case)

                problem = self.meter.run(f"memory of {name}", make)
                if problem is not None:
                    lacking[name] = problem
        self.meter.finish("allocating")  # outside: symmetric memory is cleared on the default stream
        for change in SETTLING:
            taking = {name: way for name, way in self.ways.items() if change == REPEATED or name != SYMMETRIC}
            with self.meter.on_stream():
                yield from self._change(change, taking, case, rooms, {n: lacking[n] for n in taking if n in lacking})

    def _change(
        self,
        change: str,
        ways: Mapping[str, Way],
        case: Case,
        rooms: Mapping[str, Room],
        problems: dict[str, Problem],
    ) -> Iterator[OrdinaryRow]:
        few, programs, said = change == NEW_SEGMENT, dict[str, ChangingProgram](), dict[str, Said]()
        for name in [name for name in ways if name not in problems]:
            program = ChangingProgram(change, ways[name], case, rooms[name])
            label = f"{name}, {change}"
            problem = self._checked(label, program, case) or self.meter.run(label, program.settle)
            if problem is None:
                programs[name] = program
            else:
                problems[name] = problem
        calls = FEW_CALLS if few else CALLS

        def stock(number: int) -> None:
            for program in programs.values():
                program.stock(calls)
            self.meter.finish(f"before round {number} of {change}")

        jobs = {name: Job(program.run, repeats=calls, calls=calls) for name, program in programs.items()}
        repeats = min(self.repeats, FEW_ROUNDS if few else ROUNDS)
        rounds = self.meter.rounds(jobs, warmup=min(self.warmup, 1), repeats=repeats, on_round=stock) if jobs else {}
        host_us = self._host_times(change, programs, FEW_HOST_CALLS if few else HOST_CALLS)
        for name, program in programs.items():
            said[name] = program.way.said()
            problem = self._checked(f"{name}, {change}", program, case)
            objection = None if problem else self.meter.attempt(program.objection)
            if problem is not None or objection:
                problems[name] = problem or Problem(objection or "")
            program.close()
        for name, way in ways.items():
            variant, reason = said.get(name, ("", ""))
            note, problem = f"{variant}: {reason}" if variant else "", problems.get(name)
            host = host_us[name] if problem is None else None
            yield row_of(case, way, change, rounds.get(name), problem, note, host_us=host)

    def _rounds(self, jobs: Mapping[Any, Job]) -> dict[Any, Rounds]:
        return self.meter.rounds(jobs, warmup=self.warmup, repeats=self.repeats) if jobs else {}

    def _ready(self, way: Way, prepared: ReadyCall) -> Problem | None:
        """Check a call, and repeat it until its ranks know what comes. Collective.

        Returns:
            What is wrong, also if peers do not reach the tensors in the way that the row would claim.
        """

        def learn() -> None:
            for number in range(LEARNING_CALLS if way.reach == LEARNED else 1):
                prepared.run()
                if number % TOGETHER_EVERY == 0:
                    self.meter.finish(prepared.label)

        problem = checked(self.meter, prepared, next(self.seeds)) or self.meter.run(prepared.label, learn)
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

    def _host_times(self, change: str, programs: Mapping[str, ChangingProgram], calls: int) -> dict[str, float]:
        """Return the microseconds that a call takes the slowest rank's host, by way. Collective."""
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(calls):
            for name, program in programs.items():
                program.stock(1)
                self.meter.finish(f"{name}, {change}")
                self.meter.agree(None)  # hosts come together, so that a wait for them is short
                began = time.perf_counter_ns()
                program.run()
                times[name].append((time.perf_counter_ns() - began) / 1e3)
                self.meter.finish(f"{name}, {change}")
        return {name: max(map(statistics.median, self.meter.of_all_ranks(mine))) for name, mine in times.items()}

    def _checked(self, label: str, program: ChangingProgram, case: Case) -> Problem | None:
        """Make the next call on fresh input and poisoned output, and compare. Collective."""

        def tensors() -> Tensors:
            program.stock(1)
            return program.tensors

        return check_call(self.meter, label, case, tensors, program.run, next(self.seeds))


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

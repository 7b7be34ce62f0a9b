"""Collectives alone, on tensors that stay: every way side by side in one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US, Entrant, Prepared
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Meter, Problem
from sidelane_lab.studies.collectives.study import calls_per_sample, checked, hides_launches
from sidelane_lab.studies.ordinary.checks import row_of, with_late
from sidelane_lab.studies.ordinary.programs import LEARNING_CALLS
from sidelane_lab.studies.ordinary.rows import LEARNED, OrdinaryRow
from sidelane_lab.studies.ordinary.ways import PLACES, Way

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

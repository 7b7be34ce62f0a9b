"""What calls cost on tensors that change: time of the device a call, and what one takes the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping

from sidelane_lab.baselines.reference import Case, fill_input, output_error, poison
from sidelane_lab.harness.measure import Job, Meter, Problem
from sidelane_lab.studies.ordinary.checks import row_of
from sidelane_lab.studies.ordinary.programs import SETTLING, ChangingProgram, Room
from sidelane_lab.studies.ordinary.rows import NEW_SEGMENT, REPEATED, SYMMETRIC, OrdinaryRow
from sidelane_lab.studies.ordinary.ways import Way

CALLS = {NEW_SEGMENT: 2}
USUAL_CALLS = 10
"""In a sample."""

ROUNDS = {NEW_SEGMENT: 5}
USUAL_ROUNDS = 15
"""At most. Calls in new segments map memory, and keep it; ranks that find nothing that comes again in a thousand calls
stage them from then on."""

HOST_CALLS = {NEW_SEGMENT: 5}
USUAL_HOST_CALLS = 25
"""Of which the median counts."""


def measure_changing(
    meter: Meter, ways: Mapping[str, Way], case: Case, *, warmup: int, repeats: int, seeds: Iterator[int]
) -> Iterator[OrdinaryRow]:
    """Run every program of ``SETTLING`` in every way, one after another, the ways of each interleaved. Collective.

    Symmetric tensors do not move: all ranks allocate them together. They have the program that repeats only.

    Args:
        meter: of this rank.
        ways: that there are.
        case: what each call does.
        warmup: rounds before the measured ones.
        repeats: measured rounds.
        seeds: of random inputs.
    """
    rooms: dict[str, Room] = {}
    lacking: dict[str, Problem] = {}
    with meter.on_stream():
        for name, way in ways.items():

            def make(name: str = name, way: Way = way) -> None:
                rooms[name] = Room(way, case)

            problem = meter.run(f"memory of {name}", make)
            if problem is not None:
                lacking[name] = problem
    meter.finish("allocating")  # outside: symmetric memory is cleared on the default stream
    for change in SETTLING:
        taking = {name: way for name, way in ways.items() if change == REPEATED or name != SYMMETRIC}
        with meter.on_stream():
            yield from _measure_change(
                meter, change, taking, case, rooms, lacking, warmup=warmup, repeats=repeats, seeds=seeds
            )


def _measure_change(
    meter: Meter,
    change: str,
    ways: Mapping[str, Way],
    case: Case,
    rooms: Mapping[str, Room],
    lacking: Mapping[str, Problem],
    *,
    warmup: int,
    repeats: int,
    seeds: Iterator[int],
) -> Iterator[OrdinaryRow]:
    programs: dict[str, ChangingProgram] = {}
    problems = {name: lacking[name] for name in ways if name in lacking}
    for name, way in ways.items():
        if name in problems:
            continue
        program = ChangingProgram(change, way, case, rooms[name])
        label = f"{name}, {change}"
        problem = _check(meter, label, program, case, next(seeds)) or meter.run(label, program.settle)
        if problem is None:
            programs[name] = program
        else:
            problems[name] = problem
    calls = CALLS.get(change, USUAL_CALLS)

    def stock(number: int) -> None:
        for program in programs.values():
            program.stock(calls)
        meter.finish(f"before round {number} of {change}")

    rounds = {}
    if programs:
        jobs = {name: Job(program.run, repeats=calls, calls=calls) for name, program in programs.items()}
        few = min(repeats, ROUNDS.get(change, USUAL_ROUNDS))
        rounds = meter.rounds(jobs, warmup=min(warmup, 1), repeats=few, on_round=stock)
    host_us = _host_times(meter, change, programs)
    said = {name: program.way.said() for name, program in programs.items()}
    for name, program in programs.items():
        problem = _check(meter, f"{name}, {change}", program, case, next(seeds))
        objection = None if problem else meter.attempt(program.objection)
        if objection:
            problem = Problem(objection)
        if problem is not None:
            problems[name] = problem
        program.close()
    for name, way in ways.items():
        found, problem = rounds.get(name), problems.get(name)
        variant, reason = said.get(name, ("", ""))
        note = f"{variant}: {reason}" if variant else ""
        times = found.times_us if found else ()
        yield row_of(case, way, change, times, problem, note, host_us=host_us[name] if problem is None else None)


def _host_times(meter: Meter, change: str, programs: Mapping[str, ChangingProgram]) -> dict[str, float]:
    """Microseconds that a call takes the slowest rank's host, by way. Collective."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(HOST_CALLS.get(change, USUAL_HOST_CALLS)):
        for name, program in programs.items():
            program.stock(1)
            meter.finish(f"{name}, {change}")
            meter.agree(None)  # hosts come together, so that a wait for them is short
            began = time.perf_counter_ns()
            program.run()
            times[name].append((time.perf_counter_ns() - began) / 1e3)
            meter.finish(f"{name}, {change}")
    return {name: max(map(statistics.median, meter.of_all_ranks(mine))) for name, mine in times.items()}


def _check(meter: Meter, label: str, program: ChangingProgram, case: Case, seed: int) -> Problem | None:
    """Make the next call on fresh input and poisoned output, and compare. Collective."""
    kept = []

    def execute() -> None:
        program.stock(1)
        kept.append(program.tensors)
        assert kept[0].output is not None
        poison(kept[0].output)
        fill_input(case, kept[0].input, seed)
        program.run()

    def compare() -> str | None:
        output = kept[0].output
        return "there is no output" if output is None else output_error(case, output, seed)

    return meter.check(label, execute, compare)

"""What calls cost on tensors that change: time of the device a call, and what one takes the host."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from sidelane_lab.baselines.candidate import Tensors, views
from sidelane_lab.baselines.reference import Case, fill_input, output_error, poison
from sidelane_lab.harness.measure import Job, Meter, Problem
from sidelane_lab.studies.ordinary.parts import row_of
from sidelane_lab.studies.ordinary.rows import NEW_ADDRESS, NEW_SEGMENT, REPEATED, ROTATING, SYMMETRIC, OrdinaryRow
from sidelane_lab.studies.ordinary.ways import LEARNING_CALLS, Way

STEP_BYTES = 4096
SLOTS = 8
"""Pairs of tensors that rotate."""

MOST_ADDRESSES = 2048
"""Of a way."""

SEGMENT_BYTES = 32 << 20
"""torch's allocator gives a tensor of that size memory of its own, of which nothing is left for others."""

SETTLING = {REPEATED: LEARNING_CALLS, ROTATING: LEARNING_CALLS, NEW_ADDRESS: LEARNING_CALLS, NEW_SEGMENT: 0}
"""Programs, with the calls before their first sample. What came before has taught the ranks something else."""


class Room:
    """Buffers of one way, with places for many addresses.

    Args:
        way: whose.
        case: that fits in at each.
    """

    def __init__(self, way: Way, case: Case) -> None:
        extra = STEP_BYTES * (MOST_ADDRESSES + SLOTS)
        self.output, self.input = way.memory(case.output_bytes + extra), way.memory(case.input_bytes + extra)
        self._case = case
        self._fresh = iter(range(SLOTS, SLOTS + MOST_ADDRESSES))

    def at(self, number: int) -> Tensors:
        """The tensors at a place."""
        offset = number * STEP_BYTES
        return views(self._case, False, self.output[offset:], self.input[offset:])

    def fresh(self) -> Tensors:
        """Tensors at a place where none has been.

        Raises:
            RuntimeError: there was one everywhere.
        """
        number = next(self._fresh, None)
        if number is None:
            raise RuntimeError(f"Room: no place is left (value={MOST_ADDRESSES} calls, allowed=fewer rounds)")
        return self.at(number)


class ChangingProgram:
    """Calls of one way.

    Args:
        change: how tensors change; of ``SETTLING``.
        way: which way.
        case: what each call does.
        room: of the way.

    Attributes:
        tensors: of the call that comes next.
    """

    def __init__(self, change: str, way: Way, case: Case, room: Room) -> None:
        self.way = way
        self._change, self._case, self._room = change, case, room
        self._places = self._all_places()
        self._stock: collections.deque[tuple[Tensors, Callable[[], object]]] = collections.deque()
        self._kept: list[torch.Tensor] = []
        self._last: Tensors | None = None

    @property
    def tensors(self) -> Tensors:
        return self._stock[0][0]

    def stock(self, calls: int) -> None:
        """Make the tensors of the next calls, and whatever comes before these. Every rank does, at once."""
        if self._change == NEW_SEGMENT and self._case.device.type != "cpu":
            torch.cuda.empty_cache()  # or what was freed before is given out, which peers may know
        for _ in range(calls):
            tensors = next(self._places)
            self._stock.append((tensors, self.way.bind(self._case, tensors)))

    def run(self) -> None:
        """Make the next call."""
        self._last, call = self._stock.popleft()
        call()

    def settle(self) -> None:
        """Make calls until they are as those to come."""
        calls = SETTLING[self._change]
        self.stock(calls)
        for _ in range(calls):
            self.run()

    def objection(self) -> str | None:
        """Why peers do not reach the tensors of the last call as they should."""
        return None if self._last is None else self.way.objection(self._last)

    def close(self) -> None:
        """Drop all tensors. No call is under way."""
        self._stock.clear()
        self._kept.clear()
        self._last = None

    def _all_places(self) -> Iterator[Tensors]:
        number = 0
        while True:
            if self._change == REPEATED:
                yield self._room.at(0)
            elif self._change == ROTATING:
                yield self._room.at(number % SLOTS)
            elif self._change == NEW_SEGMENT:
                buffers = [
                    self.way.memory(max(nbytes, SEGMENT_BYTES if self._case.device.type != "cpu" else 0))
                    for nbytes in (self._case.output_bytes, self._case.input_bytes)
                ]
                self._kept += buffers  # or the next ones would be given the same memory
                yield views(self._case, False, buffers[0], buffers[1])
            else:
                yield self._room.fresh()
            number += 1


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

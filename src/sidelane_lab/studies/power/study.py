"""The study of power: every implementation back to back for most of a second, taking turns, with the counters read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from sidelane.choice.candidate import DMA
from sidelane.errors import UnavailableError
from sidelane.program.collective import REDUCING
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.candidate import Entrant, Implementation, ReadyCall, candidates_of
from sidelane_lab.baselines.reference import Case, cases_of
from sidelane_lab.baselines.roster import Roster, check_asked, make_roster
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.harness.ways import Job, Problem, Rounds
from sidelane_lab.studies.collectives import calls_per_sample
from sidelane_lab.studies.power.meter import PowerRound, Recorder, figures_of, power_of
from sidelane_lab.studies.power.predict import predict_row, predicted_rows
from sidelane_lab.studies.power.rows import PowerOptions, PowerRow, draw_power, power_tables
from sidelane_lab.studies.power.sensors import power_problem, power_sensor

OWN = ("dma", "sm", "auto")


def _check(options: PowerOptions, place: LaunchTarget) -> None:
    """Refuse a machine on which nothing tells its power, and names that are not known here."""
    problem = "needs GPUs, and here ranks are CPU processes" if place.on_cpu else power_problem()
    if problem is not None:
        raise UnavailableError(f"power: {problem} (sidelane power --machine h200x4 predicts instead)")
    names = {name: getattr(options, name) for name in ("implementations", "variants")}
    check_asked(place.device_type, options.collectives, **names, chosen_from=(DMA,))


def _measure(rank: Rank, options: PowerOptions, sender: Sender) -> Iterator[PowerRow]:
    """Make the rows. Collective."""
    sensor = power_sensor(rank.device.index)
    roster = make_roster(rank, wanted=options.implementations, timeout_s=options.step_s)
    if sensor.averaged:
        sender.note("these GPUs give power as a mean over a second only: trust the energy counter")
    recorder = Recorder(sensor)
    cases = cases_of(rank, options, sender, options.collectives)
    roster.reserve_for(cases, sender.note)
    bench = PowerBench(roster, recorder, options)
    sender.note(f"idle: {bench.idle_w:.0f} W a GPU")
    for case in cases:
        sender.step(f"{case.kind} {format_bytes(case.nbytes)}")
        yield from bench.rows(case)
    recorder.close()
    sensor.close()
    roster.close()


class PowerBench:
    """Measures on one rank, together with the others. Making it measures idle power.

    Args:
        roster: what takes part.
        recorder: of this rank's GPU.
        options: how long, how often.
    """

    def __init__(self, roster: Roster, recorder: Recorder, options: PowerOptions) -> None:
        self._roster, self._meter, self._recorder, self._options = roster, roster.meter, recorder, options
        self._seeds = itertools.count(options.seed + 1)
        self._meter.finish("setting up")

        def rest() -> float:
            time.sleep(options.idle_s)
            return 0.0

        self._idle = power_of(self._meter, recorder, rest).watts
        self.idle_w = statistics.fmean(self._idle)

    def rows(self, case: Case) -> Iterator[PowerRow]:
        """Prepare and check every candidate, run what is right in rounds, and make rows. Collective."""
        meter, options = self._meter, self._options
        calls = calls_per_sample(case.kind, case.nbytes, case.device.type)
        makers = {
            candidate: functools.partial(ReadyCall, candidate, case, implementation, calls)
            for candidate, implementation in self._candidates(case)
        }
        inputs: list[ReducedInput] = []
        points: dict[Entrant, list[PowerRound]] = {candidate: [] for candidate in makers}

        def run(ready: dict[Entrant, ReadyCall]) -> Mapping[Entrant, Rounds]:
            if not ready:
                return {}
            rounds = meter.rounds({candidate: call.job() for candidate, call in ready.items()}, warmup=1, repeats=2)
            replays = {candidate: self._replays(rounds[candidate], call) for candidate, call in ready.items()}
            names = list(ready)
            for number in range(options.rounds):
                shift = number % len(names)
                for candidate in names[shift:] + names[:shift]:  # each round begins with another one
                    points[candidate].append(self._run(ready[candidate], replays[candidate], *inputs))
            return rounds

        if case.kind in REDUCING:
            with meter.on_stream():
                refused = meter.attempt(lambda: inputs.append(ReducedInput(case, next(self._seeds))))
            if refused is not None:
                for candidate in makers:
                    yield self._row(case, candidate, candidate.variant, [], Problem(refused))
                return
        for one in meter.compare(makers, self._seeds, run):
            variant = one.key.variant if one.way is None else one.way.variant
            yield self._row(case, one.key, variant, points[one.key], one.problem)

    def _candidates(self, case: Case) -> Iterator[tuple[Entrant, Implementation]]:
        options = self._options
        found: dict[Entrant, Implementation] = {}
        for name, implementation in self._roster.implementations.items():
            if name == "auto" and name not in options.implementations:
                continue  # the choice is one of the others
            launch = options.launch if options.launch in implementation.launches else "eager"
            only = options.variants if name == DMA else ()
            for candidate in candidates_of(implementation, case.kind, only=only, launches=(launch,)):
                if not options.places or ("in" if candidate.in_place else "out") in options.places:
                    found[candidate] = implementation
        # A place that only Sidelane has, as an all_to_all in place, is left out: nothing could be compared.
        others = {candidate.in_place for candidate in found if candidate.implementation not in OWN}
        return ((c, implementation) for c, implementation in found.items() if c.in_place in others or not others)

    def _replays(self, measured: Rounds, call: ReadyCall) -> int:
        """Return how often a call's sample has to run to last as long as asked, the same on every rank."""
        return max(2, math.ceil(self._options.seconds * 1e6 / (measured.median_us * call.calls)))

    def _run(self, prepared: ReadyCall, replays: int, given: ReducedInput | None = None) -> PowerRound:
        """Run one candidate back to back and read the counters. Collective. ``given``: what a reduction adds up."""
        job, again = prepared.job(), lambda: None
        every = replays
        if given is not None:
            given.put(prepared)
            self._meter.finish("filling the input")
            every = given.replays_between(prepared, job.calls) or replays
            again = functools.partial(given.put, prepared)

        def work() -> float:
            return self._elapsed_us(job, replays, prepared.label, every, again) / (replays * job.calls)

        return power_of(self._meter, self._recorder, work)

    def _elapsed_us(self, job: Job, replays: int, label: str, every: int, again: Callable[[], object]) -> float:
        """Time of all replays, with ``again`` between every so many of them."""
        on_cpu = self._meter.device.type == "cpu"
        begin = time.perf_counter()
        if not on_cpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
        for number in range(replays):
            if number and number % every == 0:
                again()
            for _ in range(job.repeats):
                job.run()
        if on_cpu:
            return (time.perf_counter() - begin) * 1e6
        end.record()
        self._meter.finish(label)
        return float(start.elapsed_time(end)) * 1e3

    def _row(
        self, case: Case, candidate: Entrant, variant: str, points: Sequence[PowerRound], problem: Problem | None
    ) -> PowerRow:
        row = PowerRow(
            collective=case.kind,
            bytes=case.nbytes,
            implementation=candidate.implementation,
            variant=variant,
            in_place=candidate.in_place,
            launch=candidate.launch,
            idle_watts=self.idle_w,
            note=problem.text if problem is not None else "nothing was run",
        )
        if problem is not None:
            return dataclasses.replace(row, correct=False if problem.wrong else None)
        return dataclasses.replace(row, correct=True, **figures_of(points, self._idle))


SMALLEST = -100
LARGEST = 100
"""Powers of two between which values are kept; bfloat16 and float32 reach from -126 to 127."""


def calls_between(world_size: int) -> int:
    """Calls of an all_reduce in place after which its values come near to ``LARGEST``.

    >>> calls_between(2), calls_between(4), calls_between(8)
    (200, 100, 66)
    """
    return max(1, math.floor((LARGEST - SMALLEST) / math.log2(max(2, world_size))))


class ReducedInput:
    """This rank's input of one case: values that stay numbers however often they are added up.

    Watts follow the bits that change. Run back to back, an all_reduce in place multiplies its input by the number of
    ranks in every call: the small whole numbers of the checks would be infinite after some sixty calls on four ranks,
    then no numbers at all, and the same bits would cross the links from there on. So inputs are random and tiny, and
    calls that overwrite theirs get them anew long before they overflow.

    Args:
        case: a reduction.
        seed: of its values.

    Raises:
        ValueError: no reduction, or a dtype whose exponents are too short for it.
    """

    def __init__(self, case: Case, seed: int) -> None:
        if case.kind not in REDUCING:
            raise ValueError(f"ReducedInput: kind (value={case.kind}, allowed={', '.join(sorted(REDUCING))})")
        if not case.dtype.is_floating_point or math.log2(torch.finfo(case.dtype).max) < LARGEST:
            raise ValueError(f"ReducedInput: dtype (value={case.dtype}, allowed=bfloat16, float32, float64)")
        generator = torch.Generator(device=case.device).manual_seed(64 * seed + case.rank)
        self._values = torch.empty(case.input_bytes // case.dtype.itemsize, dtype=case.dtype, device=case.device)
        self._values.uniform_(-1.0, 1.0, generator=generator).mul_(2.0**SMALLEST)
        self._calls = calls_between(case.world_size)

    def put(self, prepared: ReadyCall) -> None:
        """Give a candidate these values, on the current stream."""
        prepared.tensors.input.copy_(self._values)

    def replays_between(self, prepared: ReadyCall, calls: int) -> int | None:
        """Samples of ``calls`` after which a candidate needs them again; None if it leaves its input as it is."""
        return None if prepared.repeatable else max(1, self._calls // calls)


STUDY = Study(
    name="power",
    title="Power and energy of collectives",
    legend=(
        "Collectives back to back; watts by the GPUs' energy counters, 'read/count' is the mean of power readings "
        "over that. The least energy of each size is bold. Method: results/notes/power.md."
    ),
    row=PowerRow,
    tables=power_tables,
    plots=lambda rows, results, folder: draw_power(rows, results.where, folder),
    measure=_measure,
    predict=predicted_rows,
    predict_row=predict_row,
    check=_check,
    progress="power",
)

"""Whole workloads from end to end, by who communicates.

All ways of a size have the same weights and inputs, live in one process, and take turns round by round, call by call
and in CUDA graphs. Each way's result is compared with the library's before the rounds and after them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from sidelane.config import current
from sidelane.integrations import ledger
from sidelane.machine.inventory import machine_name
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.e2e import EndToEndOptions
from sidelane_lab.harness.launch import Rank, choose_target
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.running import Sender, rows_there, run_study
from sidelane_lab.harness.study import Results, Study
from sidelane_lab.harness.ways import Job, Problem, Rounds
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.clients.programs import EAGER, GRAPH, NONE, calls_by_maker
from sidelane_lab.studies.clients.study import FEWEST_ROUNDS, difference, loaded_nccl, over_percents
from sidelane_lab.studies.e2e.prediction import cases_of, with_predictions
from sidelane_lab.studies.e2e.rows import WorkloadRow, case_of, draw_steps, step_tables
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared
from sidelane_lab.studies.fsdp.study import exposed_ms, recovered_percent
from sidelane_lab.studies.torch_groups import StudyGroups, library_of

SAMPLE_S = 0.2
"""Seconds that the steps of a sample may take, if more than one."""

Variant = tuple[str, str]
"""A way and a launch."""


def main(options: EndToEndOptions) -> Results | None:
    """Measure what the file does not have; with ``resume`` it grows row by row."""
    place = choose_target(options.ranks, options.device)
    known = rows_there(STUDY, options.json, place) if options.resume else ()
    options = dataclasses.replace(options, done=frozenset(case_of(row) for row in known if row.step_ms is not None))
    return run_study(STUDY, options, place=place, known=known, grows=options.json if options.resume else None)


def _measure(rank: Rank, options: EndToEndOptions, sender: Sender) -> Iterator[WorkloadRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported, which this process has not done
    nccl = "" if on_cpu else loaded_nccl()
    every = cases_of(options, on_cpu=on_cpu)
    cases = [(workload, size) for workload, size in every if (workload.name, size, nccl) not in options.done]
    sender.steps = len(cases)
    if on_cpu:
        sender.note("on CPUs kernels are interpreted: the results are checked, and the times say nothing")
    machine = _described(rank)
    meter, groups, library = make_meter(rank, options.step_s), StudyGroups(rank), library_of(rank.device.type)
    group = groups.make(library)

    def over(left: Sequence[tuple[EndToEndWorkload, str]]) -> None:
        names = "; ".join(f"{workload.name} {size}" for workload, size in left)
        sender.note(f"{options.budget_s:g} s are over; left: {names} (--resume goes on with them)")

    for workload, size in meter.within(cases, options.budget_s, over, 1):
        sender.step(f"{workload.name}, {size}")
        row = functools.partial(WorkloadRow, workload=workload.name, size=size, nccl=nccl, unit=workload.unit)
        trial = _SizeTrial(rank, meter, options)
        with meter.on_stream():
            rows = trial.rows(functools.partial(workload.prepare, workload.sizes[size], group), library, row)
            yield from rows if machine is None else with_predictions(rows, machine)
        del trial
        gc.collect()
        if not on_cpu:
            torch.cuda.empty_cache()
    dist.destroy_process_group(group)


class _SizeTrial:
    """All ways of a workload at one size, on one rank."""

    def __init__(self, rank: Rank, meter: Meter, options: EndToEndOptions) -> None:
        self._rank, self._meter, self._options = rank, meter, options
        self._runs: dict[Variant, Callable[[], torch.Tensor]] = {}
        self._reference: torch.Tensor | None = None
        self._problems: dict[Variant, Problem] = {}
        self._differences: dict[Variant, float] = {}
        self._made_by: dict[str, str] = {}

    def rows(
        self,
        prepare: Callable[[Communicator, torch.device], Prepared],
        library: str,
        row: Callable[..., WorkloadRow],
    ) -> list[WorkloadRow]:
        """Prepare, compare, time and compare again. Collective."""
        config = dataclasses.replace(current(), timeout_s=self._options.step_s)
        # One for each size: its symmetric memory goes with it.
        with Communicator(device=self._rank.device, config=config) as comm:
            made: list[Prepared] = []
            problem = self._meter.run("preparation", lambda: made.append(prepare(comm, self._rank.device)))
            if problem is not None:
                nothing = {**_figures(None, None, None, 0), "difference": None, "correct": None}
                return [row(way=library, launch=EAGER, made_by="", facts={}, note=problem.text, **nothing)]
            try:
                steps = {way.replace("nccl", library): step for way, step in made[0].steps.items()}
                return self._rows(dataclasses.replace(made[0], steps=steps), row)
            finally:
                self._runs.clear()  # graphs go before the communicator whose memory they use
                made.clear()

    def _rows(self, prepared: Prepared, row: Callable[..., WorkloadRow]) -> list[WorkloadRow]:
        launches = (EAGER,) if self._rank.device.type == "cpu" else (EAGER, GRAPH)
        first = next(iter(prepared.steps))
        for way, step in prepared.steps.items():
            for launch in launches:
                self._add((way, launch), step, prepared)
        times = self._timed()
        for variant in times:
            self._compare(variant, prepared)
        facts = {name: float(f"{value:.5g}") for name, value in prepared.facts.items()}
        rows = []
        for launch in launches:
            for way in prepared.steps:
                problem = self._problems.get((way, launch))
                found = None if problem is not None else times.get((way, launch))
                figures = _figures(found, times.get((first, launch)), times.get((NONE, launch)), prepared.units)
                correct = None if way == NONE else True if problem is None else False if problem.wrong else None
                figures |= {"made_by": self._made_by.get(way, ""), "difference": self._differences.get((way, launch))}
                note = "" if problem is None else problem.text
                rows.append(row(way=way, launch=launch, correct=correct, facts=facts, note=note, **figures))
        return rows

    def _add(self, variant: Variant, step: Callable[[], torch.Tensor], prepared: Prepared) -> None:
        """Make a way ready to be timed: run it some times, or capture it; and compare. Collective."""
        way, launch = variant
        if launch == GRAPH and (way, EAGER) in self._problems:
            self._problems[variant] = self._problems[way, EAGER]
            return
        if launch == GRAPH and way in prepared.uncapturable:
            self._problems[variant] = Problem("a CUDA graph cannot hold it")
            return

        def ready() -> None:
            if launch == GRAPH:
                self._runs[variant] = _replays(step)
                return
            for _ in range(self._options.warmup):  # a group's first calls are eager, and so are an operator's
                step()
            ledger.reset()
            step()
            self._made_by[way] = calls_by_maker(ledger.report().rows)
            self._runs[variant] = step

        problem = self._meter.run(f"{way}, {launch}", ready)
        if problem is None:
            self._compare(variant, prepared)
        else:
            self._problems[variant] = problem
            self._runs.pop(variant, None)

    def _compare(self, variant: Variant, prepared: Prepared) -> None:
        """Compare a result with the library's, whose first one is kept. Collective."""
        way, launch = variant
        label, apart = f"{way}, {launch}", [float("nan")]

        def compare() -> None:
            result = self._runs[variant]().detach()
            if self._reference is None and variant == (next(iter(prepared.steps)), EAGER):
                self._reference = result.clone()
            if self._reference is None:
                raise ValueError("the library has no result to compare with")
            if way != NONE:  # whose result may have another shape
                apart[0] = difference(result, self._reference)

        problem = self._meter.run(label, compare)
        if problem is None and way != NONE:
            found = [theirs for (theirs,) in self._meter.of_all_ranks(apart)]
            worst = max(found, key=lambda one: float("inf") if one != one else one)
            if worst == worst:
                self._differences[variant] = worst
            if not worst <= prepared.tolerance:
                text = f"the result is {worst:.3g} from the library's, and {prepared.tolerance:.3g} is allowed"
                problem = Problem(text, wrong=True)
        if problem is not None:
            self._problems[variant] = problem

    def _timed(self) -> Mapping[Variant, Rounds]:
        options = self._options
        ready = {variant: run for variant, run in self._runs.items() if variant not in self._problems}
        if not ready:
            return {}
        tried = self._meter.rounds({name: Job(run) for name, run in ready.items()}, warmup=1, repeats=1)
        times_s = [rounds.median_us / 1e6 for rounds in tried.values()]
        steps = max(1, min(options.steps, int(SAMPLE_S / max(times_s))))
        count = max(min(FEWEST_ROUNDS, options.rounds), min(options.rounds, int(options.size_s / steps / sum(times_s))))
        jobs = {variant: Job(run, repeats=steps, calls=steps) for variant, run in ready.items()}
        return self._meter.rounds(jobs, warmup=1, repeats=count)


def _replays(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a step. Returns what replays it, and returns its result."""
    results: list[torch.Tensor] = []
    graph = captured(lambda: results.append(step()), 1)

    def replay() -> torch.Tensor:
        graph.replay()
        return results[0]

    return replay


def _figures(times: Rounds | None, library: Rounds | None, floor: Rounds | None, units: int) -> dict[str, object]:
    """Return the columns of a row that follow from times. Predictions come later."""
    exposed = exposed_ms(times, floor)
    return {
        "step_ms": None if times is None else times.median_us / 1e3,
        "fastest_ms": None if times is None else min(times.times_us) / 1e3,
        "slowest_ms": None if times is None else max(times.times_us) / 1e3,
        "rounds": 0 if times is None else len(times.times_us),
        "per_second": None if times is None else units / times.median_us * 1e6,
        "over_percent": None if times is None or library is None else statistics.median(over_percents(times, library)),
        "exposed_ms": exposed,
        "exposed_percent": None if exposed is None or times is None else 1e5 * exposed / times.median_us,
        "recovered_percent": recovered_percent(times, library, floor),
        "predicted_ms": None,
    }


def _described(rank: Rank) -> Machine | None:
    """Return the description of this machine; None on CPUs, and where there is none."""
    if rank.device.type == "cpu":
        return None
    name = machine_name(torch.cuda.get_device_name(rank.device), rank.world_size)
    return named(name) if name in machine_names() else None


STUDY = Study(
    name="e2e",
    title="Whole workloads, by who communicates",
    legend=(
        "A step of a model from end to end. group: the same code on a process group of Sidelane's; operators: "
        "Sidelane's fused operators or layouts; none: no communication. Medians over rounds of the slowest rank, in "
        "which the ways take turns; the least of each launch is bold. over the library: than NCCL (Gloo on CPUs) in "
        "the same round; exposed: more than none; recovered: of the library's exposed time; predicted: what the model "
        "of the machine, which knows no host, expects to be exposed, and where there is no none of the step; off: the "
        "difference of that from what was measured, in percent of the step; difference: from the library's result, "
        "next to its norm."
    ),
    row=WorkloadRow,
    tables=step_tables,
    plots=draw_steps,
    measure=_measure,
    main=main,
    progress="whole workloads",
    key=lambda row: (case_of(row), row.launch, row.way),
)

"""Whole workloads from end to end, by who communicates.

All ways of a size have the same weights and inputs, live in one process, and take turns round by round, call by call
and in CUDA graphs. Each way's result is compared with the library's before the rounds and after them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from sidelane.config import HOST, current
from sidelane.integrations import ledger
from sidelane.machine.inventory import machine_name
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.e2e import EndToEndOptions
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.running import RESUMES, Sender
from sidelane_lab.harness.study import Results, Study
from sidelane_lab.harness.ways import Job, Rounds, Way, outcome
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.e2e.prediction import cases_of, with_predictions
from sidelane_lab.studies.e2e.rows import WorkloadRow, case_of, draw_steps, step_tables
from sidelane_lab.studies.e2e.workload import Prepared
from sidelane_lab.studies.steps import (
    EAGER,
    FEWEST_ROUNDS,
    GRAPH,
    NONE,
    calls_by_maker,
    difference,
    loaded_nccl,
    run_resumed,
    step_columns,
)
from sidelane_lab.studies.torch_groups import StudyGroups, library_of

SAMPLE_S = 0.2
"""Seconds that the steps of a sample may take, if more than one."""

Variant = tuple[str, str]
"""A way and a launch."""


def main(options: EndToEndOptions) -> Results | None:
    """Measure what the file does not have."""
    return run_resumed(STUDY, options, case_of)


def _measure(rank: Rank, options: EndToEndOptions, sender: Sender) -> Iterator[WorkloadRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported, which this process has not done
    nccl = "" if on_cpu else loaded_nccl()
    every = cases_of(options, on_cpu=on_cpu)
    cases = [(workload, size) for workload, size in every if (workload.name, size, nccl) not in options.done]
    if on_cpu:
        sender.note("on CPUs kernels are interpreted: the results are checked, and the times say nothing")
    machine = _described(rank)
    meter, group = make_meter(rank, options.step_s), StudyGroups(rank).make(library_of(rank.device.type))
    begun = sender.steps_within(meter, cases, options.budget_s, lambda case: f"{case[0].name}, {case[1]}", RESUMES)
    for workload, size in begun:
        prepare = functools.partial(workload.prepare, workload.sizes[size], group)
        row = functools.partial(WorkloadRow, workload=workload.name, size=size, nccl=nccl, unit=workload.unit)
        with meter.on_stream():
            rows = rows_of(rank.device, meter, options, prepare, row)
        yield from rows if machine is None else with_predictions(rows, machine)
        gc.collect()
        if not on_cpu:
            torch.cuda.empty_cache()
    dist.destroy_process_group(group)


class WorkloadWay(Way):
    """A way to make a step, in one launch.

    Args:
        variant: the way and the launch.
        prepared: steps of all ways, and how far their results may be apart.
        reference: the library's first result, once there is one.
        meter: of all ranks.
        warmup: steps before the first one that is compared: a group's first calls are eager, and so are an operator's.

    Attributes:
        difference: largest of all ranks from the library's result, next to its norm; None where nothing was compared.
        made_by: makers of the calls of a step.
    """

    difference: float | None = None
    made_by = ""

    def __init__(
        self, variant: Variant, prepared: Prepared, reference: list[torch.Tensor], meter: Meter, warmup: int
    ) -> None:
        way, launch = variant
        self.label, self.as_graph, self._is_compared = f"{way}, {launch}", launch == GRAPH, way != NONE
        self._is_library = variant == (next(iter(prepared.steps)), EAGER)
        self._step, self._tolerance = prepared.steps[way], prepared.tolerance
        self._reference, self._meter, self._to_warm = reference, meter, 0 if self.as_graph else warmup
        self._result: torch.Tensor | None = None

    def fill(self, seed: int) -> None:
        """Leave weights and inputs as they are."""

    def run(self) -> None:
        if self.graphs:
            self.graphs[0].replay()
            return
        if not self._reference and not self._is_library:
            raise ValueError("the library has no result to compare with")
        for _ in range(self._to_warm):
            self._step()
        self._to_warm = 0
        ledger.reset()
        self._result = self._step().detach()
        self.made_by = calls_by_maker(ledger.report().rows)

    def capture(self) -> None:
        def step() -> None:
            self._result = self._step().detach()

        self.graphs = (captured(step, 1),)

    def job(self, steps: int) -> Job:
        """Return the work of a sample."""
        return Job(self.graphs[0].replay if self.graphs else self._step, repeats=steps, calls=steps)

    def error(self, seed: int) -> str | None:
        if self._result is None:
            return "there is no result"
        if not self._reference:
            self._reference.append(self._result.clone())
        if not self._is_compared:  # the result may have another shape
            return None
        apart = difference(self._result, self._reference[0])
        found = [theirs for (theirs,) in self._meter.of_all_ranks([apart])]
        worst = max(found, key=lambda one: math.inf if math.isnan(one) else one)
        self.difference = None if math.isnan(worst) else worst
        if worst <= self._tolerance:
            return None
        return f"the result is {worst:.3g} from the library's, and {self._tolerance:.3g} is allowed"

    def close(self) -> None:
        super().close()
        self._result = None


def rows_of(
    device: torch.device,
    meter: Meter,
    options: EndToEndOptions,
    prepare: Callable[[Communicator, torch.device], Prepared],
    row: Callable[..., WorkloadRow],
) -> list[WorkloadRow]:
    """Prepare a workload at one size, and compare its ways. Collective."""
    library, made = library_of(device.type), list[Prepared]()
    # A communicator for each size: its symmetric memory goes with it.
    with Communicator(device=device, config=dataclasses.replace(current(), timeout_s=options.step_s)) as comm:
        problem = meter.run("preparation", lambda: made.append(prepare(comm, device)))
        if problem is not None:
            columns = {**_columns(None, None, None, 0), "difference": None, "made_by": "", "facts": {}}
            return [row(way=library, launch=EAGER, correct=None, note=problem.text, **columns)]
        steps = {way.replace("nccl", library): step for way, step in made[0].steps.items()}
        return _compared(dataclasses.replace(made.pop(), steps=steps), meter, options, row)


def _compared(
    prepared: Prepared, meter: Meter, options: EndToEndOptions, row: Callable[..., WorkloadRow]
) -> list[WorkloadRow]:
    launches = (EAGER,) if meter.device.type == "cpu" else (EAGER, GRAPH)
    reference: list[torch.Tensor] = []
    makers = {
        (way, launch): functools.partial(WorkloadWay, (way, launch), prepared, reference, meter, options.warmup)
        for way in prepared.steps
        for launch in launches
    }

    def timed(ready: dict[Variant, WorkloadWay]) -> Mapping[Variant, Rounds]:
        if not ready:
            return {}
        tried = meter.rounds({variant: way.job(1) for variant, way in ready.items()}, warmup=1, repeats=1)
        times_s = [rounds.median_us / 1e6 for rounds in tried.values()]
        steps = max(1, min(options.steps, int(SAMPLE_S / max(times_s))))
        count = max(min(FEWEST_ROUNDS, options.rounds), min(options.rounds, int(options.size_s / steps / sum(times_s))))
        return meter.rounds({variant: way.job(steps) for variant, way in ready.items()}, warmup=1, repeats=count)

    found = {one.key: one for one in meter.compare(makers, itertools.count(), timed)}
    facts = {name: float(f"{value:.5g}") for name, value in prepared.facts.items()}
    rows = []
    for launch in launches:
        library, floor = ((way, launch) for way in (next(iter(prepared.steps)), NONE))
        for way in prepared.steps:
            one = found[way, launch]
            columns = _columns(
                None if one.problem is not None else one.rounds,
                found[library].rounds,
                found[floor].rounds if floor in found else None,
                prepared.units,
            )
            said = outcome(one.rounds, one.problem)
            rows.append(
                row(
                    way=way,
                    launch=launch,
                    correct=None if way == NONE else said["correct"],
                    facts=facts,
                    note=said["note"],
                    made_by="" if one.way is None else one.way.made_by,
                    difference=None if one.way is None else one.way.difference,
                    **columns,
                )
            )
    return rows


def _columns(times: Rounds | None, library: Rounds | None, floor: Rounds | None, units: int) -> dict[str, object]:
    """Return the columns of a row that follow from times. Predictions come later."""
    columns = step_columns(times, library, floor)
    exposed = columns["exposed_ms"]
    return {
        **columns,
        "per_second": None if times is None else units / times.median_us * 1e6,
        "exposed_percent": None if exposed is None or times is None else 1e5 * exposed / times.median_us,
        "predicted_ms": None,
    }


def _described(rank: Rank) -> Machine | None:
    """Return the description of this machine; None on CPUs, and where there is none."""
    if rank.device.type == "cpu":
        return None
    name = machine_name(torch.cuda.get_device_name(rank.device), rank.world_size)
    name += "-host" * (current().peers == HOST)
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

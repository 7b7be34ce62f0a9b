"""Whole workloads from end to end, by who communicates.

All ways of a size have the same weights and inputs, live in one process, and take turns round by round, call by call
and in CUDA graphs. Each way's result is compared with the library's before the rounds and after them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from sidelane.cli.launch import Rank, choose_target
from sidelane.cli.table import grouped
from sidelane.config import current
from sidelane.integrations import ledger
from sidelane.machine.inventory import machine_name
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.e2e import WORKLOADS, EndToEndOptions
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds
from sidelane_lab.harness.options import require_all
from sidelane_lab.harness.report import Cell, tables_by
from sidelane_lab.harness.running import Sender, rows_there, run_study
from sidelane_lab.harness.study import FlatRow, Picture, Results, Study
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.kernels import dma_us, own_gang
from sidelane_lab.studies.clients.programs import EAGER, GRAPH, GROUP, NONE, calls_by_maker
from sidelane_lab.studies.clients.study import FEWEST_ROUNDS, loaded_nccl, makers_of, over_percents, spread_ms
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared
from sidelane_lab.studies.fsdp.study import exposed_ms, recovered_percent
from sidelane_lab.studies.process_group.ways import StudyGroups, library_of

TINY = "tiny"
SAMPLE_S = 0.2
"""Seconds that the steps of a sample may take, if more than one."""

Variant = tuple[str, str]
"""A way and a launch."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadRow(FlatRow):
    """A step of a workload, by who communicates.

    Attributes:
        workload: ``attention``, ``decode``, ``experts`` or ``recommendation``.
        size: name of the size, as ``--sizes`` takes it.
        way: ``nccl``, on CPUs ``gloo``; ``group``: the same code on ``dist.new_group(backend="sidelane")``;
            ``operators``: Sidelane's fused operators or layouts; others as the workload says; ``none``: no
            communication.
        launch: ``eager``, or ``graph``: in a CUDA graph.
        nccl: version that is loaded; empty on CPUs.
        step_ms: of a step, median over rounds of the slowest rank; fastest_ms, slowest_ms: of these rounds.
        rounds: number of rounds.
        unit: of what is counted: ``tokens`` or ``samples``.
        per_second: units that all ranks finish in a second.
        over_percent: by how much a step takes longer than the library's in the same round, median.
        exposed_ms: more than ``none`` in the same round, median; exposed_percent: its share of the step.
        recovered_percent: of the library's exposed time, how much this way hides or saves.
        predicted_ms: what the model of the described machine expects for the collectives of a step, one by one: what it
            exposes if it hides none. By the library's kernels for the library, by the faster of Sidelane's kernels and
            copy engines for ``group``; null for other ways, and where the machine is not described.
        made_by: who made which calls of a process group of Sidelane's in a step, with the variant or the reason
            against it, as ``sidelane.report()`` says on the first rank.
        difference: norm of the difference from the library's result over the norm of that, the largest of all ranks.
        correct: it is within the tolerance of the workload; null where nothing is communicated.
        facts: figures of the workload at this size, by name with the unit in it.
        note: why there is no time, or what to know about this one.
    """

    allowed = (("workload", WORKLOADS), ("launch", (EAGER, GRAPH)))
    figures = ("step_ms",)

    workload: str
    size: str
    way: str
    launch: str
    nccl: str
    step_ms: float | None
    fastest_ms: float | None
    slowest_ms: float | None
    rounds: int
    unit: str
    per_second: float | None
    over_percent: float | None
    exposed_ms: float | None
    exposed_percent: float | None
    recovered_percent: float | None
    predicted_ms: float | None
    made_by: str
    difference: float | None
    correct: bool | None
    facts: dict[str, float]
    note: str = ""


def case_of(row: WorkloadRow) -> tuple[str, str, str]:
    """Return what the rows of one size have in common."""
    return row.workload, row.size, row.nccl


def main(options: EndToEndOptions) -> Results | None:
    """Measure what the file does not have; with ``resume`` it grows row by row."""
    place = choose_target(options.ranks, options.device)
    known = rows_there(STUDY, options.json, place) if options.resume else ()
    options = dataclasses.replace(options, done=frozenset(case_of(row) for row in known if row.step_ms is not None))
    return run_study(STUDY, options, place=place, known=known, grows=options.json if options.resume else None)


def workloads(names: Sequence[str]) -> list[EndToEndWorkload]:
    """Return the workloads of these names, whose modules are called like them."""
    return [importlib.import_module(f"sidelane_lab.studies.e2e.{name}").WORKLOAD for name in names]


def sizes_of(workload: EndToEndWorkload, chosen: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Return the sizes of a workload that are measured: the chosen ones, else on CPU ranks those that are tiny, and on
    GPUs all others.
    """
    return [size for size in workload.sizes if (size in chosen if chosen else size.startswith(TINY) == on_cpu)]


def _measure(rank: Rank, options: EndToEndOptions, sender: Sender) -> Iterator[WorkloadRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported, which this process has not done
    chosen = workloads(options.workloads)
    require_all("e2e", "sizes", options.cases, sorted({size for one in chosen for size in one.sizes}))
    nccl = "" if on_cpu else loaded_nccl()
    every = [(workload, size) for workload in chosen for size in sizes_of(workload, options.cases, on_cpu=on_cpu)]
    cases = [(workload, size) for workload, size in every if (workload.name, size, nccl) not in options.done]
    sender.steps = len(cases)
    if on_cpu:
        sender.note("on CPUs kernels are interpreted: the results are checked, and the times say nothing")
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
            yield from trial.rows(functools.partial(workload.prepare, workload.sizes[size], group), library, row)
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
                nothing = {**_figures(None, None, None, 0), "predicted_ms": None, "difference": None, "correct": None}
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
        machine = _described(self._rank)
        rows = []
        for launch in launches:
            for way in prepared.steps:
                problem = self._problems.get((way, launch))
                found = None if problem is not None else times.get((way, launch))
                figures = _figures(found, times.get((first, launch)), times.get((NONE, launch)), prepared.units)
                correct = None if way == NONE else True if problem is None else False if problem.wrong else None
                expected = None if machine is None else predicted_ms(machine, way, prepared.collectives)
                more = {
                    "predicted_ms": expected,
                    "made_by": self._made_by.get(way, ""),
                    "difference": self._differences.get((way, launch)),
                }
                note = "" if problem is None else problem.text
                rows.append(row(way=way, launch=launch, correct=correct, facts=facts, note=note, **more, **figures))
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


def difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of a difference over the norm of the reference."""
    apart = torch.linalg.vector_norm(result.float() - reference.float(), dtype=torch.float64)
    return float(apart / torch.linalg.vector_norm(reference.float(), dtype=torch.float64).clamp_min(1e-30))


def _replays(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a step. Returns what replays it, and returns its result."""
    results: list[torch.Tensor] = []
    graph = captured(lambda: results.append(step()), 1)

    def replay() -> torch.Tensor:
        graph.replay()
        return results[0]

    return replay


def _figures(times: Rounds | None, library: Rounds | None, floor: Rounds | None, units: int) -> dict[str, object]:
    """Return the columns of a row that follow from times."""
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
    }


def predicted_ms(machine: Machine, way: str, collectives: Sequence[tuple[Kind, int, int]]) -> float | None:
    """Return how long the collectives of a step take on a machine, one by one; None for a way of which no model knows.

    >>> predicted_ms(named("h100x2"), "operators", [(Kind.ALL_REDUCE, 1 << 16, 64)])
    >>> round(predicted_ms(named("h100x2"), "nccl", [(Kind.ALL_REDUCE, 1 << 16, 64)]), 2)
    0.46
    """
    models = {"nccl": library_us, GROUP: _own_us}
    if way not in models or not collectives:
        return None
    return sum(calls * models[way](machine, kind, nbytes) for kind, nbytes, calls in collectives) / 1e3


def _own_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    by_engines = dma_us(machine, kind, nbytes)
    return by_engines if machine.kernels is None else min(by_engines, own_gang(machine, kind, nbytes).alone_us)


def _described(rank: Rank) -> Machine | None:
    """Return the description of this machine; None on CPUs, and where there is none."""
    if rank.device.type == "cpu":
        return None
    name = machine_name(torch.cuda.get_device_name(rank.device), rank.world_size)
    return named(name) if name in machine_names() else None


COLUMNS: Mapping[str, Cell] = {
    "<launch": "launch",
    "<way": "way",
    "step\nms": "step_ms:.3f",
    "fastest-\nslowest": spread_ms,
    "units\na second": "per_second:.4g",
    "over the\nlibrary %": "over_percent:+.1f",
    "exposed\nms": "exposed_ms:.3f",
    "of the\nstep %": "exposed_percent:.1f",
    "recovered\n%": "recovered_percent:.0f",
    "predicted\nms": "predicted_ms:.3f",
    "<calls by": makers_of,
    "difference": "difference:.1e",
    "<correct": "correct",
}


def _title(row: WorkloadRow) -> str:
    facts = ", ".join(f"{name} {value:g}" for name, value in row.facts.items())
    return f"{row.workload}, {row.size}: {row.unit}{', ' + facts if facts else ''}"


def draw_steps(rows: Sequence[WorkloadRow], results: Results, folder: Path) -> list[Picture]:
    """Draw a picture for each launch: the step of every size by every way, next to the library's."""
    from matplotlib.figure import Figure

    from sidelane_lab.harness.drawing import BLUE, COLOURS, GREEN, GREY, PURPLE, save_titled

    colours = {**COLOURS, "group": BLUE, "operators": GREEN, NONE: GREY}
    pictures = []
    for launch, alike in grouped(rows, lambda row: row.launch, ordered=False):
        cases = grouped([row for row in alike if row.over_percent is not None], case_of, ordered=False)
        if not cases:
            continue
        figure = Figure(figsize=(max(7.0, 2 + 1.6 * len(cases)), 4.0), layout="constrained")
        axes = figure.subplots()
        for at, (_, same) in enumerate(cases):
            width = 0.8 / len(same)
            for place, row in enumerate(same):
                x, share = at + (place - (len(same) - 1) / 2) * width, 100 + (row.over_percent or 0.0)
                axes.bar(x, share, 0.92 * width, color=colours.get(row.way, PURPLE))
                axes.text(x, 2, f"{row.way} {share:.0f}", rotation=90, ha="center", va="bottom", fontsize=7)
        axes.axhline(100, color="black", linewidth=0.6)
        axes.set_xticks(range(len(cases)), [f"{workload}\n{size}" for (workload, size, _), _ in cases], fontsize=7)
        axes.set_ylabel("time of a step, % of the library's")
        text = f"Time of a step of each workload and size by each way, {launch}, in percent of the library's."
        pictures.append(save_titled(figure, f"e2e-{launch}", f"Steps, {launch}: {results.where}", text, folder))
    return pictures


STUDY = Study(
    name="e2e",
    title="Whole workloads, by who communicates",
    legend=(
        "A step of a model from end to end. group: the same code on a process group of Sidelane's; operators: "
        "Sidelane's fused operators or layouts; none: no communication. Medians over rounds of the slowest rank, in "
        "which the ways take turns; the least of each launch is bold. over the library: than NCCL (Gloo on CPUs) in "
        "the same round; exposed: more than none; recovered: of the library's exposed time; predicted: the model's "
        "time of a step's collectives one by one, which is what a step exposes that hides none; difference: from the "
        "library's result, next to its norm."
    ),
    row=WorkloadRow,
    tables=lambda rows: tables_by(
        rows,
        case_of,
        _title,
        COLUMNS,
        keys=2,
        groups=lambda row: row.launch,
        least=lambda row: None if row.way == NONE else row.step_ms,
    ),
    plots=draw_steps,
    measure=_measure,
    main=main,
    progress="whole workloads",
    key=lambda row: (case_of(row), row.launch, row.way),
)

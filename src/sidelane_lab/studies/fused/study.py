"""Fused operators next to the same computation and a collective one after the other, eager and in graphs.

    fused      | tile, put | tile, put | ... | wait |
    unfused    | computation ............... | collective | copy |

The computation and the collective are timed alone, too: the larger of the two is what no operator can be faster than.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from sidelane.choice import Profile
from sidelane.choice.fused import FUSED, ORDERS, FusedTime
from sidelane.choice.key import key_here
from sidelane.config import current, profile_folder
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import CALLS_AHEAD, HIDDEN_LAUNCH_US, captured
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.collectives import FusedOptions
from sidelane_lab.harness import provenance
from sidelane_lab.harness.drawing import file_name
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.parameters import refuse_unwritable, required
from sidelane_lab.harness.running import Sender, run_study
from sidelane_lab.harness.study import Results, Study, read
from sidelane_lab.harness.terminal import progress_console
from sidelane_lab.harness.ways import Job, Problem, Rounds, outcome
from sidelane_lab.studies.fused.kept import keep
from sidelane_lab.studies.fused.predict import predict
from sidelane_lab.studies.fused.rows import (
    ALONE,
    FusedRow,
    draw_fused,
    element_bytes_of,
    fused_tables,
    kept_of,
    times_of,
)
from sidelane_lab.studies.fused.shapes import ON_CPUS, ON_GPUS

CALLS = 8
"""In a sample."""

SKEW_CALLS = 3
"""Calls whose ranks' times are compared."""

BEST, AUTO = "unfused_best", "auto"
COMPUTE, COLLECTIVE = ALONE
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}
"""Largest error, next to the largest element: what is rounded twice, or thrice."""

Key = tuple[str, str, str]
"""Implementation or part, of what it is made or how it is scheduled, launch."""


def main(options: FusedOptions) -> Results | None:
    """Run the study; see :func:`sidelane_lab.harness.running.run_study`. On CPUs kernels are interpreted."""
    if options.results is not None and not options.keep:
        raise ValueError("fused: --results needs --machine, to hold predictions against it, or --keep")
    if options.keep:
        refuse_unwritable("--keep", required("--keep", profile_folder()), is_folder=True)
    if options.results is not None:
        path = keep(kept_of(read(options.results)))
        progress_console().print(f"kept for auto: {path}", markup=False, soft_wrap=True)
        return None
    return run_study(STUDY, options)


def _measure(rank: Rank, options: FusedOptions, sender: Sender) -> Iterator[FusedRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported, which this process has not done
    from sidelane_lab.studies.fused.cases import makers_of

    table = ON_CPUS if on_cpu else ON_GPUS
    makers = {op: makers_of(op) for op in table}
    chosen = [(op, make, shape) for op, shapes in table.items() for shape in shapes for make in makers[op]]
    chosen = [case for case in chosen if not options.ops or case[0] in options.ops]
    sender.steps = len(chosen)
    if on_cpu:
        sender.note("on CPUs the kernels are interpreted: the results are checked, and the times say nothing")
    config = dataclasses.replace(current(), timeout_s=options.step_s)
    seeds = itertools.count(options.seed + 1)
    times = list[FusedTime]()
    with Communicator(dist.group.WORLD, device=rank.device, config=config) as comm:
        meter = make_meter(rank, options.step_s)
        for op, make_case, shape in chosen:
            sender.step(f"{op} {'x'.join(map(str, shape))}")
            with meter.on_stream():
                case = _Case(meter, comm, make_case, shape, options, seeds)
                rows = list(case.rows())
                yield from rows
                times += times_of(rows, comm.world_size, element_bytes_of(rank.device.type))
                is_first = shape == table[op][0] and make_case is makers[op][0]
                if options.timeline is not None and is_first:
                    case.write_timelines(options.timeline)
    if options.keep and rank.rank == 0:
        key, now = key_here(rank.device.type, rank.world_size), datetime.datetime.now(datetime.UTC)
        command = options.command or provenance.command_line()
        measured = Profile(key.short_name, key, now.isoformat(timespec="seconds"), command, (), tuple(times))
        sender.note(f"kept for auto: {keep(measured)}")


class _Case:
    """An operator at one shape. All ranks do all of it together."""

    def __init__(
        self,
        meter: Meter,
        comm: Communicator,
        make: Callable[..., object],
        shape: tuple[int, ...],
        options: FusedOptions,
        seeds: Iterator[int],
    ) -> None:
        from sidelane_lab.studies.fused.case import OperatorCase

        case = make(comm, *shape)
        assert isinstance(case, OperatorCase)
        self._comm = comm
        self._meter, self._case, self._options, self._seeds = meter, case, options, seeds
        self._launches = ("eager",) if comm.device.type == "cpu" else ("eager", "graph")
        self._problems: dict[Key, Problem] = {}
        self._errors: dict[Key, float] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def rows(self) -> Iterator[FusedRow]:
        """Check, time and check again."""
        case, jobs = self._case, dict[Key, Job]()
        ways = {**case.unfused, **{(FUSED, schedule): run for schedule, run in case.fused.items()}}
        ways |= {(AUTO, words): auto.run for words, auto in case.auto.items()}
        for launch in self._launches:
            for part, runs in ((COMPUTE, case.compute), (COLLECTIVE, case.collective)):
                for name, alone in runs.items():
                    self._add(jobs, (part, name, launch), alone)
            for (implementation, name), run in ways.items():
                key = (implementation, name, launch)
                if self._checked(key, run):
                    self._add(jobs, key, run)
        rounds = self._meter.rounds(jobs, warmup=self._options.warmup, repeats=self._options.repeats)
        for (implementation, name), run in ways.items():
            for launch in self._launches:
                key = (implementation, name, launch)
                if key in rounds:
                    self._checked(key, run)
        self._graphs.clear()
        for launch in self._launches:
            parts = [
                (part, name) for part, runs in zip(ALONE, (case.compute, case.collective), strict=True) for name in runs
            ]
            yield from self._rows_of(launch, rounds, [(*way, launch) for way in (*parts, *ways)])

    def write_timelines(self, folder: Path) -> None:
        """A trace and a picture of a call of each schedule, and how far ranks are apart; the first call compiles."""
        from sidelane.ops import Timeline
        from sidelane_lab.studies.fused.pictures import Times, draw_skew, draw_timeline, times_of_ranks

        case, comm = self._case, self._comm
        calls: dict[str, list[Times]] = {}
        for schedule, run in case.fused.items():
            for number in range(1 + (SKEW_CALLS if schedule in ORDERS else 1)):
                with Timeline(comm) as timeline:
                    run()
                if number and timeline.intervals and schedule in ORDERS:
                    calls.setdefault(schedule, []).append(times_of_ranks(timeline.intervals))
            if comm.rank == 0 and timeline.intervals:  # copy engines have no workgroups
                name = file_name(f"{case.op} {schedule}")
                timeline.write(folder / f"{name}.trace.json")
                draw_timeline(timeline.intervals, f"{case.op}, {case.shape}, {schedule}", folder, name)
        if comm.rank == 0 and calls and comm.world_size > 1:
            draw_skew(calls, f"{case.op}, {case.shape}", folder, file_name(f"{case.op} skew"))

    def _add(self, jobs: dict[Key, Job], key: Key, run: Callable[[], object]) -> None:
        def step() -> None:
            run()
            self._meter.finish(str(key))
            if self._meter.device.type == "cpu":
                jobs[key] = Job(run)  # an interpreter takes long enough for one
            elif key[2] == "graph":
                graph = captured(lambda: (run(), None)[1], CALLS)
                self._graphs.append(graph)
                jobs[key] = Job(graph.replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
            else:
                jobs[key] = Job(run, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)

        refused = self._meter.attempt(step)
        if refused is not None:
            jobs.pop(key, None)
            self._problems[key] = Problem(refused)

    def _checked(self, key: Key, run: Callable[[], torch.Tensor]) -> bool:
        """Run once on fresh inputs and compare, all ranks."""
        found: list[torch.Tensor] = []

        def step() -> None:
            self._case.refill(next(self._seeds))
            found.append(run())
            self._meter.finish(str(key))

        refused = self._meter.attempt(step)
        if refused is not None:
            self._problems[key] = Problem(refused)
            return False
        errors: list[float] = []

        def compare() -> None:
            expected = self._case.expected()
            error = (found[0].double() - expected).abs().max() / expected.abs().max()
            errors.append(float(error))

        refused = self._meter.attempt(compare)
        worst = max(map(max, self._meter.of_all_ranks(errors or [float("nan")])))
        self._errors[key] = worst
        if refused is not None or not worst <= TOLERANCE[found[0].dtype]:
            self._problems[key] = Problem(refused or f"the largest error is {worst:.2g} of the largest element", True)
            return False
        return True

    def _rows_of(self, launch: str, rounds: dict[Key, Rounds], keys: list[Key]) -> Iterator[FusedRow]:
        def fastest(part: str) -> float | None:
            found = [time.median_us for key, time in rounds.items() if (key[0], key[2]) == (part, launch)]
            return min(found, default=None)

        alone = fastest(COMPUTE), fastest(COLLECTIVE)
        good = [key for key in keys if key in rounds and key not in self._problems]
        for key in keys:
            yield self._row(key, key[0], rounds, alone)
        unfused = [key for key in good if key[0] not in (FUSED, AUTO, *ALONE)]
        if unfused:
            yield self._row(min(unfused, key=lambda key: rounds[key].median_us), BEST, rounds, alone)

    def _row(
        self,
        key: Key,
        implementation: str,
        rounds: dict[Key, Rounds],
        alone: tuple[float | None, float | None],
    ) -> FusedRow:
        problem = self._problems.get(key)
        time = rounds.get(key) if problem is None else None
        is_part, read = key[0] in ALONE, None if key[0] == COLLECTIVE else self._case.read_bytes
        columns = outcome(time, problem, self._why(key) if key[0] == AUTO and problem is None else "")
        return FusedRow(
            op=self._case.op,
            shape=self._case.shape,
            implementation=implementation,
            schedule=key[1],
            launch=key[2],
            compute_us=alone[0],
            comm_us=alone[1],
            bound_us=None if None in alone else max(part for part in alone if part is not None),
            max_rel_err=self._errors.get(key),
            gbps=None if time is None or read is None else read / time.median_us / 1e3,
            skew_us=None if time is None or self._comm.world_size == 1 else time.skew_us,
            **(columns | ({"correct": None} if is_part else {})),
        )

    def _why(self, key: Key) -> str:
        """Say what ``auto`` has chosen. Ranks have agreed on that in the first call."""
        from sidelane import ops
        from sidelane_lab.studies.fused.case import dtype_of

        auto = self._case.auto[key[1]]
        options = {"captured": key[2] == "graph", "dtype": dtype_of(self._comm), "without": auto.without}
        return ops.explain(self._comm, self._case.op, *auto.sizes, **options)  # type: ignore[arg-type]


STUDY = Study(
    name="fused",
    title="Fused operators",
    legend=(
        "An operator in one kernel, and the same unfused: with the process group's collective (NCCL, on CPUs "
        "Gloo), and with Sidelane's. Medians over rounds of the slowest rank; the fastest of each shape is bold. "
        "bound: the longer of the computation and the collective alone. Outputs were compared with float64, before"
        " and after."
    ),
    row=FusedRow,
    tables=fused_tables,
    plots=lambda rows, results, folder: draw_fused(rows, results.where, folder),
    measure=_measure,
    predict=predict,
    main=main,
    progress="fused operators",
)

"""Fused operators next to the same computation and a collective one after the other, eager and in graphs.

    fused      | tile, put | tile, put | ... | wait |
    unfused    | computation ............... | collective | copy |

The computation and the collective are timed alone, too: the larger of the two is what no operator can be faster than.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sidelane.choice import Profile
from sidelane.choice.fused import FUSED, FusedTime
from sidelane.choice.key import key_here
from sidelane.choice.store import FUSED_FILE, read_profile, user_file
from sidelane.config import current, profile_folder
from sidelane.machine import local
from sidelane.session import Communicator
from sidelane.user_files import write_whole
from sidelane_lab.baselines.candidate import CALLS_AHEAD, HIDDEN_LAUNCH_US, captured
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.fused import SINGLE, FusedOptions
from sidelane_lab.harness import provenance
from sidelane_lab.harness.drawing import file_name
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.parameters import refuse_unwritable, required
from sidelane_lab.harness.running import Sender, run_study
from sidelane_lab.harness.study import Results, Study, read
from sidelane_lab.harness.table import grouped
from sidelane_lab.harness.terminal import progress_console
from sidelane_lab.harness.ways import Job, Rounds, Way, WayOutcome, outcome
from sidelane_lab.studies.fused.predict import predict
from sidelane_lab.studies.fused.rows import (
    ALONE,
    FusedRow,
    element_bytes_of,
    fused_tables,
    kept_of,
    times_of,
)
from sidelane_lab.studies.fused.shapes import ON_CPUS, ON_GPUS

if TYPE_CHECKING:
    from sidelane_lab.studies.fused.case import OperatorCase

CALLS, REPLAYS = 8, 1000
"""Calls in a sample, and replays of a graph of one call."""

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
                case = make_case(comm, *shape)
                launches = LAUNCHES[:1] if on_cpu else options.launches or LAUNCHES
                rows = rows_of(meter, comm, case, options, seeds, launches)
                yield from rows
                times += times_of(rows, comm.world_size, element_bytes_of(rank.device.type))
                is_first = shape == table[op][0] and make_case is makers[op][0]
                if options.timeline is not None and is_first:
                    write_timelines(comm, case, options.timeline)
    if options.keep and rank.rank == 0:
        key = key_here(rank.device.type, rank.world_size).between(local.peers_here(rank.device.type))
        now = datetime.datetime.now(datetime.UTC)
        command = options.command or provenance.command_line()
        measured = Profile(key.short_name, key, now.isoformat(timespec="seconds"), command, (), tuple(times))
        sender.note(f"kept for auto: {keep(measured)}")


class PartWay(Way):
    """The computation or the collective of an operator alone, which is not compared.

    Args:
        key: implementation, schedule and launch.
        call: runs it once. Checks run it eagerly; a graph has several calls, for the times.

    Attributes:
        worst: largest error of the last check, next to the largest element; None where nothing was compared.
    """

    worst: float | None = None

    def __init__(self, key: Key, call: Callable[[], Any]) -> None:
        self.label, self.as_graph, self._call = str(key), key[2] != LAUNCHES[0], call
        self._calls = 1 if key[2] == SINGLE else CALLS

    def fill(self, seed: int) -> None:
        """Leave the inputs as they are."""

    def run(self) -> None:
        self._call()

    def error(self, seed: int) -> str | None:
        return None

    def capture(self) -> None:
        self.graphs = (captured(self._call, self._calls),)

    def job(self, device: torch.device) -> Job:
        """Return the work of a sample: one call of an interpreter, which takes long enough, else several calls."""
        if device.type == "cpu":
            return Job(self._call)
        if self.graphs and self._calls == 1:
            return Job(self.graphs[0].replay, repeats=REPLAYS, calls=REPLAYS, ahead=CALLS_AHEAD)
        if self.graphs:
            return Job(self.graphs[0].replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        return Job(self._call, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)


class OperatorWay(PartWay):
    """An operator as a whole, fused or not."""

    def __init__(self, key: Key, call: Callable[[], torch.Tensor], case: OperatorCase) -> None:
        super().__init__(key, call)
        self._case = case
        self._output: Any = None

    def fill(self, seed: int) -> None:
        self._case.refill(seed)
        self._output = torch.full((), math.nan)

    def run(self) -> None:
        self._output = self._call()

    def settle(self) -> None:
        self._output = None  # outputs of all ways would lie in memory while each is timed

    def error(self, seed: int) -> str | None:
        expected = self._case.expected()
        self.worst = float((self._output.to(expected) - expected).abs().max() / expected.abs().max())
        if self.worst <= TOLERANCE[self._output.dtype]:
            return None
        return f"the largest error is {self.worst:.2g} of the largest element"


def rows_of(
    meter: Meter, comm: Any, case: OperatorCase, options: FusedOptions, seeds: Iterator[int], launches: Sequence[str]
) -> list[FusedRow]:
    """Check an operator at one shape in all its ways, time them and check them again. Collective."""
    alone = [
        ((part, name), run)
        for part, runs in zip(ALONE, (case.compute, case.collective), strict=True)
        for name, run in runs.items()
    ]
    whole = [*case.unfused.items(), *(((FUSED, schedule), run) for schedule, run in case.fused.items())]
    whole += [((AUTO, words), auto.run) for words, auto in case.auto.items()]
    makers: dict[Key, Callable[[], PartWay]] = {}
    for launch in launches:
        for name, part in alone:
            makers[*name, launch] = functools.partial(PartWay, (*name, launch), part)
        for name, run in whole:
            makers[*name, launch] = functools.partial(OperatorWay, (*name, launch), run, case)

    def timed(ready: dict[Key, PartWay]) -> Mapping[Key, Rounds]:
        return meter.in_turns({key: way.job(comm.device) for key, way in ready.items()}, options)

    found = meter.compare(makers, seeds, timed)
    mine = [-1.0 if one.way is None or one.way.worst is None else one.way.worst for one in found]
    errors = map(max, zip(*meter.of_all_ranks(mine), strict=True))
    rows = [_row(comm, case, one, error if error >= 0 else None) for one, error in zip(found, errors, strict=True)]
    measured = []
    for _, alike in grouped(rows, lambda row: row.launch, ordered=False):
        times = [[row.time_us for row in alike if row.implementation == part and row.time_us] for part in ALONE]
        compute_us, comm_us = (min(one, default=None) for one in times)
        bound_us = None if compute_us is None or comm_us is None else max(compute_us, comm_us)
        unfused = [row for row in alike if (row.implementation, row.schedule) in case.unfused and row.time_us]
        best = [min(unfused, key=lambda row: row.time_us or 0.0)] if unfused else []
        alike = [*alike, *(dataclasses.replace(row, implementation=BEST) for row in best)]
        measured += [
            dataclasses.replace(row, compute_us=compute_us, comm_us=comm_us, bound_us=bound_us) for row in alike
        ]
    return measured


def _row(comm: Any, case: OperatorCase, found: WayOutcome[Key, PartWay], max_rel_err: float | None) -> FusedRow:
    """Make the row of a way, without the times of the parts."""
    implementation, schedule, launch = found.key
    why = _why(comm, case, found.key) if implementation == AUTO and found.problem is None else ""
    columns = outcome(found.rounds, found.problem, why)
    time_us, read = columns["time_us"], None if implementation == COLLECTIVE else case.read_bytes
    return FusedRow(
        op=case.op,
        shape=case.shape,
        implementation=implementation,
        schedule=schedule,
        launch=launch,
        compute_us=None,
        comm_us=None,
        bound_us=None,
        max_rel_err=max_rel_err,
        gbps=None if time_us is None or read is None else read / time_us / 1e3,
        skew_us=None if time_us is None or found.rounds is None or comm.world_size == 1 else found.rounds.skew_us,
        **(columns | ({"correct": None} if implementation in ALONE else {})),
    )


def _why(comm: Communicator, case: OperatorCase, key: Key) -> str:
    """Say what ``auto`` has chosen. Ranks have agreed on that in the first call."""
    from sidelane import ops
    from sidelane_lab.studies.fused.case import dtype_of

    auto = case.auto[key[1]]
    options: dict[str, Any] = {"captured": key[2] == "graph", "dtype": dtype_of(comm), "without": auto.without}
    return ops.explain(comm, case.op, *auto.sizes, **options)


def write_timelines(comm: Communicator, case: OperatorCase, folder: Path) -> None:
    """Write a trace and a picture of a call of each schedule; the first call compiles."""
    from sidelane.ops import Timeline
    from sidelane_lab.studies.fused.pictures import draw_timeline

    for schedule, run in case.fused.items():
        for _ in range(2):
            dist.barrier()  # another rank may still be collecting what the first call recorded
            with Timeline(comm) as timeline:
                run()
        if comm.rank == 0 and timeline.intervals:  # copy engines have no workgroups
            name = file_name(f"{case.op} {schedule}")
            timeline.write(folder / f"{name}.trace.json")
            draw_timeline(timeline.intervals, f"{case.op}, {case.shape}, {schedule}", folder, name)


def keep(measured: Profile) -> Path:
    """Write the user's file of a machine; times of shapes that it has already are replaced, others stay."""
    path = required("fused", user_file(measured.key, FUSED_FILE))
    try:
        before = read_profile(path)
    except ValueError:  # of another format: it is replaced
        before = None
    stay = before.operators if before is not None and not before.key.differences(measured.key) else ()
    found = {(t.op, t.world_size, t.captured, t.sizes, t.element_bytes): t for t in (*stay, *measured.operators)}
    write_whole(path, dataclasses.replace(measured, operators=tuple(found.values())).to_text().encode())
    return path


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
    measure=_measure,
    predict=predict,
    main=main,
    progress="fused operators",
)

"""The occupancy study: pipelined iterations of a GEMM in many shapes and a collective, with and without priority.

A sample is a whole pipeline, sequential or overlapped; samples of one shape take turns. Normalised time is overlapped
over sequential, both of the same shape (overlap paper, 4.2.1); so a shape with a good ratio may still be a slow one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from sidelane.c3.partitions import PairStreams
from sidelane.errors import UnavailableError
from sidelane_lab.baselines.candidate import ReadyCall, candidates_of
from sidelane_lab.baselines.roster import Roster, check_asked, make_roster
from sidelane_lab.cli.c3 import OccupancyOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.harness.ways import Job
from sidelane_lab.pairs.pair import GemmRun, PairLaunch, Workers, check_launch, pair_streams
from sidelane_lab.pairs.spans import Span, Trace, stamped, timed
from sidelane_lab.pairs.workload import LIBRARY, Gemm, Workload
from sidelane_lab.shaping.shape import SHAPES, GemmShape
from sidelane_lab.studies.c3.bench import case_of, scaled_workloads
from sidelane_lab.studies.c3.occupancy_predict import predict, predict_row
from sidelane_lab.studies.c3.occupancy_rows import OccupancyRow, occupancy_tables

if TYPE_CHECKING:
    from sidelane.execute.cuda.driver import Driver


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """How iterations run.

    Attributes:
        iterations: 2 or more.
        priority: the collectives' stream goes before the GEMMs'.

    Raises:
        ValueError: fewer iterations than 2.
    """

    iterations: int = 6
    priority: bool = False

    def __post_init__(self) -> None:
        if self.iterations < 2:
            raise ValueError(f"Schedule: iterations (value={self.iterations}, allowed=2 or more)")


class Pipelined:
    """Runs of iterations on one rank.

    Args:
        gemm: launches the GEMM of an iteration on the current stream; two may be under way at once.
        collective: begins the collective on the current stream; what comes back waits for its end on a CPU.
        streams: streams, on an accelerator; None: on a CPU.
        second: a second stream for GEMMs.
        workers: threads that compute on a CPU.
    """

    def __init__(
        self,
        gemm: Callable[[int], None],
        collective: Callable[[], Callable[[], None]],
        streams: PairStreams | None,
        second: torch.cuda.Stream | None,
        workers: Workers,
    ) -> None:
        self._gemm, self._collective, self._workers = gemm, collective, workers
        self._streams, self._second = streams, second

    def sequential(self, iterations: int) -> None:
        """Every operation behind the one before, on the current stream."""
        for number in range(iterations):
            self._gemm(number)
            self._collective()()

    def overlapped(self, schedule: Schedule) -> Callable[[], Trace]:
        """Run the iterations; what comes back gives the time stamps, once the current stream has ended."""
        if self._streams is None:
            return self._on_threads(schedule)
        return self._on_streams(schedule, self._streams)

    def _on_streams(self, schedule: Schedule, streams: PairStreams) -> Callable[[], Trace]:
        caller = torch.cuda.current_stream()
        compute = [streams.gemm] if self._second is None else [streams.gemm, self._second]
        comm = streams.urgent if schedule.priority else streams.collective
        released = torch.cuda.Event(enable_timing=True)
        released.record(caller)
        for stream in (*compute, comm):
            stream.wait_event(released)
        gemms, collectives = [], []
        for number in range(schedule.iterations):
            stream = compute[number % len(compute)]
            with torch.cuda.stream(stream):
                gemms.append(stamped(stream, functools.partial(self._gemm, number)))
            comm.wait_event(gemms[-1][1])
            with torch.cuda.stream(comm):
                collectives.append(stamped(comm, self._collective))
        for stream in (*compute, comm):
            caller.wait_stream(stream)

        def read() -> Trace:
            def since(event: torch.cuda.Event) -> float:
                return 1e3 * float(released.elapsed_time(event))

            spans = [tuple((since(begin), since(end)) for begin, end in pairs) for pairs in (gemms, collectives)]
            return Trace(*spans)

        return read

    def _on_threads(self, schedule: Schedule) -> Callable[[], Trace]:
        worker = self._workers.yielding if schedule.priority else self._workers.usual
        computed: list[Future[Span]] = [
            worker.submit(timed, functools.partial(self._gemm, number)) for number in range(schedule.iterations)
        ]
        gemms, collectives = [], []
        for product in computed:
            gemms.append(product.result())
            collectives.append(timed(lambda: self._collective()()))
        trace = Trace(tuple(gemms), tuple(collectives))
        return lambda: trace


ROWS_ON_CPUS = "rows"
"""The shape of a GEMM on a CPU: parts of its rows, one after another."""

BLOCKS = {"cpu": (1, 4, 16), "gpu": (64, 256, 1024, 0)}
"""Blocks of a grid; 0: one for each tile (data-parallel). On CPUs: parts."""

RESIDENT = (1, 2, 4)
"""Blocks that a unit may hold, tried with data-parallel grids."""

HIDE_LAUNCH_US = 150.0
"""For each operation of a pipeline that the host queues before the clock starts."""


def _check(options: OccupancyOptions, place: LaunchTarget) -> None:
    """Refuse names that are not known on this kind of device."""
    check_asked(place.device_type, options.collectives, implementations=options.implementations, with_auto=True)


@dataclasses.dataclass(frozen=True, slots=True)
class ShapedLaunches:
    """A GEMM with two results, so that those of two iterations can be under way at once.

    Attributes:
        launches: a launch for each result.
        shape: name.
        blocks: blocks of its grid; on CPUs parts of the rows, one after another.
        grid: ``persistent`` or ``data-parallel``.
        resident: blocks that a unit holds; 0 where that is not known.
        shared_bytes: shared memory that each of them asks for.
    """

    launches: Sequence[Callable[[], None]]
    shape: str
    blocks: int
    grid: str = "data-parallel"
    resident: int = 0
    shared_bytes: int = 0

    def launch(self, number: int) -> None:
        """Launch the GEMM of an iteration, on the current stream."""
        self.launches[number % len(self.launches)]()

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row that say what it is."""
        return {name.name: getattr(self, name.name) for name in dataclasses.fields(self)[1:]}


NO_SHAPE = ShapedLaunches((), "", 0, "")


def _measure(rank: Rank, options: OccupancyOptions, sender: Sender) -> Iterator[OccupancyRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)  # the ranks share the cores
    workloads = scaled_workloads(options, rank)
    wanted = options.implementations or tuple(name for name in LIBRARY if (name == "gloo") == on_cpu)
    roster = make_roster(rank, wanted=wanted, timeout_s=options.step_s, with_auto=True)
    cases = [case_of(rank, workload) for workload in workloads]
    roster.reserve_for(cases, sender.note)
    streams = pair_streams(rank.device)
    second = None if on_cpu else torch.cuda.Stream(rank.device)
    seeds = itertools.count(options.seed + 1)
    steps = []
    for workload, case in zip(workloads, cases, strict=True):
        for implementation in roster.implementations.values():
            entrants = candidates_of(implementation, case.kind, only=("auto",), launches=("eager",))[:1]
            for entrant in entrants:
                run = ReadyCall(entrant, case, implementation)
                pair = PipelinedPair(roster, workload, run, streams, second, options)
                shapes = shapes_of(workload.gemm, rank.device, options)
                steps += [ShapeStep(pair, f"{workload.name}, {implementation.name}", *one) for one in shapes]
    begun = sender.steps_within(roster.meter, steps, options.budget_s)
    for pair, its_steps in itertools.groupby(begun, lambda step: step.pair):
        yield from pair.rows(rank.device, seeds, its_steps)
    roster.close()


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeStep:
    """A pair in one shape of its GEMM.

    Attributes:
        pair: the pair.
        call: names of the pair, the collective and who makes it.
        shape: shape of the GEMM; None on CPUs.
        blocks: blocks of its grid; on CPUs parts of the rows.
    """

    pair: PipelinedPair
    call: str
    shape: GemmShape | None
    blocks: int

    def __str__(self) -> str:
        resident = f", {self.shape.resident} resident" if self.shape and self.shape.resident else ""
        return f"{self.call}: {self.shape.name if self.shape else ROWS_ON_CPUS}, {self.blocks} blocks{resident}"

    def made(self, runs: Sequence[GemmRun], device: torch.device) -> ShapedLaunches:
        """Make its launches.

        Raises:
            UnavailableError: no block of this shape fits a compute unit.
        """
        return _on_units(self.shape, self.blocks, runs, device) if self.shape else _in_rows(runs, self.blocks)


class PipelinedPair:
    """A GEMM and a collective on this rank, to be run in every shape."""

    def __init__(
        self,
        roster: Roster,
        workload: Workload,
        run: ReadyCall,
        streams: PairStreams | None,
        second: torch.cuda.Stream | None,
        options: OccupancyOptions,
    ) -> None:
        self._meter, self._workload, self._run = roster.meter, workload, run
        self._streams, self._second, self._options = streams, second, options

    def rows(self, device: torch.device, seeds: Iterator[int], steps: Iterable[ShapeStep]) -> Iterator[OccupancyRow]:
        """Measure shapes. Collective."""
        with self._meter.on_stream(), Workers() as workers:
            gemms = [GemmRun(self._workload.gemm, device) for _ in range(2)]
            for gemm in gemms:
                gemm.fill(next(seeds))
            self._meter.finish("the GEMM's inputs")
            for step in steps:
                made: list[ShapedLaunches] = []
                refused = self._meter.attempt(lambda made=made, step=step: made.append(step.made(gemms, device)))
                if refused is not None:
                    yield self._row(NO_SHAPE, False, note=refused)
                    continue
                yield from self._measured(made[0], gemms, workers, next(seeds))

    def _measured(
        self, shaped: ShapedLaunches, gemms: Sequence[GemmRun], workers: Workers, seed: int
    ) -> Iterator[OccupancyRow]:
        options = self._options
        schedules = [Schedule(options.iterations, priority) for priority in (False, True)]
        wrong = self._error(shaped, gemms, workers, schedules, seed)
        if wrong is not None:
            for schedule in schedules:
                yield self._row(shaped, schedule.priority, correct=False, note=wrong)
            return
        pipelined = Pipelined(shaped.launch, self._run.start, self._streams, self._second, workers)
        traces: dict[bool, list[Callable[[], Trace]]] = {schedule.priority: [] for schedule in schedules}

        def overlapped(schedule: Schedule) -> None:
            traces[schedule.priority].append(pipelined.overlapped(schedule))

        jobs: dict[str, Callable[[], object]] = {
            "gemm": lambda: shaped.launch(0),
            "collective": self._run.run,
            "sequential": lambda: pipelined.sequential(options.iterations),
        }
        for schedule in schedules:
            jobs[f"overlapped {schedule.priority}"] = functools.partial(overlapped, schedule)
        hidden_us = 0.0 if self._streams is None else HIDE_LAUNCH_US * 2 * options.iterations
        measured = self._meter.rounds(
            {name: Job(job, hide_launch_us=hidden_us) for name, job in jobs.items()},
            warmup=options.warmup,
            repeats=options.repeats,
        )
        sequential = measured["sequential"]
        for schedule in schedules:
            together = measured[f"overlapped {schedule.priority}"]
            ratios = [ours / theirs for ours, theirs in zip(together.times_us, sequential.times_us, strict=True)]
            rates = [read().overlap_rate for read in traces[schedule.priority][-options.repeats :]]
            everyones = self._meter.of_all_ranks([statistics.median(rates)])
            yield self._row(
                shaped,
                schedule.priority,
                gemm_us=measured["gemm"].median_us,
                comm_us=measured["collective"].median_us,
                sequential_us=sequential.median_us,
                time_us=together.median_us,
                normalised=statistics.median(ratios),
                overlap_rate=100 * statistics.mean(rate for (rate,) in everyones),
                correct=True,
            )

    def _error(
        self,
        shaped: ShapedLaunches,
        gemms: Sequence[GemmRun],
        workers: Workers,
        schedules: Sequence[Schedule],
        seed: int,
    ) -> str | None:
        """Say what is wrong after a run of each schedule, on any rank. Collective."""
        for schedule in schedules:
            # One whose second run would read the first one's result runs once.
            calls = itertools.count() if not self._run.repeatable else itertools.repeat(0)
            once = lambda calls=calls: self._run.start() if next(calls) == 0 else lambda: None  # noqa: E731
            pipelined = Pipelined(shaped.launch, once, self._streams, self._second, workers)
            launch = functools.partial(pipelined.overlapped, schedule)
            problem = check_launch(self._meter, PairLaunch("a pipeline", launch, self._run, gemms), seed)
            if problem is not None:
                return problem.text
        return None

    def _row(self, shaped: ShapedLaunches, priority: bool, note: str = "", **figures: Any) -> OccupancyRow:
        nothing = dict.fromkeys(("gemm_us", "comm_us", "sequential_us", "time_us", "normalised", "overlap_rate"))
        return OccupancyRow(
            **self._workload.columns,
            implementation=self._run.implementation,
            **shaped.columns,
            priority=priority,
            in_order=False,
            iterations=self._options.iterations,
            note=note,
            **{"correct": None, **nothing, **figures},
        )


def shapes_of(gemm: Gemm, device: torch.device, options: OccupancyOptions) -> Iterator[tuple[GemmShape | None, int]]:
    """Yield each shape that is measured, and its blocks: on GPUs data-parallel grids also by residency; None: on CPUs,
    where blocks are parts of the rows.
    """
    if device.type == "cpu":
        yield from ((None, min(blocks or gemm.m, gemm.m)) for blocks in options.blocks or BLOCKS["cpu"])
        return
    for name in options.shapes:
        shape = SHAPES[name]
        tiles = shape.tiles(gemm.m, gemm.n)
        for blocks in dict.fromkeys(min(blocks or tiles, tiles) for blocks in options.blocks or BLOCKS["gpu"]):
            for resident in (None, *RESIDENT) if blocks == tiles else (None,):
                yield dataclasses.replace(shape, resident=resident), blocks


def _in_rows(runs: Sequence[GemmRun], blocks: int) -> ShapedLaunches:
    def launch(run: GemmRun) -> None:
        for a, c in zip(run.a.tensor_split(blocks), run.c.tensor_split(blocks), strict=True):
            torch.mm(a, run.b, out=c)

    return ShapedLaunches([functools.partial(launch, run) for run in runs], ROWS_ON_CPUS, blocks)


def _on_units(shape: GemmShape, blocks: int, runs: Sequence[GemmRun], device: torch.device) -> ShapedLaunches:
    from sidelane_lab.shaping.gemm import ShapedGemm

    kernels = [ShapedGemm(_driver(device), shape, run.a, run.b, run.c) for run in runs]
    resident, shared_bytes = kernels[0].resident, kernels[0].shared_bytes
    if not resident:
        raise UnavailableError(f"no block of {shape.name} fits a compute unit ({shared_bytes} bytes)")
    grid = "data-parallel" if blocks == shape.tiles(*runs[0].c.shape) else "persistent"
    return ShapedLaunches([one.bind(blocks) for one in kernels], shape.name, blocks, grid, resident, shared_bytes)


@functools.cache
def _driver(device: torch.device) -> Driver:
    """Make the driver of all kernels: it keeps what it has compiled."""
    from sidelane.execute.cuda.driver import Driver

    return Driver(device)


STUDY = Study(
    name="occupancy",
    title="Pipelined iterations by the shape of the GEMM",
    legend=(
        "Iterations of a GEMM and a collective: the collective of one next to the GEMMs of the following. "
        "normalised = overlapped / sequential, both in the same shape; overlap rate: share of the collectives' "
        "time during which a GEMM ran, by time stamps of the device. resident: blocks of the GEMM that a compute "
        "unit holds. Medians over rounds of the slowest rank; the least time of each pair is bold."
    ),
    row=OccupancyRow,
    tables=occupancy_tables,
    measure=_measure,
    predict=predict,
    predict_row=predict_row,
    check=_check,
    progress="pipelined iterations",
)

"""All-to-alls that change the layout, as sequence parallelism has them before and behind its attention.

``there``: [batch, positions / N, heads, size] becomes [batch, positions, heads / N, size]; ``back``: the other way;
``contiguous``: as many bytes without another layout, which is the least that an exchange can take. The library permutes
into contiguous parts, exchanges and permutes, in three ways (``ways.LIBRARY``). All ways of a shape take turns round by
round, the slowest rank counts, and outputs are compared before and behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sidelane import config as settings
from sidelane.c3.strategies import named
from sidelane.config import COMPUTE, NOTHING
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.layouts import ALONE, BESIDE, LayoutOptions, Shape
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds, WayComparison, outcome
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.pairs.comparison import median_of_rounds, percent_of_rounds
from sidelane_lab.pairs.pair import HIDE_LAUNCH_US, GemmRun, Pair, Workers, pair_streams
from sidelane_lab.pairs.workload import CPU_GEMM_FLOPS, Gemm, ideal_speedup, speedup
from sidelane_lab.studies.layouts.rows import BACK, LAYOUTS, THERE, LayoutRow, layout_tables
from sidelane_lab.studies.layouts.ways import DTYPE, LayoutCase, LayoutExchange, LayoutExchanges

WAN, LLAMA = (1, 32760, 40, 128), (1, 8192, 32, 128)
ROW_BYTES = (128, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Bytes of the heads of a position that go to one rank, which lie side by side."""

TENSOR_BYTES = 64 << 20
"""Bytes of a tensor of all ranks whose rows are so wide."""

SMALL = (2, 48, 8, 16)
BESIDE_SHAPES = WAN, LLAMA, SMALL
GEMM = Gemm(8192, 8192, 8192)
MOST_CALLS, SAMPLE_US = 20, 2000.0
BYTES_PER_US = 300e3
MOST_CPU_CALLS = 2


def shapes_of(options: LayoutOptions, rank: Rank) -> list[Shape]:
    """Return the shapes that are measured, positions and heads as multiples of the number of ranks."""
    n = rank.world_size
    if options.shapes:
        chosen = list(options.shapes)
    elif rank.device.type == "cpu":
        chosen = [SMALL]
    else:
        chosen = [WAN, LLAMA]
        for nbytes in ROW_BYTES:
            size = 64 if nbytes <= 512 else 128
            heads = n * nbytes // (size * DTYPE.itemsize)
            chosen.append((1, TENSOR_BYTES // (heads * size * DTYPE.itemsize), heads, size))
    return list(dict.fromkeys(rounded(shape, n) for shape in chosen))


def rounded(shape: Shape, n: int) -> Shape:
    """Round positions and heads up to multiples of the number of ranks.

    >>> rounded((1, 10, 7, 64), 4)
    (1, 12, 8, 64)
    """
    batch, positions, heads, size = shape
    return batch, -(-positions // n) * n, -(-heads // n) * n, size


def _measure(rank: Rank, options: LayoutOptions, sender: Sender) -> Iterator[LayoutRow]:
    """Make the rows. Collective."""
    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    shapes = shapes_of(options, rank)
    usual = {rounded(shape, rank.world_size) for shape in BESIDE_SHAPES}
    beside = [shape for shape in shapes if options.shapes or shape in usual]
    meter = make_meter(rank, options.step_s)
    config = dataclasses.replace(settings.current(), timeout_s=options.step_s, beside=NOTHING)
    study = _Study(meter, options, Communicator(device=rank.device, config=config))
    sender.steps = (ALONE in options.parts) * len(shapes) + (BESIDE in options.parts) * len(beside)
    for part, some in ((ALONE, shapes), (BESIDE, beside)):
        for shape in some if part in options.parts else ():
            case = LayoutCase(shape, options.tensors, rank.rank, rank.world_size, rank.device)
            sender.step(f"{options.tensors} tensors of {case.name}{', next to a GEMM' * (part == BESIDE)}")
            yield from study.alone(case) if part == ALONE else study.beside(case)
    study.close()


class _Study:
    """The part of one rank, which times exchanges together with the other ranks."""

    def __init__(self, meter: Meter, options: LayoutOptions, comm: Communicator) -> None:
        self._meter, self._options, self._comm = meter, options, comm
        self._seeds = itertools.count(options.seed + 1)
        self._streams = pair_streams(meter.device)

    def close(self) -> None:
        self._meter.finish("layouts")
        self._comm.close()

    def alone(self, case: LayoutCase) -> Iterator[LayoutRow]:
        """Measure every way, eager and in graphs. Collective."""
        compared = WayComparison[tuple[str, ...], tuple[Callable[[], object], int]]()
        chosen = self._options.launches or LAUNCHES
        launches = [one for one in chosen if one == LAUNCHES[0] or case.device.type != "cpu"]
        with self._meter.on_stream():
            exchanges = LayoutExchanges(self._comm, case)
            # One each for a launch: results of a graph lie where it was captured.
            ways: dict[tuple[str, ...], LayoutExchange] = {
                (launch, *way.key): way for launch in launches for way in exchanges.ways(LAYOUTS, NOTHING)
            }
            for key, way in ways.items():
                compared.add(key, self._ready(way, key[0]))
            jobs = {key: Job(run, repeats, calls_of(case)) for key, (run, repeats) in compared.ready.items()}
            if jobs:
                compared.rounds = self._rounds(jobs)
            compared.check_again(lambda key, timed: self._checked(ways[key], timed[0]))
        for key, way in ways.items():
            names = (*way.key[:-1], way.variant)
            yield _row(case, key[0], names, compared.rounds.get(key), compared.problems.get(key))
            way.close()

    def beside(self, case: LayoutCase) -> Iterator[LayoutRow]:
        """Measure every way that changes the layout alone and next to a GEMM, the exchange first. Collective."""
        gemm_of = gemm_on(case.device)
        problems: dict[tuple[str, ...], Problem] = {}
        with self._meter.on_stream(), Workers() as workers:
            ways = {way.key: way for way in LayoutExchanges(self._comm, case).ways((THERE, BACK), COMPUTE)}
            gemm = GemmRun(gemm_of, case.device)
            gemm.fill(next(self._seeds))
            pairs = Pair(gemm, self._streams, workers)
            launches = {key: pairs.launch(named("conccl"), way) for key, way in ways.items()}  # type: ignore[arg-type]

            def checked(key: tuple[str, ...]) -> None:
                gemm.poison()
                problem = self._checked(ways[key], launches[key], gemm)
                if problem is not None:
                    problems[key] = problem

            for key in ways:
                checked(key)
            able = [key for key in ways if key not in problems]
            hide_us = 0.0 if case.device.type == "cpu" else HIDE_LAUNCH_US
            jobs: dict[Any, Job] = {"gemm": Job(gemm.run, hide_launch_us=hide_us)}
            for key in able:
                jobs[key, "alone"] = Job(ways[key].run, hide_launch_us=hide_us)
                jobs[key, "both"] = Job(launches[key], hide_launch_us=hide_us)
            rounds = self._rounds(jobs)
            for key in able:
                checked(key)
        for layout in (THERE, BACK):
            alone = {key: rounds[key, "alone"].times_us for key in able if key[0] == layout and key not in problems}
            best = min(alone.values(), key=statistics.median, default=())
            for key, way in ways.items():
                if key[0] != layout:
                    continue
                columns: dict[str, Any] = {"gemm": gemm_of.name}
                both = rounds.get((key, "both"))
                if key in alone and both is not None:
                    series = rounds["gemm"].times_us, best, both.times_us
                    columns |= {
                        "gemm_us": statistics.median(series[0]),
                        "comm_us": statistics.median(alone[key]),
                        "best_comm_us": statistics.median(best),
                        "speedup": median_of_rounds(speedup, *series),
                        "ideal": median_of_rounds(ideal_speedup, *series[:2]),
                        "percent_of_ideal": percent_of_rounds(*series),
                    }
                names = (*key[:-1], way.variant)
                yield _row(case, LAUNCHES[0], names, both, problems.get(key), **columns)
                way.close()

    def _ready(self, way: LayoutExchange, launch: str) -> tuple[Callable[[], object], int] | Problem:
        """Check a way, and bring it into the form that is timed: what runs, and how often."""
        problem = self._checked(way, way.run)
        if problem is not None:
            return problem
        calls = calls_of(way.case)
        if launch == LAUNCHES[0]:
            return way.run, calls
        graphs: list[torch.cuda.CUDAGraph] = []
        refused = self._meter.attempt(lambda: graphs.append(captured(way.run, calls)))
        if refused is not None:
            return Problem(refused)
        return self._checked(way, graphs[0].replay) or (graphs[0].replay, 1)

    def _checked(self, way: LayoutExchange, run: Callable[[], object], gemm: GemmRun | None = None) -> Problem | None:
        """Run on fresh inputs and poisoned outputs, and compare. Collective."""
        seed, label = next(self._seeds), ", ".join(way.key)

        def step() -> None:
            way.fill(seed)
            run()

        def compare() -> str | None:
            return way.error(seed) or (None if gemm is None else gemm.error())

        return self._meter.check(label, step, compare)

    def _rounds(self, jobs: Mapping[Any, Job]) -> dict[Any, Rounds]:
        return self._meter.rounds(jobs, warmup=self._options.warmup, repeats=self._options.repeats)


def gemm_on(device: torch.device) -> Gemm:
    """Return the GEMM that runs beside exchanges, divided where a CPU core multiplies."""
    if device.type != "cpu":
        return GEMM
    divisor = 1
    while GEMM.scaled(divisor).flops > CPU_GEMM_FLOPS:
        divisor *= 2
    return dataclasses.replace(GEMM, dtype="float32").scaled(divisor)


def calls_of(case: LayoutCase) -> int:
    """Return the exchanges of a sample: as many as take about two milliseconds, 20 at most."""
    if case.device.type == "cpu":
        return MOST_CPU_CALLS
    return max(1, min(MOST_CALLS, round(SAMPLE_US / (30.0 + case.leaving_bytes / BYTES_PER_US))))


def _row(
    case: LayoutCase,
    launch: str,
    names: Sequence[str],
    rounds: Rounds | None,
    problem: Problem | None,
    **more: Any,
) -> LayoutRow:
    layout, implementation, memory, variant = names
    columns = outcome(rounds, problem)
    time_us = columns["time_us"]
    return LayoutRow(
        shape=case.name,
        tensors=case.tensors,
        layout=layout,
        row_bytes=case.row_bytes,
        bytes=case.leaving_bytes,
        dtype=str(DTYPE).removeprefix("torch."),
        launch=launch,
        implementation=implementation,
        memory=memory,
        variant=variant,
        gbps=None if time_us is None or more else case.leaving_bytes / time_us / 1e3,
        **columns,
        **more,
    )


STUDY = Study(
    name="layouts",
    title="All-to-alls with a layout",
    legend=(
        "Exchanges of sequence parallelism. there: from positions to heads; back; contiguous: as many bytes in parts "
        "that lie side by side. The library permutes before and behind: each tensor by itself, calls in one group, or "
        "all tensors together in one buffer. Medians over rounds of the slowest rank. 'library over it': the library's "
        "fastest way over the time of the line; 'over contiguous': the time over that of the same implementation and "
        "memory without another layout. Next to a GEMM the exchange is released first; % of ideal is that of the C3 "
        "study, with the fastest exchange of the table."
    ),
    row=LayoutRow,
    tables=layout_tables,
    measure=_measure,
    progress="layouts",
)

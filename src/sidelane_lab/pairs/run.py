"""Run one pair under every strategy on this rank: buffers, streams, checks, rounds and ratios.

How both start together on a GPU. The host queues everything while the device is held back: a spin on the caller's
stream, then a barrier of all ranks, then the event that starts the clock. Both streams wait for it::

    caller   spin  barrier  start ─┬───────────────────────────────┬─ end
    first                          └─ begun, operation ────────────┤
    second                               └─ operation ─────────────┘

The second stream waits for an event that the first one records just before its operation. That hop between streams,
about 2 us, is what keeps the order; the host's launch latency plays no part. A strategy with a priority has the
collective on a stream that the device serves first, one with a partition has streams of its own (``c3.partitions``),
and is tried with each of its numbers of units, with the call of its implementation that is fastest alone. On a CPU the
collective's threads (or Gloo's) work while a thread of ours computes, and the order is that of the calls; priority
means a thread that yields (``YIELDING``). What cannot run here at all becomes a result with the reason.

Checks: before a strategy may be timed it runs once with fresh random inputs and poisoned outputs, and the bytes of the
collective and the result of the GEMM are compared. (The GEMM keeps its random inputs for all checks of a pair.)

A strategy with several calls has each of them tried in a short look; those that are as fast as its best, or nearly, get
all rounds (``narrowed``). What is the same launch as another strategy's is not launched twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch.nn import functional

from sidelane.c3.partitions import DevicePartitions, PairStreams, shares
from sidelane.c3.strategies import Order, Strategy
from sidelane.c3.strategies import strategies as all_strategies
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Job, Problem
from sidelane_lab.pairs.movers import implementation_of
from sidelane_lab.pairs.outcome import GEMM, Configuration, PairOutcome, judge, pair_label
from sidelane_lab.pairs.partition import applies
from sidelane_lab.pairs.spans import Beginning, ComputePart, Trace, Traced
from sidelane_lab.pairs.workload import BAG_READS, ComputeKind, Gemm, Workload

YIELDING = 10
"""Steps of niceness of the thread that computes next to an urgent collective on CPUs: with one core for two threads it
then gets about a tenth of it."""

WORTH = 1.15
"""A call whose best round of the look took longer than that many times the best of its strategy goes. Rounds of one
launch differ by some percent, and by half where a kernel runs beside a GEMM or in turns with it."""

LOOKS = 2
"""Rounds of a look: each call has run before, in its check."""

HIDE_LAUNCH_US = 500.0
"""The host queues a GEMM, a collective and a dozen events in less; the meter notices if not, and waits longer."""

RELATIVE_ERROR = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-4}
ABSOLUTE_ERROR = {"bfloat16": 1e-3, "float16": 1e-3, "float32": 1e-5}
"""Allowed deviation of a GEMM from the same GEMM alone: two roundings of the result, and an absolute term in units of
its standard deviation, sqrt(k) for normal inputs. A library may pick another kernel on another stream."""

Times = Mapping[str, Sequence[float]]
"""Microseconds by names, one for each round, of the slowest rank."""


class CollectiveRun(Configuration, Protocol):
    """One way to run the pair's collective, with its buffers."""

    def start(self) -> Callable[[], None]:
        """Begin on the current stream; what comes back waits for the end on a CPU."""
        ...

    def fill(self, seed: int) -> None:
        """Put in fresh random input, and poison the output."""
        ...

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the output for the input of ``seed``."""
        ...


C = TypeVar("C", bound=Any)
Launches = dict[str, tuple[C, Callable[[], None]]]
"""Calls, and what launches them with the GEMM or alone, by names."""

Planned = Mapping[str, tuple[Strategy, C, int]]
"""A strategy, a call and units taken from the GEMM, by names."""


class Instruments:
    """The meter of pairs: rounds are interleaved behind a warm-up, and every sample hides what a launch takes the host.

    Every rank makes the same calls.

    Attributes:
        late: samples that hid too little, by name, of what was timed last.
    """

    def __init__(self, meter: Meter, warmup: int, repeats: int) -> None:
        self._meter, self._warmup, self._repeats = meter, warmup, repeats
        self.late: dict[str, int] = {}
        self.on_stream, self.attempt, self.finish = meter.on_stream, meter.attempt, meter.finish

    def time(self, runs: Mapping[str, Callable[[], None]]) -> Times:
        """Time every run."""
        return self._timed(runs, self._warmup, self._repeats)

    def look(self, runs: Mapping[str, Callable[[], None]]) -> Times:
        """Time every run in few rounds."""
        return self._timed(runs, 0, LOOKS)

    def _timed(self, runs: Mapping[str, Callable[[], None]], warmup: int, repeats: int) -> Times:
        hide_us = 0.0 if self._meter.device.type == "cpu" else HIDE_LAUNCH_US
        jobs = {name: Job(run, hide_launch_us=hide_us) for name, run in runs.items()}
        rounds = self._meter.rounds(jobs, warmup=warmup, repeats=repeats)
        self.late = {name: measured.late for name, measured in rounds.items() if measured.late}
        return {name: measured.times_us for name, measured in rounds.items()}


class GemmRun:
    """A GEMM, or another computation, with its operands, a reference and a check."""

    def __init__(self, gemm: Gemm, device: torch.device) -> None:
        dtype = getattr(torch, gemm.dtype)
        self.gemm = gemm
        rows = max(1, gemm.m * gemm.k // BAG_READS)
        shapes = {
            ComputeKind.PRODUCT: ((gemm.m, gemm.k), (gemm.k, gemm.n)),
            ComputeKind.ADD: ((gemm.m, gemm.n), (gemm.m, gemm.n)),
            ComputeKind.BAG: ((gemm.m, gemm.k), (rows, gemm.n)),
            ComputeKind.ATTEND: ((gemm.m, 1, 1, gemm.n), (2, gemm.m, 1, gemm.k, gemm.n)),
        }
        of_a, of_b = shapes[gemm.operation]
        indices = gemm.operation is ComputeKind.BAG
        self.a = torch.zeros(of_a, dtype=torch.int64 if indices else dtype, device=device)
        self.b = torch.empty(of_b, dtype=dtype, device=device)
        self.c = torch.empty(gemm.m, gemm.n, dtype=dtype, device=device)
        self._expected = torch.empty_like(self.c)

    def run(self) -> None:
        """Compute, on the current stream."""
        match self.gemm.operation:
            case ComputeKind.PRODUCT:
                torch.mm(self.a, self.b, out=self.c)
            case ComputeKind.ADD:
                torch.add(self.a, self.b, out=self.c)
            case ComputeKind.BAG:
                self.c = functional.embedding_bag(self.a, self.b, mode="sum")
            case ComputeKind.ATTEND:
                self.c = functional.scaled_dot_product_attention(self.a, *self.b).view(self.c.shape)

    def fill(self, seed: int) -> None:
        """Put in fresh normal inputs, their product with nothing else running, and a poisoned result."""
        generator = torch.Generator(device=self.a.device).manual_seed(seed)
        if self.a.is_floating_point():
            self.a.normal_(generator=generator)
        else:
            self.a.random_(len(self.b), generator=generator)
        self.b.normal_(generator=generator)
        self.run()
        self._expected.copy_(self.c)
        self.poison()

    def poison(self) -> None:
        """Overwrite the result, so that one that nobody computes again is noticed."""
        self.c.fill_(math.nan)

    def error(self) -> str | None:
        """Say what is wrong with the result; None if nothing is."""
        rtol, atol = RELATIVE_ERROR[self.gemm.dtype], ABSOLUTE_ERROR[self.gemm.dtype] * math.sqrt(self.gemm.k)
        if torch.allclose(self.c, self._expected, rtol=rtol, atol=atol):
            return None
        return f"the GEMM's result differs from that of the GEMM alone (rtol={rtol:.2g}, atol={atol:.2g})"


def check_launch(
    instruments: Any,
    label: str,
    launch: Callable[[], object],
    run: CollectiveRun,
    gemms: Iterable[GemmRun],
    seed: int,
) -> Problem | None:
    """Launch once on fresh input and poisoned outputs, and compare the bytes of a collective and GEMMs. Collective."""
    gemms = tuple(gemms)

    def execute() -> None:
        run.fill(seed)
        for gemm in gemms:
            gemm.poison()
        launch()
        instruments.finish(label)

    def compare() -> str | None:
        return run.error(seed) or next(filter(None, (gemm.error() for gemm in gemms)), None)

    # Two steps: a rank that could not run has nothing to compare, and the two are told apart in the result.
    refused = instruments.attempt(execute)
    if refused is not None:
        return Problem(refused)
    wrong = instruments.attempt(compare)
    return None if wrong is None else Problem(wrong, wrong=True)


def refusal(strategy: Strategy, partitions: DevicePartitions | None, no_partitions: str, instruments: Any) -> str:
    """Say why a strategy cannot take its units here; empty if it takes none or can. Collective."""
    if strategy.partition is None:
        return ""
    if partitions is None:
        return no_partitions
    return instruments.attempt(partitions.objection) or ""


def pair_streams(device: torch.device) -> PairStreams | None:
    """Return streams for pairs on a device; None on a CPU."""
    if device.type == "cpu":
        return None
    return PairStreams(torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1))


def run_workload(
    workload: Workload,
    collectives: Sequence[CollectiveRun],
    instruments: Any,
    *,
    device: torch.device,
    streams: PairStreams | None = None,
    partitions: DevicePartitions | None = None,
    no_partitions: str = "there are no green contexts here",
    memory_bound: bool = False,
    strategies: Sequence[Strategy] | None = None,
    unavailable: Mapping[str, str] | None = None,
    seed: int = 0,
    on_trace: Callable[[str, Trace], None] | None = None,
    on_launch: Callable[[str, Callable[[], None], float], None] | None = None,
) -> PairOutcome:
    """Measure a pair under every strategy. Collective: all ranks call it with the same arguments.

    Args:
        workload: the pair.
        collectives: every configuration of every implementation, ready to run.
        instruments: how to agree and to measure.
        device: of this rank.
        streams: streams, on an accelerator.
        partitions: what takes units from a GEMM; None: nothing does here, and ``no_partitions`` says why.
        no_partitions: see there.
        memory_bound: the GEMM is limited by its bytes, which some strategies go by.
        strategies: what to run; None: all that there are.
        unavailable: implementations that should be here and are not, with the reason.
        seed: of the random inputs.
        on_trace: gets, for every strategy in its best configuration, when both ran in a run of its own. Every rank's
            is called in the same order.
        on_launch: gets, for every strategy in its best configuration, what launches the pair, and its time in
            microseconds. Every rank's is called in the same order.
    """
    seeds = iter(range(seed + 1, seed + 1_000_000))
    strategies = all_strategies() if strategies is None else strategies
    refused = {
        strategy.name: Problem(f"it takes compute units from the GEMM: {reason}")
        for strategy in strategies
        if strategy.partition is not None and (reason := refusal(strategy, partitions, no_partitions, instruments))
    }
    tried = {
        strategy.name: shares(partitions.units) if applies(strategy.partition, memory_bound) else (0,)
        for strategy in strategies
        if strategy.partition is not None and partitions is not None
    }
    with instruments.on_stream(), Workers() as workers:
        gemm = GemmRun(workload.gemm, device)
        pairs = Pairs(gemm, streams, workers, partitions)
        gemm.fill(next(seeds))
        instruments.finish("the GEMM's inputs")
        by_itself: Launches[CollectiveRun] = {
            run.label: (run, functools.partial(run_alone, run)) for run in collectives
        }
        alone, failed_alone = _check(by_itself, (), instruments, seeds)
        able = [strategy for strategy in strategies if strategy.name not in refused]
        looked = instruments.look({label: launch for label, (_, launch) in alone.items()}) if alone else {}
        every = _plan_of(able, [run for run in collectives if run.label in alone], collectives, looked, tried)
        aliases = aliases_of(every)
        planned = {
            label: (run, pairs.launch(strategy, run, units))
            for label, (strategy, run, units) in every.items()
            if label not in aliases
        }
        together, failed_together = _check(planned, (gemm,), instruments, seeds)
        kept = narrowed(every, together, instruments)
        by_library: dict[str, list[str]] = {}
        for label, (run, _) in alone.items():
            by_library.setdefault(run.implementation, []).append(label)
        needed = {every[label][1].label for label in kept} | lasting(by_library.values(), looked)
        launches = {GEMM: gemm.run} | {
            label: launch for label, (_, launch) in {**alone, **kept}.items() if label in needed or label in kept
        }
        times = dict(instruments.time(launches))
        for label, twin in aliases.items():
            if twin in times:
                times[label] = times[twin]
            elif twin in failed_together:
                failed_together[label] = failed_together[twin]
        failures = {**failed_alone, **failed_together, **refused}
        outcome = judge(workload, collectives, strategies, times, failures, unavailable or {}, tried)
        by_label, by_name = {run.label: run for run in collectives}, {one.name: one for one in strategies}
        if on_launch is not None:
            for result in outcome.results:
                if result.time_us is not None:
                    again = pairs.launch(by_name[result.strategy], by_label[result.label], result.units)
                    on_launch(result.strategy, again, result.time_us)
        if on_trace is not None:
            for result in outcome.results:
                if result.time_us is not None:
                    traced = Traced(gemm, by_label[result.label], on_cpu=device.type == "cpu")
                    together_traced = Pairs(traced, streams, workers, partitions)
                    launch = together_traced.launch(by_name[result.strategy], traced, result.units)
                    instruments.time({f"{result.strategy}, traced": traced.launched(launch)})
                    on_trace(result.strategy, traced.read())
    return outcome


class Workers(contextlib.ExitStack):
    """Threads that compute on a CPU while collectives run: one like any other, and one that yields to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.yielding = (
            self.enter_context(ThreadPoolExecutor(1, initializer=_begin_thread, initargs=(steps,)))
            for steps in (0, YIELDING)
        )

    def of(self, strategy: Strategy) -> ThreadPoolExecutor:
        """Return where the GEMM runs under a strategy."""
        return self.yielding if strategy.priority else self.usual


class Pairs:
    """Turns (strategy, collective) into a launch of both."""

    def __init__(
        self,
        gemm: ComputePart,
        streams: PairStreams | None,
        workers: Workers,
        partitions: DevicePartitions | None = None,
    ) -> None:
        self._gemm = gemm
        self._streams = streams
        self._workers = workers
        self._partitions = partitions

    def launch(self, strategy: Strategy, run: Beginning, units: int = 0) -> Callable[[], None]:
        """Return what launches both; ``units``: that the GEMM does without."""
        if not strategy.concurrent:
            return lambda: self._serial(run)
        if self._streams is None:
            return lambda: self._on_threads(strategy, run)
        streams = self._streams
        if units and strategy.partition is not None:
            assert self._partitions is not None, "without them the strategy is refused"
            streams = self._partitions.streams(units, streams, confine=strategy.mover.takes_units)
        return lambda: self._on_streams(strategy, run, streams)

    def _serial(self, run: Beginning) -> None:
        self._gemm.run()
        run.start()()

    def _on_streams(self, strategy: Strategy, run: Beginning, streams: PairStreams) -> None:
        operations: list[tuple[torch.cuda.Stream, Callable[[], object]]] = [
            (streams.gemm, self._gemm.run),
            (streams.urgent if strategy.priority else streams.collective, run.start),
        ]
        if strategy.order is Order.COLLECTIVE_FIRST:
            operations.reverse()
        caller = torch.cuda.current_stream()
        released = torch.cuda.Event()
        released.record(caller)
        for stream, operation in operations:
            stream.wait_event(released)
            released = torch.cuda.Event()  # for the second stream: the first one has come to its operation
            released.record(stream)
            with torch.cuda.stream(stream):
                operation()
        for stream, _ in operations:
            caller.wait_stream(stream)

    def _on_threads(self, strategy: Strategy, run: Beginning) -> None:
        if strategy.order is Order.COLLECTIVE_FIRST and not strategy.priority:
            wait = run.start()
            self._gemm.run()
            wait()
            return
        begun = threading.Event()

        def compute() -> None:
            begun.set()
            self._gemm.run()

        worker = self._workers.of(strategy)
        if strategy.order is Order.COLLECTIVE_FIRST:
            wait = run.start()
            product = worker.submit(compute)
        else:
            product = worker.submit(compute)
            begun.wait()
            wait = run.start()
        wait()
        product.result()


def run_alone(run: Beginning) -> None:
    """Run a collective from beginning to end."""
    run.start()()


def _begin_thread(yields: int) -> None:
    torch.set_num_threads(1)
    if yields and sys.platform == "linux":  # where niceness is a thread's, not the process's
        os.nice(yields)


def _plan_of(
    strategies: Sequence[Strategy],
    right: Sequence[CollectiveRun],
    all_runs: Sequence[CollectiveRun],
    looked: Times,
    tried: Mapping[str, Sequence[int]],
) -> Planned[CollectiveRun]:
    """Return each strategy's launches: the right calls of its implementation, with each number of units.

    Where units are taken only the call that is fastest alone is planned.
    """
    here = {run.implementation for run in all_runs}
    planned: dict[str, tuple[Strategy, CollectiveRun, int]] = {}
    for strategy in strategies:
        units = tried.get(strategy.name, (0,))
        mine = [run for run in right if run.implementation == implementation_of(strategy, here)]
        if any(units):
            mine = sorted(mine, key=lambda run: statistics.median(looked[run.label]))[:1]
        planned |= {pair_label(strategy, run, taken): (strategy, run, taken) for run in mine for taken in units}
    return planned


def _check(
    launches: Launches[CollectiveRun], gemms: Sequence[GemmRun], instruments: Any, seeds: Iterator[int]
) -> tuple[Launches[CollectiveRun], dict[str, Problem]]:
    """Keep those launches that are right on every rank; the others with what was wrong."""
    failures = {
        label: problem
        for label, (run, launch) in launches.items()
        if (problem := check_launch(instruments, label, launch, run, gemms, next(seeds))) is not None
    }
    return {label: launch for label, launch in launches.items() if label not in failures}, failures


def aliases_of(planned: Planned[C]) -> dict[str, str]:
    """Return names of launches that are the same as another one: of strategies that would take units, and take none.

    Returns:
        The name of that other one, by name.
    """
    plain = {
        (dataclasses.replace(strategy, name="", recipe="", preference=0), run.label): label
        for label, (strategy, run, _) in planned.items()
        if strategy.partition is None
    }
    found = {}
    for label, (strategy, run, units) in planned.items():
        if strategy.partition is not None and not units:
            twin = dataclasses.replace(strategy, name="", recipe="", preference=0, partition=None)
            if (twin, run.label) in plain:
                found[label] = plain[twin, run.label]
    return found


def narrowed(planned: Planned[C], launches: Launches[C], instruments: Any) -> Launches[C]:
    """Return what is left of launches after a look at those that have rivals. Collective.

    Args:
        planned: what each of them is.
        launches: that are right.
        instruments: that look.
    """
    rivals: dict[tuple[str, int], list[str]] = {}
    for label in launches:
        strategy, _, units = planned[label]
        rivals.setdefault((strategy.name, units), []).append(label)
    asked = [label for labels in rivals.values() if len(labels) > 1 for label in labels]
    if not asked:
        return launches
    looked = instruments.look({label: launches[label][1] for label in asked})
    gone = set(asked) - lasting(rivals.values(), looked)
    return {label: launch for label, launch in launches.items() if label not in gone}


def lasting(rivals: Iterable[Sequence[str]], looked: Mapping[str, Sequence[float]]) -> set[str]:
    """Return those of several groups of names that are as fast as the fastest of their group, or nearly.

    >>> sorted(lasting([("a", "b", "c")], {"a": [100.0, 180.0], "b": [110.0, 105.0], "c": [120.0, 116.0]}))
    ['a', 'b']
    """
    best_us = {label: min(times) for label, times in looked.items()}
    timed = [[label for label in labels if label in best_us] for labels in rivals]
    return {
        label
        for labels in timed
        for label in labels
        if best_us[label] <= WORTH * min(best_us[other] for other in labels)
    }

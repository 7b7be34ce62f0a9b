"""How ``sidelane tune --study c3`` measures a batch, on one rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sidelane.c3.partitions import SMALLEST_SHARE, DevicePartitions, PairStreams, shares, units_to_try
from sidelane.c3.strategies import Strategy, strategies
from sidelane.choice.candidate import DMA, SM
from sidelane.machine import local
from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import ReadyCall, candidates_of
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import Roster
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.ways import Job, Rounds, WayOutcome
from sidelane_lab.pairs.isolated import BESIDE, COLLECTIVE, COUNTERS, GEMM, MEMORY, PAIR, SERIAL, SPLIT
from sidelane_lab.pairs.pair import GemmRun, Pair, PairLaunch, Workers, pair_streams, refusal, run_alone
from sidelane_lab.pairs.spans import stamped, timed
from sidelane_lab.pairs.workload import Gemm, implementation_of
from sidelane_lab.studies.tune.counters import count
from sidelane_lab.studies.tune.isolated_rows import IsolatedRow, Key

K = TypeVar("K", bound=Hashable)

TAKE_UNITS = ("nccl", SM)
"""Implementations whose kernels can be given units."""

THREADS = "threads"
MEANS = (SPLIT, THREADS)
"""Names of ways to take units from a GEMM: strategies' way; on a CPU, fewer threads."""

HIDE_LAUNCH_US = 300.0

Measured = WayOutcome[Any, PairLaunch]
"""A launch with its times, by units or by a label."""


@dataclasses.dataclass(frozen=True, slots=True)
class IsolatedBatch:
    """Points that are compared in turns, and done or left as one.

    Attributes:
        what: see ``IsolatedRow``.
        gemm: None without one.
        collective: None without one.
        nbytes: bytes of the collective, the traffic or the memory.
        means: how a GEMM's units are taken; of traffic, who makes it.
    """

    what: str
    gemm: Gemm | None = None
    collective: Kind | None = None
    nbytes: int = 0
    means: str = ""

    def __str__(self) -> str:
        names = (self.what, self.gemm and self.gemm.name, self.collective, str(self.nbytes or ""), self.means)
        return " ".join(str(name) for name in names if name)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The GEMM's m, n and k; zeros without one."""
        return (0, 0, 0) if self.gemm is None else (self.gemm.m, self.gemm.n, self.gemm.k)

    def is_done(self, keys: Collection[Key]) -> bool:
        """Tell that all of it is in a file: what was measured of it was so at once."""
        mine = (self.what, *self.sizes, str(self.collective or ""), self.nbytes)
        for what, m, n, k, _, collective, nbytes, implementation, _, means, _ in keys:
            same = (what, m, n, k, collective, nbytes) == mine
            if same and self.means in ("", implementation if self.what == BESIDE else means):
                return True
        return False


class Bench:
    """Measures batches on this rank; every rank makes the same calls.

    Args:
        rank: of this process.
        roster: implementations, without buffers yet.
        batches: all that may be measured.
        options: ``isolated.IsolatedOptions``.
    """

    def __init__(self, rank: Rank, roster: Roster, batches: Sequence[IsolatedBatch], options: Any) -> None:
        self.roster, self._rank, self._options, self._meter = roster, rank, options, roster.meter
        self._on_cpu = rank.device.type == "cpu"
        if self._on_cpu:
            self._threads = max(1, local.cores() // rank.world_size)
            torch.set_num_threads(self._threads)
        self._streams = pair_streams(rank.device)
        self._partitions, self._no_partitions = DevicePartitions.on(rank.device)
        self._units = self._threads if self._on_cpu else self._partitions.units if self._partitions else 0
        self._dtype = "float32" if self._on_cpu else options.dtype
        self._seeds = itertools.count(options.seed + 1)
        cases = [self._case(one) for one in batches if one.collective or one.means == DMA]
        if cases:
            roster.reserve(max(case.output_bytes for case in cases), max(case.input_bytes for case in cases))

    def rows(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        """Measure a batch. Collective."""
        measure = {
            MEMORY: self._memory,
            GEMM: self._gemm,
            COLLECTIVE: self._collective,
            PAIR: self._pair,
            BESIDE: self._beside,
            COUNTERS: self._counted,
        }
        with self._meter.on_stream():
            yield from measure[batch.what](batch)

    # --- the memory and the GEMM --------------------------------------------------------------------------------------

    def _memory(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        source = torch.zeros(batch.nbytes // 4, dtype=torch.float32, device=self._rank.device)
        target = torch.empty_like(source)
        time_us = self.times({"add": lambda: torch.add(source, 1.0, out=target)})["add"]
        yield self._row(batch, time_us=time_us, gbps=2 * batch.nbytes / time_us / 1e3)

    def _gemm(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        means, run = batch.means, self._filled(batch)
        # A machine's own GEMM with all units is measured in any case.
        why_not = self._meter.attempt(functools.partial(self._objection, means))
        if why_not is not None and means != (THREADS if self._on_cpu else SPLIT):
            yield self._row(batch, means=means, units=SMALLEST_SHARE, note=why_not)
            return

        ways = {
            units: lambda units=units: PairLaunch(
                f"{run.gemm.name} with {units} fewer", self._launch(run, means, units), gemms=(run,)
            )
            for units in (0, *(() if why_not else self._taken()))
        }
        for one in self._compared(ways):
            yield self._row(batch, means=means, units=one.key, **_figures(one))
        if why_not:
            yield self._row(batch, means=means, units=SMALLEST_SHARE, note=why_not)

    def _filled(self, batch: IsolatedBatch) -> GemmRun:
        assert batch.gemm is not None
        run = GemmRun(batch.gemm, self._rank.device)
        run.fill(next(self._seeds))
        return run

    def _objection(self, means: str) -> str:
        """Say why no units can be taken from a GEMM so; empty if they can."""
        if (means == THREADS) != self._on_cpu:
            return f"not on {'CPUs' if self._on_cpu else 'GPUs'}"
        if not self._on_cpu and self._partitions is None:
            return self._no_partitions
        if self._partitions is not None:
            return self._partitions.objection()
        return "" if self._taken() else f"a rank has {self._units} here"

    def _taken(self) -> tuple[int, ...]:
        """Return units to take: on GPUs those of a sweep, on CPUs powers of two of threads."""
        if self._on_cpu:
            return tuple(1 << k for k in range(self._units.bit_length()) if 1 << k < self._units)
        return shares(self._units) if self._partitions else ()

    def _launch(self, run: GemmRun, means: str, units: int) -> Callable[[], object]:
        """Return what runs the GEMM without ``units``."""
        if self._on_cpu and units:
            return functools.partial(_with_threads, self._threads, units, run)
        if not units:
            return run.run
        assert self._partitions is not None
        assert self._streams is not None
        streams = self._partitions.streams(units, self._streams, confine=True)
        return functools.partial(_on_stream, streams.gemm, run.run)

    def _counted(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        """Count the bytes of a GEMM on the first rank's GPU, while the others wait."""
        assert batch.gemm is not None
        found: dict[str, Any] = {}
        first, gemm = self._rank.rank == 0, batch.gemm

        def step() -> None:
            if first:
                found.update(count(gemm, self._options.step_s / 2))

        note = self._meter.attempt(step)
        yield self._row(batch, **(found or {"note": note or "the first rank counts"}))

    # --- collectives --------------------------------------------------------------------------------------------------

    def _collective(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        calls, found = self._alone(batch)
        yield from (self._sent(batch, calls[one.key], 0, one) for one in found)
        for name, run in _fastest(calls, found).items():
            if name in TAKE_UNITS:
                yield from self._given(batch, run)
        if self._on_cpu:
            note = f"collectives are given no units: {self._no_partitions}"
            yield self._row(batch, means=SPLIT, units=SMALLEST_SHARE, note=note)

    def _alone(self, batch: IsolatedBatch) -> tuple[dict[str, ReadyCall], Sequence[Measured]]:
        """Compare every call of a collective. Returns the calls by label, and what was measured of each."""
        case = self._case(batch)
        calls = [
            ReadyCall(entrant, case, implementation)
            for implementation in self.roster.implementations.values()
            for entrant in candidates_of(implementation, case.kind, launches=("eager",))
        ]
        ways = {run.label: functools.partial(PairLaunch, run.label, run.run, run) for run in calls}
        return {run.label: run for run in calls}, self._compared(ways)

    def _given(self, batch: IsolatedBatch, run: ReadyCall) -> Iterator[IsolatedRow]:
        """Measure a collective on its own units."""
        reason = self._no_partitions
        if self._partitions is not None:
            reason = self._meter.attempt(self._partitions.objection) or ""
        if reason or self._partitions is None or self._streams is None:
            yield self._row(batch, run, means=SPLIT, units=SMALLEST_SHARE, note=reason)
            return
        ways = {}
        for units in self._taken():
            streams = self._partitions.streams(units, self._streams, confine=True)
            launch = functools.partial(_on_stream, streams.collective, run.run)
            ways[units] = functools.partial(PairLaunch, run.label, launch, run)
        yield from (self._sent(batch, run, one.key, one) for one in self._compared(ways))

    def _sent(self, batch: IsolatedBatch, run: ReadyCall, units: int, found: Measured) -> IsolatedRow:
        ranks = self._rank.world_size
        sent = batch.nbytes * (ranks - 1) / ranks * (2 if batch.collective is Kind.ALL_REDUCE else 1)
        figures = _figures(found)
        if time_us := figures.get("time_us"):
            figures["gbps"] = sent / time_us / 1e3
        return self._row(batch, run, means=SPLIT if units else "", units=units, **figures)

    # --- a GEMM and a collective under every strategy, for the shares of c3.expected ----------------------------------

    def _pair(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        """Measure every strategy with the call of its mover that is fastest alone, as ``c3`` does for sweeps."""
        by_mover = _fastest(*self._alone(batch))
        gemm = self._filled(batch)
        ways = {
            f"alone {run.label}": functools.partial(PairLaunch, run.label, functools.partial(run_alone, run), run)
            for run in by_mover.values()
        }
        places: dict[str, tuple[Strategy, ReadyCall, int]] = {}
        with Workers() as workers:
            pair = Pair(gemm, self._streams, workers, self._partitions)
            for strategy, run in _of_movers(by_mover):
                refused = refusal(strategy, self._partitions, self._no_partitions, self._meter)
                if refused:
                    yield self._row(batch, run, means=strategy.code, note=refused)
                    continue
                for units in self._units_of(strategy):
                    label = f"{strategy.code} {run.label} {units}"
                    launch = pair.launch(strategy, run, units)
                    ways[label] = functools.partial(PairLaunch, label, launch, run, (gemm,))
                    places[label] = strategy, run, units
            found = {one.key: _figures(one) for one in self._compared(ways)}
        for label, (strategy, run, units) in places.items():
            alone_us = found[f"alone {run.label}"].get("time_us") if strategy.code == SERIAL else None
            yield self._row(batch, run, means=strategy.code, units=units, alone_us=alone_us, **found[label])

    def _units_of(self, strategy: Strategy) -> tuple[int, ...]:
        if strategy.partition is None or self._partitions is None:
            return (0,)
        return units_to_try(strategy.partition, self._partitions.units)

    # --- a GEMM beside traffic ----------------------------------------------------------------------------------------

    def _beside(self, batch: IsolatedBatch) -> Iterator[IsolatedRow]:
        gemm = self._filled(batch)
        made: list[Callable[[], object]] = []
        refused = self._meter.attempt(lambda: made.append(self._traffic(batch)))
        if refused is not None:
            yield self._row(batch, note=refused)
            return
        (traffic,) = made
        alone = self.times({"gemm": gemm.run, "traffic": traffic})
        spans: dict[str, list[Callable[[], float]]] = {"gemm": [], "traffic": []}
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as worker:
            jobs: dict[str, Callable[[], object]] = {}
            for name, (one, other) in {"gemm": (gemm.run, traffic), "traffic": (traffic, gemm.run)}.items():
                # The other side lasts at least twice as long, so that all of this one has company.
                other_us = alone["traffic" if name == "gemm" else "gemm"]
                times = min(50, max(2, math.ceil(2 * alone[name] / other_us)))
                run = functools.partial(next_to, one, other, times, name == "gemm", self._streams, worker)
                jobs[name] = functools.partial(_keep, spans[name], run)
            self.times(jobs)
        for name, kept in spans.items():
            last = sorted(read() for read in kept[-self._options.repeats :])
            everyones = self._meter.of_all_ranks([last[len(last) // 2]])
            slowest = max(value for (value,) in everyones)
            yield self._row(batch, implementation=batch.means, means=name, time_us=slowest, alone_us=alone[name])

    def _traffic(self, batch: IsolatedBatch) -> Callable[[], object]:
        """Return what moves bytes without compute units: peer copies, copies to the host, or a copy on a CPU."""
        if batch.means == DMA:
            case, implementation = self._case(batch), self.roster.implementations[DMA]
            found = candidates_of(implementation, case.kind, only=("b2b",), launches=("eager",))
            return ReadyCall(found[-1], case, implementation).run  # the last one is in place
        source = torch.zeros(batch.nbytes, dtype=torch.uint8, device=self._rank.device)
        target = torch.empty(batch.nbytes, dtype=torch.uint8, device="cpu", pin_memory=not self._on_cpu)
        return functools.partial(target.copy_, source, non_blocking=True)

    # --- what all share -----------------------------------------------------------------------------------------------

    def _case(self, batch: IsolatedBatch) -> Case:
        kind = batch.collective or Kind.ALL_GATHER
        dtype = getattr(torch, self._dtype)
        return Case.on(self._rank, kind, batch.nbytes, dtype)

    def _compared(self, ways: Mapping[K, Callable[[], PairLaunch]]) -> Sequence[Measured]:
        """Check ways, time those that are right in turns, and check them once more. Collective."""
        hide_us = 0.0 if self._on_cpu else HIDE_LAUNCH_US

        def in_turns(ready: Mapping[K, PairLaunch]) -> Mapping[K, Rounds]:
            jobs = {key: Job(way.run, hide_launch_us=hide_us) for key, way in ready.items()}
            return self._meter.in_turns(jobs, self._options)

        return self._meter.compare(ways, self._seeds, in_turns)

    def times(self, launches: Mapping[K, Callable[[], object]]) -> dict[K, float]:
        """Return the median time of each, in microseconds, of the slowest rank."""
        hide_us = 0.0 if self._on_cpu else HIDE_LAUNCH_US
        jobs = {name: Job(run, hide_launch_us=hide_us) for name, run in launches.items()}
        return {name: rounds.median_us for name, rounds in self._meter.in_turns(jobs, self._options).items()}

    def _row(self, batch: IsolatedBatch, run: ReadyCall | None = None, **figures: Any) -> IsolatedRow:
        m, n, k = batch.sizes
        columns: dict[str, Any] = {
            "implementation": run.implementation if run else batch.means if batch.what == BESIDE else "",
            "variant": "" if run is None else " ".join(filter(None, (run.variant, "in place" if run.in_place else ""))),
            "means": "",
            "units": 0,
            **dict.fromkeys(("time_us", "alone_us", "gbps")),
        }
        return IsolatedRow(
            what=batch.what,
            gemm=batch.gemm.name if batch.gemm else "",
            m=m,
            n=n,
            k=k,
            dtype=self._dtype,
            collective=str(batch.collective or ""),
            bytes=batch.nbytes,
            device_units=self._units,
            **(columns | figures),
        )


def _figures(found: Measured) -> dict[str, Any]:
    """Return the time of a way for its row, or why there is none."""
    if found.problem is not None or found.rounds is None:
        problem = found.problem
        return {} if problem is None else {"note": problem.text, "correct": False if problem.wrong else None}
    return {"time_us": found.rounds.median_us, "correct": True}


def _fastest(calls: Mapping[str, ReadyCall], found: Sequence[Measured]) -> dict[str, ReadyCall]:
    """Return the call of each implementation that is fastest alone, the fastest of all first."""
    timed = {one.key: one.rounds.median_us for one in found if one.rounds is not None and one.problem is None}
    by_implementation: dict[str, ReadyCall] = {}
    for label in sorted(timed, key=timed.__getitem__):
        by_implementation.setdefault(calls[label].implementation, calls[label])
    return by_implementation


def next_to(
    one: Callable[[], object],
    other: Callable[[], object],
    times: int,
    gemm_is_timed: bool,
    streams: PairStreams | None,
    worker: ThreadPoolExecutor,
) -> Callable[[], float]:
    """Run one operation next to ``times`` of another, on the current device.

    Args:
        one: the operation that is timed.
        other: the other.
        times: enough for the one to have company until its end.
        gemm_is_timed: the one is the GEMM, which on a CPU runs on ``worker``; ranks must not wait for peers on two
            threads.
        streams: streams; None on a CPU.
        worker: a thread.

    Returns:
        What reads how long the one took, in microseconds, once the current stream has ended.
    """

    def others() -> None:
        for _ in range(times):
            other()

    if streams is None:
        first = worker.submit(timed, one if gemm_is_timed else others)
        second = timed(others if gemm_is_timed else one)
        begin, end = first.result() if gemm_is_timed else second
        first.result()
        return lambda: end - begin
    caller = torch.cuda.current_stream()
    mine, theirs = (streams.gemm, streams.collective) if gemm_is_timed else (streams.collective, streams.gemm)
    for stream in (mine, theirs):
        stream.wait_stream(caller)
    with torch.cuda.stream(theirs):
        other()
        begun = torch.cuda.Event()
        begun.record(theirs)
        others()
    mine.wait_event(begun)  # one of the others has ended, the next is under way
    with torch.cuda.stream(mine):
        before, after = stamped(mine, one)
    for stream in (mine, theirs):
        caller.wait_stream(stream)
    return lambda: 1e3 * float(before.elapsed_time(after))


def _of_movers(by_mover: Mapping[str, ReadyCall]) -> Iterator[tuple[Strategy, ReadyCall]]:
    """Yield every strategy with its call; one after the other with each of them, which the others are held against."""
    for strategy in strategies():
        if not strategy.concurrent:
            yield from ((strategy, run) for run in by_mover.values())
        elif (name := implementation_of(strategy, by_mover)) is not None:
            yield strategy, by_mover[name]


def _with_threads(threads: int, fewer: int, run: GemmRun) -> None:
    torch.set_num_threads(threads - fewer)
    run.run()
    torch.set_num_threads(threads)


def _on_stream(stream: torch.cuda.Stream, operation: Callable[[], object]) -> None:
    """Run on another stream, between what the current one has and will have."""
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        operation()
    caller.wait_stream(stream)


def _keep(kept: list[Callable[[], float]], run: Callable[[], Callable[[], float]]) -> None:
    kept.append(run())

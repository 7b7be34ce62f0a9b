"""How ``sidelane tune --study c3`` measures a batch, on one rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from sidelane.c3.lanes import SMALLEST_SHARE, DevicePartitions, Lanes, shares
from sidelane.c3.measured_curves import BESIDE
from sidelane.c3.strategy import Means, Partition
from sidelane.choice.candidate import DMA, SM
from sidelane.cli.launch import Rank
from sidelane.kernels.gemm_shape import TUNED
from sidelane.machine import local
from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import Prepared, candidates_of
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import Roster
from sidelane_lab.harness.measure import Job
from sidelane_lab.pairs.product import GemmRun
from sidelane_lab.studies.tune.isolated_batches import Batch, Options, batches_of, sizes_of
from sidelane_lab.studies.tune.isolated_beside import next_to
from sidelane_lab.studies.tune.isolated_pairs import pair_figures
from sidelane_lab.studies.tune.isolated_rows import IsolatedRow

if TYPE_CHECKING:
    from sidelane.execute.cuda.driver import Driver

K = TypeVar("K", bound=Hashable)

TAKE_UNITS = ("nccl", SM)
"""Implementations whose kernels can be given units."""

HIDE_LAUNCH_US = 300.0


class Bench:
    """Measures batches on this rank; every rank makes the same calls.

    Args:
        rank: of this process.
        roster: implementations, without buffers yet.
        options: see there.
    """

    def __init__(self, rank: Rank, roster: Roster, options: Options) -> None:
        self.roster, self._rank, self._options, self._meter = roster, rank, options, roster.meter
        self._on_cpu = rank.device.type == "cpu"
        if self._on_cpu:
            self._threads = max(1, local.cores() // rank.world_size)
            torch.set_num_threads(self._threads)
        self._lanes = Lanes.on(rank.device)
        self._partitions, self._no_partitions = DevicePartitions.on(rank.device)
        self._units = self._threads if self._on_cpu else self._partitions.units if self._partitions else 0
        self._dtype = "float32" if self._on_cpu else options.dtype
        self._seeds = itertools.count(options.seed + 1)
        cases = [self._case(one) for one in batches_of(rank, options) if one.collective or one.means == DMA]
        if cases:
            roster.reserve(max(case.output_bytes for case in cases), max(case.input_bytes for case in cases))

    def close(self) -> None:
        """Release what was made. Not after a failure."""
        self.roster.close()

    def rows(self, batch: Batch) -> Iterator[IsolatedRow]:
        """Measure a batch. Collective."""
        with self._meter.on_stream():
            match batch.what:
                case "memory":
                    yield self._memory(batch)
                case "gemm":
                    yield from self._gemm(batch)
                case "collective":
                    yield from self._collective(batch)
                case "pair":
                    yield from self._pair(batch)
                case _:
                    yield from self._beside(batch)

    # --- the memory and the GEMM --------------------------------------------------------------------------------------

    def _memory(self, batch: Batch) -> IsolatedRow:
        source = torch.zeros(batch.nbytes // 4, dtype=torch.float32, device=self._rank.device)
        target = torch.empty_like(source)
        time_us = self.times({"add": lambda: torch.add(source, 1.0, out=target)})["add"]
        return self._row(batch, time_us=time_us, gbps=2 * batch.nbytes / time_us / 1e3)

    def _gemm(self, batch: Batch) -> Iterator[IsolatedRow]:
        assert batch.gemm is not None
        means = Means(batch.means)
        run = GemmRun(batch.gemm, self._rank.device)
        run.fill(next(self._seeds))
        launches: dict[int, Callable[[], object]] = {}
        # A machine's own GEMM with all units is measured in any case.
        why_not = self._meter.attempt(functools.partial(self._objection, means))
        if why_not is not None and means is not (Means.THREADS if self._on_cpu else Means.SPLIT):
            yield self._row(batch, means=means, units=SMALLEST_SHARE, note=why_not)
            return

        def make() -> str | None:
            for units in (0, *(() if why_not else self._taken())):
                launches[units] = self._launch(run, means, units)
                launches[units]()
                self._meter.finish(f"{batch} with {units} fewer")
                if wrong := run.error():
                    return wrong
                run.c.fill_(math.nan)
            return None

        refused = self._meter.attempt(make)
        if refused is None:
            for units, time_us in self.times(launches).items():
                yield self._row(batch, means=means, units=units, time_us=time_us)
        if refused or why_not:
            yield self._row(batch, means=means, units=SMALLEST_SHARE, note=refused or why_not)

    def _objection(self, means: Means) -> str:
        """Why no units can be taken from a GEMM so; empty if they can."""
        if (means is Means.THREADS) != self._on_cpu:
            return f"not on {'CPUs' if self._on_cpu else 'GPUs'}"
        if not self._on_cpu and self._partitions is None:
            return self._no_partitions
        if self._partitions is not None and means is not Means.GRID:
            return self._partitions.objection(Partition(means=means))
        return "" if self._taken() else f"a rank has {self._units} here"

    def _taken(self) -> tuple[int, ...]:
        """Units to take: on GPUs those of a sweep, on CPUs powers of two of threads."""
        if self._on_cpu:
            return tuple(1 << k for k in range(self._units.bit_length()) if 1 << k < self._units)
        return self._shares()

    def _shares(self) -> tuple[int, ...]:
        """Units to take; none where nothing takes any."""
        return shares(Partition(), self._units, memory_bound=False) if self._partitions else ()

    def _launch(self, run: GemmRun, means: Means, units: int) -> Callable[[], object]:
        """What runs the GEMM without ``units``."""
        if self._on_cpu and units:
            return functools.partial(_with_threads, self._threads, units, run)
        if means is Means.GRID:
            return self._on_grid(run, units)
        if not units:
            return run.run
        assert self._partitions is not None
        assert self._lanes is not None
        lanes = self._partitions.lanes(Partition(means=means), units, self._lanes, confine=True)
        return functools.partial(_on_lane, lanes.gemm if means is Means.SPLIT else None, run.run, lanes.limited)

    def _on_grid(self, run: GemmRun, units: int) -> Callable[[], None]:
        from sidelane.execute.cuda.shaped_gemm import ShapedGemm

        kernel = ShapedGemm(self._driver, TUNED, run.a, run.b, run.c)
        return kernel.bind((self._units - units) * max(1, kernel.resident))

    @functools.cached_property
    def _driver(self) -> Driver:
        """One for all kernels: it keeps what it has compiled."""
        from sidelane.execute.cuda.driver import Driver

        return Driver(self._rank.device)

    # --- collectives --------------------------------------------------------------------------------------------------

    def _collective(self, batch: Batch) -> Iterator[IsolatedRow]:
        alone, wrong = self._right(batch)
        yield from wrong
        times = self.times({label: run.run for label, run in alone.items()})
        yield from (self._sent(batch, run, 0, times[label]) for label, run in alone.items())
        for name in dict.fromkeys(run.implementation for run in alone.values()):
            mine = [run for run in alone.values() if run.implementation == name]
            if name in TAKE_UNITS:
                yield from self._given(batch, min(mine, key=lambda run: times[run.label]))
        if self._on_cpu:
            note = f"collectives are given no units: {self._no_partitions}"
            yield self._row(batch, means=Means.SPLIT, units=SMALLEST_SHARE, note=note)

    def _right(self, batch: Batch) -> tuple[dict[str, Prepared], list[IsolatedRow]]:
        """Calls that are right, by label, and rows of the others."""
        case, right, others = self._case(batch), {}, []
        for implementation in self.roster.implementations.values():
            for entrant in candidates_of(implementation, case.kind, launches=("eager",)):
                run = Prepared(entrant, case, implementation)
                wrong = self._wrong(run, run.run)
                if wrong is None:
                    right[run.label] = run
                else:
                    others.append(self._row(batch, run, note=wrong))
        return right, others

    def _pair(self, batch: Batch) -> Iterator[IsolatedRow]:
        assert batch.gemm is not None
        alone, _ = self._right(batch)  # whoever is wrong has a row as a collective
        times = self.times({label: run.run for label, run in alone.items()})
        runs = sorted(alone.values(), key=lambda run: times[run.label])
        place = (self._rank.device, self._lanes, self._partitions, self._no_partitions)
        for one in pair_figures(batch.gemm, runs, self._meter, self.times, self._seeds, *place):
            figures = {"means": one.strategy, "units": one.units, "time_us": one.time_us, "alone_us": one.alone_us}
            yield self._row(batch, one.run, **figures, note=one.note)

    def _given(self, batch: Batch, run: Prepared) -> Iterator[IsolatedRow]:
        """A collective on its own units."""
        partition, launches = Partition(means=Means.SPLIT), {}
        reason = self._no_partitions
        if self._partitions is not None:
            reason = self._meter.attempt(functools.partial(self._partitions.objection, partition)) or ""
        if reason or self._partitions is None or self._lanes is None:
            yield self._row(batch, run, means=Means.SPLIT, units=SMALLEST_SHARE, note=reason)
            return
        for units in self._shares():
            lanes = self._partitions.lanes(partition, units, self._lanes, confine=True)
            launch = functools.partial(_on_lane, lanes.collective, run.run, contextlib.nullcontext)
            wrong = self._wrong(run, launch)
            if wrong is None:
                launches[units] = launch
            else:
                yield self._row(batch, run, means=Means.SPLIT, units=units, note=wrong)
        for units, time_us in self.times(launches).items():
            yield self._sent(batch, run, units, time_us)

    def _sent(self, batch: Batch, run: Prepared, units: int, time_us: float) -> IsolatedRow:
        ranks = self._rank.world_size
        sent = batch.nbytes * (ranks - 1) / ranks * (2 if batch.collective is Kind.ALL_REDUCE else 1)
        means = Means.SPLIT if units else ""
        return self._row(batch, run, means=means, units=units, time_us=time_us, gbps=sent / time_us / 1e3)

    def _wrong(self, run: Prepared, launch: Callable[[], object]) -> str | None:
        seed = next(self._seeds)

        def execute() -> None:
            run.fill(seed)
            launch()
            self._meter.finish(run.label)

        return self._meter.attempt(execute) or self._meter.attempt(lambda: run.error(seed))

    # --- a GEMM beside traffic ----------------------------------------------------------------------------------------

    def _beside(self, batch: Batch) -> Iterator[IsolatedRow]:
        assert batch.gemm is not None
        gemm = GemmRun(batch.gemm, self._rank.device)
        gemm.fill(next(self._seeds))
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
                run = functools.partial(next_to, one, other, times, name == "gemm", self._lanes, worker)
                jobs[name] = functools.partial(_keep, spans[name], run)
            self.times(jobs)
        for name, kept in spans.items():
            last = sorted(read() for read in kept[-self._options.repeats :])
            everyones = self._meter.of_all_ranks([last[len(last) // 2]])
            slowest = max(value for (value,) in everyones)
            yield self._row(batch, implementation=batch.means, means=name, time_us=slowest, alone_us=alone[name])

    def _traffic(self, batch: Batch) -> Callable[[], object]:
        """What moves bytes without compute units: peer copies, copies to the host, or a copy on a CPU."""
        if batch.means == DMA:
            case, implementation = self._case(batch), self.roster.implementations[DMA]
            found = candidates_of(implementation, case.kind, only=("b2b",), launches=("eager",))
            return Prepared(found[-1], case, implementation).run  # the last one is in place
        source = torch.zeros(batch.nbytes, dtype=torch.uint8, device=self._rank.device)
        target = torch.empty(batch.nbytes, dtype=torch.uint8, device="cpu", pin_memory=not self._on_cpu)
        return functools.partial(target.copy_, source, non_blocking=True)

    # --- what all share -----------------------------------------------------------------------------------------------

    def _case(self, batch: Batch) -> Case:
        kind = batch.collective or Kind.ALL_GATHER
        dtype = getattr(torch, self._dtype_name())
        return Case(kind, batch.nbytes, dtype, self._rank.rank, self._rank.world_size, self._rank.device)

    def _dtype_name(self) -> str:
        return "float32" if self._rank.device.type == "cpu" else self._options.dtype

    def times(self, launches: Mapping[K, Callable[[], object]]) -> dict[K, float]:
        """Median time of each, in microseconds, of the slowest rank."""
        hide_us = 0.0 if self._on_cpu else HIDE_LAUNCH_US
        jobs = {name: Job(run, hide_launch_us=hide_us) for name, run in launches.items()}
        measured = self._meter.rounds(jobs, warmup=self._options.warmup, repeats=self._options.repeats)
        return {name: rounds.median_us for name, rounds in measured.items()}

    def _row(self, batch: Batch, run: Prepared | None = None, **figures: object) -> IsolatedRow:
        m, n, k = sizes_of(batch.gemm)
        values: dict[str, object] = {
            "implementation": run.implementation if run else batch.means if batch.what == BESIDE else "",
            "variant": "" if run is None else " ".join(filter(None, (run.variant, "in place" if run.in_place else ""))),
            "means": "",
            "units": 0,
            "time_us": None,
            "alone_us": None,
            "gbps": None,
        }
        return IsolatedRow(
            what=batch.what,
            gemm=batch.gemm.name if batch.gemm else "",
            m=m,
            n=n,
            k=k,
            dtype=self._dtype_name(),
            collective=str(batch.collective or ""),
            bytes=batch.nbytes,
            device_units=self._units,
            **{**values, **figures},  # type: ignore[arg-type]
        )


def _with_threads(threads: int, fewer: int, run: GemmRun) -> None:
    torch.set_num_threads(threads - fewer)
    run.run()
    torch.set_num_threads(threads)


def _on_lane(
    lane: torch.cuda.Stream | None,
    operation: Callable[[], object],
    limited: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    """Run on another stream (None: on the current one), between what the current one has and will have."""
    if lane is None:
        with limited():
            operation()
        return
    caller = torch.cuda.current_stream()
    lane.wait_stream(caller)
    with torch.cuda.stream(lane), limited():
        operation()
    caller.wait_stream(lane)


def _keep(kept: list[Callable[[], float]], run: Callable[[], Callable[[], float]]) -> None:
    kept.append(run())

"""How ``sidelane c3`` measures pairs on one rank, and makes their rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sidelane.c3.partitions import DevicePartitions
from sidelane.c3.strategies import named
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.choice.candidate import SM
from sidelane.collectives.plan import AUTO
from sidelane.errors import UnavailableError
from sidelane.machine.inventory import machine_name
from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import ReadyCall, candidates_of
from sidelane_lab.baselines.reference import Case, rounded_bytes
from sidelane_lab.baselines.roster import OTHER_CALLS, Roster, make_roster
from sidelane_lab.cli.c3 import C3Options, Key, PairOptions
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.running import RESUMES, Sender
from sidelane_lab.pairs.isolated import Isolated
from sidelane_lab.pairs.pair import orders_of, pair_streams
from sidelane_lab.pairs.workload import LIBRARY, Bound, ComputeKind, Gemm, Workload, parse_workload
from sidelane_lab.studies.c3.comparison import NO_TIMES, Instruments, PairOutcome, run_workload
from sidelane_lab.studies.c3.rows import NOT_RUN, C3Row

if TYPE_CHECKING:
    from sidelane_lab.studies.power.meter import PairPower

NO_OWN_PARTS = dict.fromkeys(OTHER_CALLS, "only an all-to-all copies inside a GPU what this one does without")


def measure(rank: Rank, options: C3Options, sender: Sender) -> Iterator[C3Row]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)  # the ranks share the cores
    every = scaled_workloads(options, rank)
    workloads = [one for one in every if not is_done(one, options.strategies, options.done)]
    if not on_cpu:  # else they are divided as the GEMM is, and the table says what ran
        asked = dict.fromkeys(parse_workload(text).nbytes for text in options.workloads)
        sender.rounded(asked, functools.partial(rounded_bytes, world_size=rank.world_size))
    roster = make_roster(
        rank, wanted=options.implementations, timeout_s=options.step_s, with_auto=True, with_others=True
    )
    own_bytes = 0.0 if on_cpu else float(torch.cuda.mem_get_info(rank.device)[1])
    memory_bytes = None if on_cpu else min(theirs for (theirs,) in roster.meter.of_all_ranks([own_bytes]))
    pairs = []
    for workload in workloads:
        case = case_of(rank, workload)
        needed = too_large(workload, case, memory_bytes)
        if needed is None:
            pairs.append((workload, case))
        else:
            yield from rows_not_run(workload, needed, options.strategies)
    if pairs:
        roster.reserve_for([case for _, case in pairs], sender.note)
        bench = PairBench(rank, roster, options, sender)
        begun = sender.steps_within(roster.meter, pairs, options.budget_s, lambda pair: pair[0].name, RESUMES)
        for number, (workload, case) in enumerate(begun):
            yield from bench.rows(workload, case, options.seed + 1_000_000 * number)
        bench.close()
    roster.close()


class PairBench:
    """Measures pairs on this rank, one after another; every rank makes the same calls."""

    def __init__(self, rank: Rank, roster: Roster, options: C3Options, sender: Sender) -> None:
        self._rank, self._roster, self._options, self._sender = rank, roster, options, sender
        self._instruments = Instruments(roster.meter, options.warmup, options.repeats)
        self._streams = pair_streams(rank.device)
        self._partitions, self._no_partitions = DevicePartitions.on(rank.device)
        self._device_name = "" if rank.device.type == "cpu" else torch.cuda.get_device_name(rank.device)
        self._power: PairPower | None = None
        self._sensors = contextlib.ExitStack()
        if options.energy_s is not None:
            from sidelane_lab.studies.power.meter import PairPower, Recorder
            from sidelane_lab.studies.power.sensors import power_sensor

            sensor = power_sensor(rank.device.index)
            self._sensors.callback(sensor.close)
            self._power = PairPower(roster.meter, Recorder(sensor), options.energy_s)
            self._sensors.callback(self._power.close)

    def rows(self, workload: Workload, case: Case, seed: int) -> Iterator[C3Row]:
        """Measure a pair under every strategy."""
        options, power = self._options, self._power
        runs = list(_runs(self._roster, case, options))
        memory_bound = is_bound_by_memory(workload.gemm, options.known, self._device_name, self._rank.world_size)
        trace = None
        if options.timeline is not None:
            from sidelane_lab.studies.c3.pictures import write_trace

            writes = self._rank.rank == 0
            trace = functools.partial(write_trace, options.timeline, workload, self._roster.meter, writes)
        if power is not None:
            power.found.clear()
        outcome = run_workload(
            workload,
            runs,
            self._instruments,
            device=self._rank.device,
            streams=self._streams,
            partitions=self._partitions,
            no_partitions=self._no_partitions,
            memory_bound=memory_bound,
            strategies=[named(name) for name in options.strategies] or None,
            unavailable=self._roster.unavailable | ({} if workload.collective is Kind.ALL_TO_ALL else NO_OWN_PARTS),
            seed=seed,
            known=options.known,
            on_trace=trace,
            on_launch=None if power is None else power.measure,
        )
        bound = str(Bound.MEMORY if memory_bound else Bound.COMPUTE)
        rows = [dataclasses.replace(row, bound=bound) for row in outcome.rows]
        if power is not None:
            rows = [_with_power(row, power) for row in rows]
        if options.third:
            rows[0] = dataclasses.replace(rows[0], orders=self._orders(workload, outcome, runs, seed + 500_000))
        yield from rows
        for line in _explanations(workload.gemm, outcome, self._instruments.late):
            self._sender.note(line)

    def _orders(self, workload: Workload, outcome: PairOutcome, runs: Sequence[ReadyCall], seed: int) -> str:
        """Time the pair and a third kernel, by the library's call that is fastest alone; empty where none is right."""
        timed = [run for run in runs if outcome.alone_us[run.label] is not None and run.implementation in LIBRARY]
        if not timed:
            return ""
        run = min(timed, key=lambda one: outcome.alone_us[one.label] or 0.0)
        found = orders_of(workload, run, self._instruments, self._rank.device, itertools.count(seed))
        return ", ".join(f"{' > '.join(order)} {us:.6g}" for order, us in found.items())

    def close(self) -> None:
        """End what reads the counters."""
        self._sensors.close()


def _with_power(row: C3Row, power: PairPower) -> C3Row:
    watts, energy_mj = power.found.get(row.strategy, (None, None))
    return row if watts is None else dataclasses.replace(row, watts=watts, energy_mj=energy_mj)


def scaled_workloads(options: PairOptions, rank: Rank) -> list[Workload]:
    """Return the pairs as this rank runs them, each with every collective."""
    return [
        scaled_workload(text, kind, options.dtype, rank)
        for text, kind in itertools.product(options.workloads, options.collectives)
    ]


def scaled_workload(text: str, kind: Kind, dtype: str, rank: Rank) -> Workload:
    """Return a pair as this rank runs it: on CPUs smaller, and in float32."""
    workload = parse_workload(text, kind, dtype)
    if rank.device.type == "cpu":
        workload = workload.scaled_for_cpu()
        workload = dataclasses.replace(workload, gemm=dataclasses.replace(workload.gemm, dtype="float32"))
    return dataclasses.replace(workload, nbytes=rounded_bytes(workload.nbytes, rank.world_size))


def is_bound_by_memory(gemm: Gemm, known: Isolated | None, device_name: str, devices: int) -> bool:
    """Tell if a GEMM is memory-bound: as measured, by the device's description, or by its name in the paper's table."""
    predicted = None
    if device_name:
        from sidelane_lab.machines.load import machine_names
        from sidelane_lab.machines.load import named as machine_named
        from sidelane_lab.model.gemm import bound_of

        machine = machine_name(device_name, devices)
        predicted = functools.partial(bound_of, machine_named(machine)) if machine in machine_names() else None
    if known is not None:
        return dataclasses.replace(known, predicted=predicted).bound(gemm)[0] is Bound.MEMORY
    if predicted is not None:
        return predicted(gemm) is Bound.MEMORY
    return gemm.tag.startswith("mb") or gemm.operation is not ComputeKind.PRODUCT


def case_of(rank: Rank, workload: Workload) -> Case:
    """The collective of a pair."""
    dtype = getattr(torch, workload.gemm.dtype)
    return Case.on(rank, workload.collective, workload.nbytes, dtype)


def _runs(roster: Roster, case: Case, options: C3Options) -> Iterator[ReadyCall]:
    """Every configuration that takes part: in and out of place where both exist, launched eagerly.

    At the sizes of this study a graph changes nothing: what the host takes is hidden for every one of them.
    """
    for implementation in roster.implementations.values():
        only = () if implementation.name == SM and AUTO in options.variants else options.variants
        for candidate in candidates_of(implementation, case.kind, only=only, launches=("eager",)):
            try:
                prepared = ReadyCall(candidate, case, implementation)
            except UnavailableError:  # on all ranks: windows for which there is no room next to everything else
                continue
            yield prepared


def _explanations(gemm: Gemm, outcome: PairOutcome, late: Mapping[str, int]) -> Iterator[str]:
    """Say what the rows leave out: every isolated time, the choice, and samples that are in doubt."""
    failures = {label: outcome.failures[label] for label in outcome.alone_us if label in outcome.failures}
    times = ", ".join(
        f"{label} {'failed' if label in failures else 'slower in a look' if time_us is None else f'{time_us:.0f} us'}"
        for label, time_us in outcome.alone_us.items()
    )
    yield f"  alone: GEMM {outcome.rows[0].gemm_us:.0f} us, {times}"
    for label, failure in failures.items():
        yield f"  {label}: {'wrong' if failure.wrong else 'could not run'}: {failure.text}"
    if outcome.choice is not None:
        yield f"  auto takes {outcome.choice.reason}"
    if late:
        yield f"  the host was late in some samples: {', '.join(f'{name} ({n})' for name, n in late.items())}"
    if gemm.divisor > 1:
        what = f"bytes and every dimension of {gemm.tag or 'the GEMM'} divided by {gemm.divisor}"
        yield f"  scaled for CPUs: {what}"


def too_large(workload: Workload, case: Case, memory_bytes: float | None) -> str | None:
    """Why a pair does not fit into a device's memory, whoever moves the bytes; None: it may. Alike on all ranks.

    Every implementation has buffers of its own, so that a pair that passes may still have no room.
    """
    gemm = workload.gemm
    needed = gemm.nbytes + case.output_bytes + case.input_bytes
    if memory_bytes is None or needed <= memory_bytes:
        return None
    return f"its buffers take {needed / 1e9:.0f} GB at least, and the device has {memory_bytes / 1e9:.0f}"


def rows_not_run(workload: Workload, reason: str, strategies: Sequence[str] = ()) -> list[C3Row]:
    """Rows of a pair without times, one for each strategy (all, if none is named): nothing is left out silently."""
    nothing: dict[str, Any] = {"c3_class": "", "chosen": "", "gemm_us": None, "best_comm_us": None, **NO_TIMES}
    return [
        C3Row(**workload.columns, strategy=name, **nothing, note=f"{NOT_RUN}{reason}")
        for name in strategies or [one.code for one in all_strategies()]
    ]


def is_done(workload: Workload, strategies: Collection[str], done: Collection[Key]) -> bool:
    """Tell that every strategy that was asked for has a row of the pair."""
    return all(
        (*workload.columns.values(), name) in done for name in strategies or [one.code for one in all_strategies()]
    )

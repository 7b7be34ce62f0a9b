"""A program that calls ``torch.distributed``, on NCCL's group (CPUs: Gloo's) and on Sidelane's, line by line the same.

Device times are of calls that the host has queued ahead; host times of calls behind a device that spins, so that none
waits for the device or a peer. All ways of one operation and size take turns, round by round. Results are compared
before the rounds and after them, of each way to call.

First uses come before all else, since they are first only once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane import fsdp
from sidelane.integrations.ledger import SIDELANE
from sidelane.memory.allocator import MemoryUse
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.candidate import captured, check_call
from sidelane_lab.baselines.reference import Case, rounded_bytes
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.process_group import OPERATIONS, GroupOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import MOST_HIDDEN_US, SPIN_CYCLES_PER_US, Job, Meter, Problem, Rounds, outcome
from sidelane_lab.harness.options import require_all
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.studies.fsdp.cases import parse_case
from sidelane_lab.studies.fsdp.step import Stepper
from sidelane_lab.studies.process_group.rows import (
    ASYNC,
    EAGER,
    FIRST,
    FIRST_CALLS,
    FIRST_STEP,
    GRAPH,
    ORDINARY,
    GroupRow,
    group_tables,
)
from sidelane_lab.studies.process_group.ways import (
    KINDS,
    GroupTensors,
    GroupWay,
    StudyGroups,
    library_of,
    plain_call,
    wanted,
)

DTYPE = torch.bfloat16
STEP, STEP_LAYERS = "8b:1x1024", 2
"""The model of the first step: few layers, since what is first comes once for each size."""

HOST_BATCHES, CPU_CALLS = 7, 4
CALL_US = 80.0
"""Microseconds that a call may take the host at most, for what has to be hidden."""


def _check(options: GroupOptions, place: LaunchTarget) -> None:
    """Refuse an implementation that is not known on this kind of device."""
    known = list(dict.fromkeys(name for name, _ in wanted((), place.device_type)))
    require_all("pg", "implementations", options.implementations, known)


def _measure(rank: Rank, options: GroupOptions, sender: Sender) -> Iterator[GroupRow]:
    """Make the rows. Collective."""
    rounded = functools.partial(rounded_bytes, world_size=rank.world_size)
    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    operations = [name for name in OPERATIONS if name in options.operations]
    cases = [(name, Case.on(rank, KINDS[name], nbytes, DTYPE)) for name in operations for nbytes in sizes]
    sender.steps = len(cases) + options.first
    meter, groups = make_meter(rank, options.step_s), StudyGroups(rank)
    groups.reserve(max(case.output_bytes for _, case in cases), max(case.input_bytes for _, case in cases))
    study = _Study(rank, meter, groups, options)
    if options.first:
        sender.step("first use")
        yield from first_uses(rank, meter, groups, [case for _, case in cases], options.seed)
    for name, case in cases:
        sender.step(f"{name} of {format_bytes(case.nbytes)}")
        with meter.on_stream():
            yield from study.rows(name, case)
    study.close()


@dataclasses.dataclass(slots=True)
class _Program:
    """A way to call, with its tensors.

    Attributes:
        once: makes one call, or what stands for it in a graph.
        several: makes the calls of a sample.
        problem: what is wrong with it.
        made_by: what made its calls, and Sidelane's variant.
    """

    way: GroupWay
    launch: str
    buffers: GroupTensors
    once: Callable[[], object]
    several: Callable[[], object]
    problem: Problem | None = None
    made_by: tuple[str, str] = ("", "")
    host_us: float | None = None


class _Study:
    """The part of one rank, which times programs together with the other ranks."""

    def __init__(self, rank: Rank, meter: Meter, groups: StudyGroups, options: GroupOptions) -> None:
        self._rank, self._meter, self._groups, self._options = rank, meter, groups, options
        self._seeds = itertools.count(options.seed + 1)
        self._on_cpu = rank.device.type == "cpu"
        self._refused: dict[tuple[str, str], str] = {}

    def rows(self, operation: str, case: Case) -> Iterator[GroupRow]:
        """Check, time and check again. Collective."""
        calls = CPU_CALLS if self._on_cpu else calls_of(case.nbytes)
        programs: list[_Program] = []
        launches = (EAGER, ASYNC) if self._on_cpu else (EAGER, ASYNC, GRAPH)
        for names in wanted(self._options.implementations, self._rank.device.type):
            way = self._way(names)
            if way is None:
                for launch in launches:
                    yield _row(operation, case.nbytes, *names, launch, note=self._refused[names])
                continue
            buffers = way.buffers(case)
            programs += [self._program(operation, case, way, launch, buffers, calls) for launch in launches]
        sound = [one for one in programs if one.problem is None]
        rounds = self._timed(sound, calls)
        for one in sound:
            one.host_us = None if self._on_cpu or one.launch == GRAPH else self._host_us(one, calls)
            one.problem = self._check(operation, case, one)
        for one in programs:
            columns = outcome(rounds.get(f"{one.way.name}, {one.launch}"), one.problem)
            columns |= {"host_us": one.host_us if one.problem is None else None}
            columns |= {"made_by": one.made_by[0], "variant": one.made_by[1]}
            yield _row(operation, case.nbytes, one.way.implementation, one.way.tensors, one.launch, **columns)

    def close(self) -> None:
        """Let go of the groups. Collective."""
        self._meter.finish("process groups")
        self._groups.close()

    def _way(self, names: tuple[str, str]) -> GroupWay | None:
        """None where there is none, as where there is no room for a pool. Collective."""
        made: list[GroupWay] = []
        if names not in self._refused:
            refused = self._meter.attempt(lambda: made.append(self._groups.way(*names)))
            if refused is not None:
                self._refused[names] = refused
                made.clear()
        return made[0] if made else None

    def _program(
        self, operation: str, case: Case, way: GroupWay, launch: str, buffers: GroupTensors, calls: int
    ) -> _Program:
        once = plain_call(operation, way.group, buffers, launch)
        made = _Program(way, launch, buffers, once, lambda: [once() for _ in range(calls)])
        if launch == GRAPH:
            graphs: list[torch.cuda.CUDAGraph] = []
            refused = self._meter.attempt(lambda: graphs.extend(captured(once, count) for count in (1, calls)))
            if refused is not None:
                made.problem = Problem(refused)
                return made
            made.once, made.several, made.made_by = graphs[0].replay, graphs[1].replay, way.made_by(operation)
        made.problem = self._check(operation, case, made)
        return made

    def _check(self, operation: str, case: Case, one: _Program) -> Problem | None:
        """Run once on a fresh input and compare."""

        def call() -> None:
            one.once()
            if one.launch != GRAPH:  # a replay is in no report
                one.made_by = one.way.made_by(operation)

        label = f"{operation} of {one.way.name}"
        return check_call(self._meter, label, case, lambda: one.buffers, call, next(self._seeds))

    def _timed(self, programs: list[_Program], calls: int) -> dict[str, Rounds]:
        hidden_us = min(CALL_US * calls, MOST_HIDDEN_US)
        jobs = {
            f"{one.way.name}, {one.launch}": Job(one.several, calls=calls, hide_launch_us=hidden_us) for one in programs
        }
        options = self._options
        return self._meter.rounds(jobs, warmup=options.warmup, repeats=options.repeats) if jobs else {}

    def _host_us(self, one: _Program, calls: int) -> float:
        times = []
        for _ in range(HOST_BATCHES):
            self._meter.finish(one.way.name)
            self._meter.agree(None)
            torch.cuda._sleep(int(2 * CALL_US * calls * SPIN_CYCLES_PER_US))
            began = time.perf_counter_ns()
            one.several()
            times.append((time.perf_counter_ns() - began) / calls / 1e3)
        self._meter.finish(one.way.name)
        return max(map(statistics.median, self._meter.of_all_ranks(times)))


def _row(
    operation: str, nbytes: int | None, implementation: str, tensors: str, launch: str, **columns: Any
) -> GroupRow:
    empty = dict.fromkeys(("time_us", "p10_us", "p90_us", "host_us", "held_mb", "correct"))
    columns = {**empty, "made_by": "", "variant": "", **columns}
    return GroupRow(operation, nbytes, str(DTYPE).removeprefix("torch."), implementation, tensors, launch, **columns)


def first_uses(rank: Rank, meter: Meter, groups: StudyGroups, cases: Sequence[Case], seed: int) -> list[GroupRow]:
    """Make rows of first uses, the library's first. Collective; before anything else of the study.

    The library is warm: a group of its own, and a step of the same model, come ahead and are not counted.
    """
    library = library_of(rank.device.type)
    rows = []
    with meter.on_stream():
        _first_calls(rank, meter, groups, library, cases)
        for name in (library, SIDELANE):
            rows.append(_first_calls(rank, meter, groups, name, cases))
        _first_step(rank, meter, library, seed)
        for name in (library, SIDELANE):
            rows.append(_first_step(rank, meter, name, seed))
    return rows


def _first_calls(rank: Rank, meter: Meter, groups: StudyGroups, name: str, cases: Sequence[Case]) -> GroupRow:
    made: list[dist.ProcessGroup] = []
    tensors = [GroupTensors.of(case.output_bytes, case.input_bytes, case.device).cut_for(case) for case in cases]

    def use() -> None:
        made.append(groups.make(name))
        for case, buffers in zip(cases, tensors, strict=True):
            operation = next(one for one, kind in KINDS.items() if kind is case.kind)
            plain_call(operation, made[0], buffers, EAGER)()

    took_us = _slowest(rank, meter, f"first calls of {name}", use)
    held = groups.communicator_of(made[0]).memory() if name == SIDELANE else None
    dist.destroy_process_group(made[0])
    return _row(FIRST_CALLS, None, name, ORDINARY, FIRST, made_by=name, time_us=took_us, held_mb=_mb(held))


def _first_step(rank: Rank, meter: Meter, name: str, seed: int) -> GroupRow:
    case = parse_case(STEP, STEP_LAYERS)
    stepper = Stepper(
        case.small() if rank.device.type == "cpu" else case, rank, meter, torch.bfloat16, optimizer=False, seed=seed
    )
    enabled: list[fsdp.EnabledFsdp] = []

    def use() -> None:
        if name == SIDELANE:
            enabled.append(fsdp.enable(stepper.model))
        stepper.step()

    took_us = _slowest(rank, meter, f"first step of {name}", use)
    held = enabled[0].memory() if enabled else None
    stepper.forget()
    for one in enabled:
        one.disable()
    return _row(FIRST_STEP, None, name, ORDINARY, FIRST, made_by=name, time_us=took_us, held_mb=_mb(held))


def _slowest(rank: Rank, meter: Meter, what: str, use: Callable[[], None]) -> float:
    """Return the microseconds of the slowest rank, from idle devices to idle devices."""
    meter.finish(what)
    meter.agree(None)
    began = time.perf_counter()
    use()
    meter.finish(what)
    return max(one for (one,) in meter.of_all_ranks([(time.perf_counter() - began) * 1e6]))


def _mb(held: MemoryUse | None) -> float | None:
    return None if held is None else (held.reserved + held.own) / 1e6


def calls_of(nbytes: int) -> int:
    """Return the calls of a sample: short ones are many, and the driver's queue holds them all.

    >>> calls_of(64 << 10), calls_of(16 << 20), calls_of(256 << 20)
    (20, 10, 4)
    """
    return 20 if nbytes <= 1 << 20 else 10 if nbytes <= 64 << 20 else 4


STUDY = Study(
    name="process_group",
    title="Calls of torch.distributed, by the process group",
    legend=(
        "The same program on the group of NCCL (Gloo on CPUs) and on Sidelane's. "
        "pooled: made in a sidelane.pool. Times of GPUs are the device's, medians over rounds of"
        " the slowest rank; the fastest is bold. host: until a repeated call returns, behind a device that spins. "
        "async: waited for at once; graph: calls of one CUDA graph. First use: from making the group to the end of"
        " its first calls, and from a sharded model to the end of its first step, with an NCCL (Gloo) that is "
        "warm."
    ),
    row=GroupRow,
    tables=group_tables,
    measure=_measure,
    check=_check,
    progress="process groups",
)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.case_way import CaseWay
from sidelane_lab.harness.options import StudyOptions, count, names, option, require_all, size_list, study_command
from sidelane_lab.harness.report import Cell, spread, tables_by
from sidelane_lab.harness.study import OF_LIBRARY, FlatRow, Study
from sidelane_lab.harness.table import MISSING, Table, number
from sidelane_lab.harness.ways import Job, Rounds, outcome

if TYPE_CHECKING:
    import torch.distributed as dist

    from sidelane import fsdp
    from sidelane.memory.allocator import MemoryUse
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.harness.launch import LaunchTarget, Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender
    from sidelane_lab.studies.torch_groups import GroupWay, StudyGroups

KINDS = {
    "all_reduce": Kind.ALL_REDUCE,
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "all_to_all_single": Kind.ALL_TO_ALL,
}
"""Calls of ``torch.distributed``, each with its collective."""

OPERATIONS = tuple(KINDS)
OPERATION_OF = {kind: name for name, kind in KINDS.items()}


FIRST_CALLS, FIRST_STEP = "first_calls", "first_fsdp_step"
EAGER, ASYNC, GRAPH, FIRST = "eager", "async", "graph", "first"
FUTURE, FUNCTIONAL, LIST, COALESCED = "future", "functional", "list", "coalesced"
FORMS = {
    FUTURE: OPERATIONS,
    FUNCTIONAL: OPERATIONS,
    LIST: ("all_gather_into_tensor", "reduce_scatter_tensor"),
    COALESCED: ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
}
"""Further ways to call, and the operations that have them."""

LAUNCHES = (EAGER, ASYNC, GRAPH, *FORMS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions(StudyOptions):
    """Measure calls of torch.distributed with NCCL's group (Gloo's) and Sidelane's.

    all_reduce, all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single: eager, asynchronous and in a graph,
    on ordinary tensors, on such that Sidelane learns, and on pooled ones.
    """

    study = "process_group"
    examples = (
        ("sidelane pg --json process-group.json", "four operations, four sizes, and what the first use costs"),
        ("sidelane pg --device cpu --ranks 2", "the same between CPU processes, and Gloo"),
        ("sidelane pg --no-first --launches async,future,functional,list,coalesced", "the host time of torch's forms"),
    )

    operations: tuple[str, ...] = names(
        "--operations", OPERATIONS, "Measure only these.", allowed=OPERATIONS, some=True, shown="all four"
    )
    sizes: tuple[int, ...] = size_list(
        "--bytes",
        "Gathered bytes of an all-gather, the buffer of the others. May be repeated.",
        gpus=("64K", "1M", "16M", "256M"),
        cpus=("16K", "1M"),
    )
    implementations: tuple[str, ...] = names(
        "--implementations", (), "Measure only these: nccl (gloo), sidelane.", shown="both"
    )
    launches: tuple[str, ...] = names(
        "--launches", (EAGER, ASYNC, GRAPH), "Measure calls that are made in these ways.", allowed=LAUNCHES
    )
    first: bool = option("--first/--no-first", True, "What the first use costs, of FSDP2 too.")
    warmup: int = count("--warmup", 2, "Rounds before the measured ones.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")


pg = study_command("pg", GroupOptions)

ORDINARY, POOLED = "ordinary", "pooled"
LEARNED = "learned"
"""Ordinary tensors whose addresses Sidelane learnt, in files of before 29 November 2026."""

DTYPE = "bfloat16"
STEP, STEP_LAYERS = "8b:1x1024", 2
"""The model of the first step: few layers, since what is first comes once for each size."""

HOST_BATCHES, CPU_CALLS = 7, 4
CALL_US = 80.0
"""Microseconds that a call may take the host at most, for what has to be hidden."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRow(FlatRow):
    """A call of ``torch.distributed``, or what the first use costs, by the process group.

    Attributes:
        operation: name of the call in ``torch.distributed``. ``first_calls``: from making the group to the end of one
            call of each operation at each size; ``first_fsdp_step``: from a sharded model to the end of its first step,
            for Sidelane with ``fsdp.enable``.
        bytes: gathered bytes of an all-gather, the whole buffer of the others; null of first uses.
        implementation: process group: ``sidelane``, or the library's (``nccl``, on CPUs ``gloo``).
        tensors: ``ordinary``, or ``pooled``: made in a
            ``sidelane.pool`` of the group's communicator.
        launch: ``eager``; ``async``: with ``async_op=True``, waited for at once; ``graph``: calls of one CUDA graph;
            ``future``: asynchronous, and its future is waited for; ``functional``: the functional collective and
            ``wait_tensor``; ``list``: parts of one tensor as a list (``all_gather``, ``reduce_scatter``);
            ``coalesced``: in a coalescing manager, an all_reduce in two halves; ``first``.
        time_us: time of a call, median over the rounds of the slowest rank. On GPUs it is the device's alone, and on
            CPUs it lasts until the call is done. For first uses it is the time of the slowest rank, from begin to end.
        host_us: on GPUs, until a repeated call has returned (asynchronous ones: and was waited for), median of the
            slowest rank; null in graphs, on CPUs and of first uses.
        made_by: maker of the call, as ``sidelane.report()`` says: ``sidelane``, or the library of its other backend.
        variant: variant that Sidelane took.
        held_mb: symmetric memory that Sidelane holds in one call, for first uses.
        correct: True if results are right, before the rounds and after them.
        note: reason why there is no time, or a remark.
    """

    allowed = (
        ("operation", (*OPERATIONS, FIRST_CALLS, FIRST_STEP)),
        ("implementation", ("nccl", "gloo", "sidelane")),
        ("tensors", (ORDINARY, LEARNED, POOLED)),
        ("launch", (*LAUNCHES, FIRST)),
    )
    figures = ("time_us",)

    operation: str
    bytes: int | None
    dtype: str
    implementation: str
    tensors: str
    launch: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    host_us: float | None
    made_by: str
    variant: str
    held_mb: float | None
    correct: bool | None
    note: str = ""


def _check(options: GroupOptions, place: LaunchTarget) -> None:
    """Refuse an implementation that is not known on this kind of device."""
    known = list(dict.fromkeys(name for name, _ in wanted((), place.device_type)))
    require_all("pg", "implementations", options.implementations, known)


def _measure(rank: Rank, options: GroupOptions, sender: Sender) -> Iterator[GroupRow]:
    """Make the rows. Collective."""
    from sidelane_lab.baselines.reference import cases_of
    from sidelane_lab.baselines.roster import make_meter
    from sidelane_lab.studies.torch_groups import StudyGroups

    cases = cases_of(rank, options, sender, [kind for name, kind in KINDS.items() if name in options.operations])
    sender.steps += options.first
    meter, groups = make_meter(rank, options.step_s), StudyGroups(rank)
    groups.reserve(max(case.output_bytes for case in cases), max(case.input_bytes for case in cases))
    if options.first:
        sender.step("first use")
        yield from first_uses(rank, meter, groups, cases, options.seed)
    seeds = itertools.count(options.seed + 1)
    for case in cases:
        sender.step(f"{OPERATION_OF[case.kind]} of {format_bytes(case.nbytes)}")
        yield from rows_of(meter, groups, options, case, seeds)
    meter.finish("process groups")
    groups.close()


def rows_of(
    meter: Meter, groups: StudyGroups, options: GroupOptions, case: Case, seeds: Iterator[int]
) -> Iterator[GroupRow]:
    """Measure every group, memory and launch of one call. Collective."""
    on_cpu, operation = case.device.type == "cpu", OPERATION_OF[case.kind]

    def make(implementation: str, tensors: str, launch: str) -> GroupProgram:
        return GroupProgram(operation, case, groups.way(implementation, pooled=tensors == POOLED), launch)

    def timed(ready: dict[tuple[str, ...], GroupProgram]) -> Mapping[tuple[str, ...], Rounds]:
        rounds = meter.in_turns({key: one.job() for key, one in ready.items()}, options)
        for one in ready.values():
            one.host_us = None if on_cpu or one.launch == GRAPH else _host_us(meter, one)
        return rounds

    makers: dict[tuple[str, ...], Callable[[], GroupProgram]] = {
        (*names, launch): functools.partial(make, *names, launch)
        for names in wanted(options.implementations, case.device.type)
        for launch in options.launches
        if not (on_cpu and launch == GRAPH) and operation in FORMS.get(launch, OPERATIONS)
    }
    for found in meter.compare(makers, seeds, timed):
        columns, one = outcome(found.rounds, found.problem), found.way
        if one is not None:
            columns |= {"made_by": one.made_by[0], "variant": one.made_by[1]}
            columns |= {"host_us": one.host_us if found.problem is None else None}
        implementation, tensors, launch = found.key
        yield _row(operation, case.nbytes, implementation, tensors, launch, **columns)


class GroupProgram(CaseWay):
    """A way to call, with its tensors.

    Args:
        operation: name of the call in ``torch.distributed``.
        case: what it does.
        way: group and memory.
        launch: see ``GroupRow``.

    Attributes:
        made_by: what made its calls, and Sidelane's variant.
        host_us: until a call has returned; None where the host takes no part.
    """

    def __init__(self, operation: str, case: Case, way: GroupWay, launch: str) -> None:
        from sidelane_lab.studies.torch_groups import plain_call

        buffers = way.buffers(case)
        super().__init__(case, buffers, f"{operation} of {way.name}")
        self.launch, self.as_graph, self._output = launch, launch == GRAPH, buffers.output
        self.made_by = ("", "")
        self.host_us: float | None = None
        self.calls = CPU_CALLS if case.device.type == "cpu" else calls_of(case.nbytes)
        self._operation, self._way, self._call = (
            operation,
            way,
            plain_call(operation, way.group, buffers, launch),
        )

    def run(self) -> None:
        if self.graphs:
            self.graphs[0].replay()  # which is in no report
            return
        made = self._call()
        if self.launch == FUNCTIONAL:
            self._output.copy_(made)
        self.made_by = self._way.made_by(self._operation)

    def several(self) -> None:
        """Make the calls of a sample."""
        if self.graphs:
            self.graphs[1].replay()
            return
        for _ in range(self.calls):
            self._call()

    def capture(self) -> None:
        from sidelane_lab.baselines.candidate import captured

        graphs = tuple(captured(self._call, calls) for calls in (1, self.calls))
        self.made_by = self._way.made_by(self._operation)
        self.graphs = graphs

    def job(self) -> Job:
        """Return the job of a sample."""
        from sidelane_lab.harness.measure import MOST_HIDDEN_US

        return Job(self.several, calls=self.calls, hide_launch_us=min(CALL_US * self.calls, MOST_HIDDEN_US))


def _host_us(meter: Meter, one: GroupProgram) -> float:
    import torch

    from sidelane_lab.harness.measure import SPIN_CYCLES_PER_US

    times = []
    for _ in range(HOST_BATCHES):
        meter.finish(one.label)
        meter.agree(None)
        torch.cuda._sleep(int(2 * CALL_US * one.calls * SPIN_CYCLES_PER_US))
        began = time.perf_counter_ns()
        one.several()
        times.append((time.perf_counter_ns() - began) / one.calls / 1e3)
    meter.finish(one.label)
    return max(map(statistics.median, meter.of_all_ranks(times)))


def _row(
    operation: str, nbytes: int | None, implementation: str, tensors: str, launch: str, **columns: Any
) -> GroupRow:
    empty = dict.fromkeys(("time_us", "p10_us", "p90_us", "host_us", "held_mb", "correct"))
    columns = {**empty, "made_by": "", "variant": "", **columns}
    return GroupRow(operation, nbytes, DTYPE, implementation, tensors, launch, **columns)


def first_uses(rank: Rank, meter: Meter, groups: StudyGroups, cases: Sequence[Case], seed: int) -> list[GroupRow]:
    """Make rows of first uses, the library's first. Collective; before anything else of the study.

    The library is warm: a group of its own, and a step of the same model, come ahead and are not counted.
    """
    from sidelane.integrations.ledger import SIDELANE
    from sidelane_lab.studies.torch_groups import library_of

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
    import torch.distributed as dist

    from sidelane.integrations.ledger import SIDELANE
    from sidelane_lab.studies.torch_groups import GroupTensors, plain_call

    made: list[dist.ProcessGroup] = []
    tensors = [GroupTensors.of(case.output_bytes, case.input_bytes, case.device).cut_for(case) for case in cases]

    def use() -> None:
        made.append(groups.make(name))
        for case, buffers in zip(cases, tensors, strict=True):
            plain_call(OPERATION_OF[case.kind], made[0], buffers)()

    took_us = _slowest(rank, meter, f"first calls of {name}", use)
    held = groups.communicator_of(made[0]).memory() if name == SIDELANE else None
    dist.destroy_process_group(made[0])
    return _row(FIRST_CALLS, None, name, ORDINARY, FIRST, made_by=name, time_us=took_us, held_mb=_mb(held))


def _first_step(rank: Rank, meter: Meter, name: str, seed: int) -> GroupRow:
    import torch

    from sidelane import fsdp
    from sidelane.integrations.ledger import SIDELANE
    from sidelane_lab.studies.fsdp.cases import parse_case
    from sidelane_lab.studies.fsdp.step import Stepper

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


def wanted(names: tuple[str, ...], device_type: str) -> list[tuple[str, str]]:
    """Implementations and memory of a study, the library first."""
    library = "gloo" if device_type == "cpu" else "nccl"
    every = [(library, ORDINARY), *(("sidelane", tensors) for tensors in (ORDINARY, POOLED))]
    return [(name, tensors) for name, tensors in every if not names or name in names]


def calls_of(nbytes: int) -> int:
    """Return the calls of a sample: short ones are many, and the driver's queue holds them all.

    >>> calls_of(64 << 10), calls_of(16 << 20), calls_of(256 << 20)
    (20, 10, 4)
    """
    return 20 if nbytes <= 1 << 20 else 10 if nbytes <= 64 << 20 else 4


def group_tables(rows: Sequence[GroupRow]) -> list[Table]:
    """Make one table an operation, the fastest of each size and launch set off; and one of first uses."""
    times = {_alike(row): row.time_us for row in rows if row.implementation in OF_LIBRARY}

    def library(row: GroupRow) -> float | None:
        """Return the time of the library's group, in rows of Sidelane's that have one, too."""
        return None if row.implementation in OF_LIBRARY or row.time_us is None else times.get(_alike(row))

    def over(row: GroupRow, _: object) -> str:
        theirs = library(row)
        return f"{theirs / row.time_us:.2f}" if theirs and row.time_us else ""

    def more(row: GroupRow, _: object) -> str:
        theirs = library(row)
        return "" if theirs is None or row.time_us is None else f"{(row.time_us - theirs) / 1e6:+.2f}"

    calls: Mapping[str, Cell] = {
        "bytes": "bytes",
        "<launch": "launch",
        "<group": "implementation",
        "<tensors": "tensors",
        "<variant": lambda row, _: row.variant or ("" if row.made_by in ("", row.implementation) else row.made_by),
        "time\nus": "time_us",
        "p10-p90\nus": spread,
        "host\nus": lambda row, _: "" if row.host_us is None else number(row.host_us),
        "library\nover it": over,
        "<correct": "correct",
    }
    first: Mapping[str, Cell] = {
        "<first use": "operation",
        "<group": "implementation",
        "s": lambda row, _: MISSING if row.time_us is None else f"{row.time_us / 1e6:.2f}",
        "more than\nthe library": more,
        "memory\nMB": lambda row, _: "" if row.held_mb is None else f"{row.held_mb:.0f}",
    }
    of_first = [row for row in rows if row.launch == FIRST]
    return [
        *tables_by(
            [row for row in rows if row.launch != FIRST],
            lambda row: row.operation,
            lambda row: row.operation,
            calls,
            keys=4,
            groups=_alike,
            least=lambda row: row.time_us,
        ),
        *tables_by(
            of_first,
            lambda row: FIRST,
            lambda row: "First use, seconds from begin to end",
            first,
            keys=2,
            groups=lambda row: row.operation,
        ),
    ]


def _alike(row: GroupRow) -> tuple[str, int | None, str]:
    return row.operation, row.bytes, row.launch


STUDY = Study(
    name="process_group",
    title="Calls of torch.distributed, by the process group",
    legend=(
        "The same program on the group of NCCL (Gloo on CPUs) and on Sidelane's. "
        "pooled: made in a sidelane.pool. Times of GPUs are the device's, medians over rounds of"
        " the slowest rank; the fastest is bold. host: until a repeated call returns, behind a device that spins. "
        "async: waited for at once; graph: calls of one CUDA graph; future, functional, list, coalesced: torch's other"
        " forms. First use: from making the group to the end of"
        " its first calls, and from a sharded model to the end of its first step, with an NCCL (Gloo) that is "
        "warm."
    ),
    row=GroupRow,
    tables=group_tables,
    measure=_measure,
    check=_check,
    progress="process groups",
)

"""The host time of a call: eager calls that repeat, and the triggers of prelaunched ones.

    device   spins ...............................| 40 collectives
    host     | call | call | call | ... 40 of them |

A call of Sidelane's returns when everything is queued, as torch's do. Each batch of calls is queued behind a spin, so
that no call waits for the device or for a peer: what is left is the host's own time, the driver's included. A call is
made with nothing of the study around it, and again and again with the same tensors, as in the steps of a training.

Triggers are timed one by one, less what the clock itself takes: each must be armed before, which is not counted.

On CPUs a call blocks until the collective is done, so that none has a host time of its own. ``trigger_from_host`` only
tells threads to go, and is timed; everything else is run and checked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.candidate import (
    Binds,
    Entrant,
    Implementation,
    Tensors,
    candidates_of,
    check_call,
    nothing_to_wait_for,
    views,
)
from sidelane_lab.baselines.reference import Case, rounded_bytes
from sidelane_lab.baselines.roster import Own, OwnDma, make_roster
from sidelane_lab.cli.collectives import HostOptions
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import SPIN_CYCLES_PER_US, Meter, Problem, Rounds, outcome
from sidelane_lab.harness.report import Cell, spread, tables_by
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import IMPLEMENTATIONS, FlatRow, Study
from sidelane_lab.harness.table import Table

BLOCKS = "on CPUs the call returns when the collective is done: it has no host time of its own"
MOST_SPIN_US = 50_000.0
TRIGGERS_A_BATCH = 4
"""Triggers are timed singly, and vary: there are this many for each batch of calls."""

HOST_OPERATIONS = ("all_gather", "trigger", "trigger_from_host")


@dataclasses.dataclass(frozen=True, slots=True)
class HostRow(FlatRow):
    """The host time of a call, from its begin until it returns, while the device is busy with something else.

    Attributes:
        operation: ``all_gather``, or what fires a prelaunched one: ``trigger``, ``trigger_from_host``.
        bytes: gathered size.
        symmetric: the tensors lie in symmetric memory (of NCCL: in its symmetric windows).
        driver_calls: number of calls to the driver in one call of Sidelane; null for others.
        host_us: median over the batches of the slowest rank.
        best_us: time of the fastest batch of any rank.
        correct: True if outputs agreed with a reference in this run; None when it could not run.
        note: reason why there is no time, or a remark.
    """

    allowed = (("operation", HOST_OPERATIONS), ("implementation", IMPLEMENTATIONS))
    figures = ("host_us",)

    operation: str
    bytes: int
    implementation: str
    variant: str
    symmetric: bool
    driver_calls: int | None
    host_us: float | None
    p10_us: float | None
    p90_us: float | None
    best_us: float | None
    correct: bool | None
    note: str = ""


def _measure(rank: Rank, options: HostOptions, sender: Sender) -> Iterator[HostRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        sender.note(f"{BLOCKS}; only trigger_from_host is timed")
    # What blocks anyway has nothing to be compared with.
    wanted = options.implementations or (("dma", "auto") if on_cpu else ())
    roster = make_roster(rank, wanted=wanted, timeout_s=options.step_s)
    rounded = functools.partial(rounded_bytes, world_size=rank.world_size)
    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    sender.steps = len(sizes)
    cases = [Case.on(rank, Kind.ALL_GATHER, size) for size in sizes]
    roster.reserve_for(cases, sender.note)
    study = _Study(roster.meter, rank, options)
    for case in cases:
        sender.step(f"host time of an all-gather of {format_bytes(case.nbytes)}")
        with roster.meter.on_stream():
            for way in ways_of(roster.implementations.values(), options.variants, case):
                yield study.row(case, way)
    roster.close()


class _Study:
    """The part of one rank, which times calls together with the other ranks."""

    def __init__(self, meter: Meter, rank: Rank, options: HostOptions) -> None:
        self._meter, self._rank, self._options = meter, rank, options
        self._seeds = itertools.count(options.seed + 1)
        self._on_cpu = rank.device.type == "cpu"
        self._clock_us = _clock_us()

    def row(self, case: Case, way: HostWay) -> HostRow:
        """Check, time and check again. Collective."""
        armed: list[Armed] = []
        problem = self._meter.run(str(way), lambda: armed.append(way.open()) if way.open is not None else None)
        one = armed[0] if armed else None
        problem = problem or self._check(case, way, one)
        blocks = self._on_cpu and way.operation != "trigger_from_host"
        samples = None
        if problem is None and not blocks:
            samples = self._samples(way, one)
            problem = self._check(case, way, one)
        if one is not None:
            one.close()
        return self._row(case, way, problem, samples, BLOCKS if blocks else "")

    def _check(self, case: Case, way: HostWay, armed: Armed | None) -> Problem | None:
        """Run once on a fresh input and compare."""

        def call() -> None:
            if armed is not None:
                armed.arm()
                armed.trigger()
                armed.settle()
            elif callable(end := way.call()):
                end()

        return check_call(self._meter, str(way), case, lambda: way.tensors, call, next(self._seeds))

    def _samples(self, way: HostWay, armed: Armed | None) -> list[list[float]]:
        """Microseconds by rank and batch."""
        options = self._options
        repeats = options.repeats * (TRIGGERS_A_BATCH if armed is not None else 1)
        longest = 50.0
        times = []
        for batch in range(options.warmup + repeats):
            found = self._trigger(way, armed) if armed is not None else self._batch(way, longest)
            longest = max(longest, found)
            if batch >= options.warmup:
                times.append(found)
        self._meter.finish(str(way))
        return self._meter.of_all_ranks(times)

    def _batch(self, way: HostWay, longest: float) -> float:
        call, calls = way.call, range(self._options.calls)
        self._line_up(way)
        self._spin(200.0 + 2 * longest * len(calls))
        began = time.perf_counter_ns()
        for _ in calls:
            call()
        return (time.perf_counter_ns() - began) / len(calls) / 1e3

    def _trigger(self, way: HostWay, armed: Armed) -> float:
        self._line_up(way)
        armed.arm()
        trigger = armed.trigger
        self._spin(200.0)
        began = time.perf_counter_ns()
        trigger()
        time_us = (time.perf_counter_ns() - began) / 1e3 - self._clock_us
        armed.settle()
        return max(time_us, 0.0)

    def _line_up(self, way: HostWay) -> None:
        """Begin with idle devices, all ranks at once: hosts disturb each other, in every batch alike."""
        self._meter.finish(str(way))
        self._meter.agree(None)

    def _spin(self, us: float) -> None:
        if not self._on_cpu:
            torch.cuda._sleep(int(min(us, MOST_SPIN_US) * SPIN_CYCLES_PER_US))

    def _row(
        self, case: Case, way: HostWay, problem: Problem | None, samples: list[list[float]] | None, note: str
    ) -> HostRow:
        variant, driver_calls = way.variant, None
        if problem is None and way.communicator is not None:
            choice, submitted = way.communicator.last_choice(), way.communicator.last_submitted()
            assert choice is not None
            assert submitted is not None
            variant = choice.candidate.variant
            driver_calls = submitted.counts.calls if way.open is None and not self._on_cpu else None
        usable = samples if problem is None else None
        slowest = None if usable is None else max(usable, key=statistics.median)
        columns = outcome(None if slowest is None else Rounds(tuple(slowest)), problem, note)
        return HostRow(
            operation=way.operation,
            bytes=case.nbytes,
            implementation=way.implementation,
            variant=variant,
            symmetric=way.symmetric,
            driver_calls=driver_calls,
            host_us=columns.pop("time_us"),
            best_us=None if usable is None else min(map(min, usable)),
            **columns,
        )


def _clock_us() -> float:
    """Return the microseconds that it takes to read the clock."""
    pairs = ((time.perf_counter_ns(), time.perf_counter_ns()) for _ in range(1000))
    return statistics.median(after - before for before, after in pairs) / 1e3


@dataclasses.dataclass(slots=True)
class HostWay:
    """One way to have an all-gather done.

    Attributes:
        operation: which call is timed; by the names of the result file, as all of the next three.
        tensors: where it reads and writes.
        call: what is timed. What it returns is called after it where somebody must wait for the end.
        communicator: whose call it is, if it is Sidelane's.
        open: makes what must be armed before each call; None for calls that need nothing.
    """

    operation: str
    implementation: str
    variant: str
    symmetric: bool
    tensors: Tensors
    call: Callable[[], object] = nothing_to_wait_for
    communicator: Communicator | None = None
    open: Callable[[], Armed] | None = None

    def __str__(self) -> str:
        return f"{self.operation} {self.implementation} {self.variant}".rstrip()


class Armed:
    """A prelaunched all-gather: armed before each trigger, and waited for after it."""

    def __init__(self, communicator: Communicator, tensors: Tensors, *, from_host: bool) -> None:
        assert tensors.output is not None
        self._handle = communicator.prepare_all_gather(tensors.output, tensors.input, host_trigger=from_host)
        self._from_host = from_host
        self.arm = self._handle.arm
        self.trigger = self._handle.trigger_from_host if from_host else self._handle.trigger

    def settle(self) -> None:
        """Order the caller's next work behind the end, which ``trigger`` does itself."""
        if self._from_host:
            self._handle.wait()

    def close(self) -> None:
        self._handle.close()


def ways_of(implementations: Iterable[Implementation], variants: tuple[str, ...], case: Case) -> Iterator[HostWay]:
    """Every way to do ``case``, an all-gather, out of place. Collective.

    Args:
        implementations: that take part, their buffers reserved.
        variants: of Sidelane's.
        case: what to do.
    """
    for implementation in implementations:
        for candidate in candidates_of(
            implementation, case.kind, only=variants, launches=(implementation.launches[0],)
        ):
            if candidate.in_place:
                continue
            if isinstance(implementation, Own):
                yield from (_own(implementation, candidate, tensors) for tensors in _both(implementation, case))
            else:
                yield _baseline(implementation, candidate, case)
        if isinstance(implementation, OwnDma):
            yield from _triggers(implementation, case)


def _triggers(own: OwnDma, case: Case) -> Iterator[HostWay]:
    for from_host in (False, True):
        for symmetric, tensors in _both(own, case):
            operation = "trigger_from_host" if from_host else "trigger"
            make = functools.partial(Armed, own.communicator, tensors, from_host=from_host)
            yield HostWay(operation, "dma", "b2b", symmetric, tensors, communicator=own.communicator, open=make)


def _both(own: Own, case: Case) -> Iterator[tuple[bool, Tensors]]:
    """Tensors in symmetric memory, and in ordinary memory."""
    yield True, own.tensors(case, Entrant(own.name))
    buffers = (
        torch.empty(size, dtype=torch.uint8, device=case.device) for size in (case.output_bytes, case.input_bytes)
    )
    yield False, views(case, False, *buffers)


def _own(own: Own, candidate: Entrant, where: tuple[bool, Tensors]) -> HostWay:
    symmetric, tensors = where
    communicator = own.communicator
    assert tensors.output is not None
    call = functools.partial(communicator.all_gather, tensors.output, tensors.input, variant=candidate.variant)
    return HostWay("all_gather", own.name, candidate.variant, symmetric, tensors, call, communicator)


def _baseline(implementation: Implementation, candidate: Entrant, case: Case) -> HostWay:
    tensors = implementation.tensors(case, candidate)
    symmetric = candidate.variant == "window" or implementation.name in ("nccl_ce", "symm_mem")
    given = (case, tensors, candidate.variant)
    call: Callable[[], object] = functools.partial(implementation.start, *given)  # gives back what to wait for
    if isinstance(implementation, Binds):
        call = implementation.bind(*given)
    return HostWay("all_gather", implementation.name, candidate.variant, symmetric, tensors, call)


COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": "variant",
    "<tensors": lambda row, _: "symmetric" if row.symmetric else "ordinary",
    "driver\ncalls": lambda row, _: "" if row.driver_calls is None else str(row.driver_calls),
    "host\nus": "host_us",
    "p10-p90\nus": spread,
    "best\nus": "best_us",
    "<correct": "correct",
}


def host_tables(rows: Sequence[HostRow]) -> list[Table]:
    """Make one table an operation, in the order of the rows; the least host time of each size is set off."""
    return tables_by(
        rows,
        lambda row: row.operation,
        lambda row: f"{row.operation}: host time",
        COLUMNS,
        keys=4,
        groups=lambda row: row.bytes,
        least=lambda row: row.host_us,
    )


STUDY = Study(
    name="host",
    title="What a call takes the host",
    legend=(
        "Microseconds from the begin of a repeated call until it returns, behind a device that spins, so that no "
        "call waits for it. Medians over batches of calls of the slowest rank; 'best' is the fastest batch of any "
        "rank. A trigger fires a prelaunched call, which was armed before, uncounted. The least of each size is "
        "bold."
    ),
    row=HostRow,
    tables=host_tables,
    measure=_measure,
    progress="host time of a call",
)

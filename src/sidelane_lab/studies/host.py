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
from typing import TYPE_CHECKING, NamedTuple

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.case_way import CaseWay
from sidelane_lab.harness.options import StudyOptions, count, implementations, names, size_list, study_command
from sidelane_lab.harness.report import Cell, spread, tables_by
from sidelane_lab.harness.study import IMPLEMENTATIONS, FlatRow, Study
from sidelane_lab.harness.table import Table
from sidelane_lab.harness.ways import Rounds, outcome

if TYPE_CHECKING:
    import torch

    from sidelane.session import Communicator
    from sidelane.session.prelaunch import Prelaunched
    from sidelane_lab.baselines.candidate import Entrant, Implementation, Tensors
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.baselines.roster import Own
    from sidelane_lab.harness.launch import Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender

BLOCKS = "on CPUs the call returns when the collective is done: it has no host time of its own"
MOST_SPIN_US = 50_000.0
TRIGGERS_A_BATCH = 4
"""Triggers are timed singly, and vary: there are this many for each batch of calls."""

ALL_GATHER, TRIGGER, FROM_HOST = HOST_OPERATIONS = ("all_gather", "trigger", "trigger_from_host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions(StudyOptions):
    """Measure the microseconds that a call, and a trigger of a prelaunched one, take the host."""

    study = "host"
    examples = (
        ("sidelane host", "what repeated calls take the host"),
        ("sidelane host --bytes 1K --variants b2b,striped", "two variants at one size"),
    )

    sizes: tuple[int, ...] = size_list("--bytes", "Gathered size, such as 64K. May be repeated.", ("1K", "64K"))
    variants: tuple[str, ...] = names("--variants", ("one_shot", "b2b", "striped"), "Of Sidelane's, that are measured.")
    calls: int = count("--calls", 40, "Calls in a batch.")
    repeats: int = count("--batches", 50, "Batches that are measured.")
    implementations: tuple[str, ...] = implementations()
    warmup: int = 5


host = study_command("host", HostOptions)


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
    from sidelane_lab.baselines.reference import cases_of
    from sidelane_lab.baselines.roster import make_roster

    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        sender.note(f"{BLOCKS}; only trigger_from_host is timed")
    # What blocks anyway has nothing to be compared with.
    wanted = options.implementations or (("dma", "auto") if on_cpu else ())
    roster = make_roster(rank, wanted=wanted, timeout_s=options.step_s)
    cases = cases_of(rank, options, sender, (Kind.ALL_GATHER,))
    roster.reserve_for(cases, sender.note)
    seeds = itertools.count(options.seed + 1)
    for case in cases:
        sender.step(f"host time of an all-gather of {format_bytes(case.nbytes)}")
        for call, make in calls_of(roster.implementations.values(), options.variants, case):
            yield row_of(roster.meter, options, case, call, make, seeds)
    roster.close()


class HostCall(NamedTuple):
    """A call whose host time is measured, by the names of the result file."""

    operation: str
    implementation: str
    variant: str
    symmetric: bool


class HostWay(CaseWay):
    """One way to have an all-gather done.

    Args:
        case: the all-gather.
        tensors: where it reads and writes.
        name: the call.
        call: what is timed. What it returns is called after it where somebody must wait for the end.
        communicator: whose call it is, if it is Sidelane's.
        handle: what is armed before each call, which is its trigger then; None for calls that need nothing.

    Attributes:
        variant: that was run.
        driver_calls: number of calls to the driver in one call of Sidelane's; None for others.
        best_us: time of the fastest batch of any rank.
    """

    def __init__(
        self,
        case: Case,
        tensors: Tensors,
        name: HostCall,
        call: Callable[[], object],
        communicator: Communicator | None = None,
        handle: Prelaunched | None = None,
    ) -> None:
        super().__init__(case, tensors, " ".join(filter(None, name[:3])))
        self.variant, self._call, self._communicator, self._handle = name.variant, call, communicator, handle
        self.blocks = case.device.type == "cpu" and name.operation != FROM_HOST
        self.driver_calls: int | None = None
        self.best_us: float | None = None

    def run(self) -> None:
        if self._handle is not None:
            self._handle.arm()
        if callable(end := self._call()):
            end()
        self._follow()

    def _follow(self) -> None:
        """Order the caller's next work behind the end, which all calls but a trigger of the host do themselves."""
        if self._handle is not None and self._handle.host_trigger:
            self._handle.wait()

    def rounds(self, meter: Meter, options: HostOptions) -> Rounds:
        """Return the slowest rank's microseconds of a call, one for each batch. Collective."""
        singly = self._handle is not None
        calls, batches = (1, options.repeats * TRIGGERS_A_BATCH) if singly else (options.calls, options.repeats)
        longest_us, times = 50.0, []
        for batch in range(options.warmup + batches):
            # Begin with idle devices, all ranks at once: hosts disturb each other, in every batch alike.
            meter.finish(self.label)
            meter.agree(None)
            times.append(self._sample_us(calls, 200.0 + 2 * longest_us * calls))
            longest_us = max(longest_us, times[batch])
        meter.finish(self.label)
        by_rank = meter.of_all_ranks(times[options.warmup :])
        self.best_us = min(map(min, by_rank))
        return Rounds(tuple(max(by_rank, key=statistics.median)))

    def _sample_us(self, calls: int, spin_us: float) -> float:
        call, several = self._call, range(calls)
        if self._handle is not None:
            self._handle.arm()
        _spin(self.case.device, spin_us)
        began = time.perf_counter_ns()
        for _ in several:
            call()
        time_us = (time.perf_counter_ns() - began) / 1e3 - _clock_us()
        self._follow()
        return max(time_us / calls, 0.0)

    def settle(self) -> None:
        if self._communicator is None:
            return
        choice, submitted = self._communicator.last_choice(), self._communicator.last_submitted()
        assert choice is not None
        assert submitted is not None
        self.variant = choice.candidate.variant
        if self._handle is None and not self.blocks:
            self.driver_calls = submitted.counts.calls

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()


def row_of(
    meter: Meter,
    options: HostOptions,
    case: Case,
    call: HostCall,
    make: Callable[[], HostWay],
    seeds: Iterator[int],
) -> HostRow:
    """Check a call, time it and check it again. Collective."""

    def sampled(ready: dict[HostCall, HostWay]) -> Mapping[HostCall, Rounds]:
        return {call: way.rounds(meter, options) for call, way in ready.items() if not way.blocks}

    (one,) = meter.compare({call: make}, seeds, sampled)
    way, right = one.way, one.problem is None
    columns = outcome(one.rounds, one.problem, BLOCKS if way is not None and way.blocks else "")
    return HostRow(
        operation=call.operation,
        bytes=case.nbytes,
        implementation=call.implementation,
        variant=way.variant if way is not None and right else call.variant,
        symmetric=call.symmetric,
        driver_calls=way.driver_calls if way is not None and right else None,
        host_us=columns.pop("time_us"),
        best_us=way.best_us if way is not None and right else None,
        **columns,
    )


def _spin(device: torch.device, us: float) -> None:
    if device.type != "cpu":
        import torch

        from sidelane_lab.harness.measure import SPIN_CYCLES_PER_US

        torch.cuda._sleep(int(min(us, MOST_SPIN_US) * SPIN_CYCLES_PER_US))


@functools.cache
def _clock_us() -> float:
    """Return the microseconds that it takes to read the clock."""
    pairs = ((time.perf_counter_ns(), time.perf_counter_ns()) for _ in range(1000))
    return statistics.median(after - before for before, after in pairs) / 1e3


def calls_of(
    implementations: Iterable[Implementation], variants: tuple[str, ...], case: Case
) -> Iterator[tuple[HostCall, Callable[[], HostWay]]]:
    """Yield every call that does ``case``, an all-gather, out of place, with what makes its way.

    Args:
        implementations: that take part, their buffers reserved.
        variants: of Sidelane's.
        case: what to do.
    """
    from sidelane_lab.baselines.candidate import candidates_of
    from sidelane_lab.baselines.roster import Own, OwnDma

    for implementation in implementations:
        first = (implementation.launches[0],)
        for candidate in candidates_of(implementation, case.kind, only=variants, launches=first):
            if candidate.in_place:
                continue
            names = (ALL_GATHER, implementation.name, candidate.variant)
            if isinstance(implementation, Own):
                for symmetric in (True, False):
                    call = HostCall(*names, symmetric)
                    yield call, functools.partial(_own, implementation, case, call)
            else:
                symmetric = candidate.variant == "window" or implementation.name in ("nccl_ce", "symm_mem")
                call = HostCall(*names, symmetric)
                yield call, functools.partial(_baseline, implementation, candidate, case, call)
        if isinstance(implementation, OwnDma):
            for operation, symmetric in itertools.product((TRIGGER, FROM_HOST), (True, False)):
                call = HostCall(operation, "dma", "b2b", symmetric)
                yield call, functools.partial(_armed, implementation, case, call)


def _tensors(own: Own, case: Case, symmetric: bool) -> Tensors:
    """Return tensors in symmetric memory, or in ordinary memory."""
    import torch

    from sidelane_lab.baselines.candidate import Entrant, views

    if symmetric:
        return own.tensors(case, Entrant(own.name))
    sizes = case.output_bytes, case.input_bytes
    return views(case, False, *(torch.empty(size, dtype=torch.uint8, device=case.device) for size in sizes))


def _armed(own: Own, case: Case, call: HostCall) -> HostWay:
    tensors, from_host = _tensors(own, case, call.symmetric), call.operation == FROM_HOST
    assert tensors.output is not None
    handle = own.communicator.prepare_all_gather(tensors.output, tensors.input, host_trigger=from_host)
    trigger = handle.trigger_from_host if from_host else handle.trigger
    return HostWay(case, tensors, call, trigger, own.communicator, handle)


def _own(own: Own, case: Case, call: HostCall) -> HostWay:
    tensors, communicator = _tensors(own, case, call.symmetric), own.communicator
    assert tensors.output is not None
    timed = functools.partial(communicator.all_gather, tensors.output, tensors.input, variant=call.variant)
    return HostWay(case, tensors, call, timed, communicator)


def _baseline(implementation: Implementation, candidate: Entrant, case: Case, call: HostCall) -> HostWay:
    from sidelane_lab.baselines.candidate import Binds

    tensors = implementation.tensors(case, candidate)
    given = (case, tensors, candidate.variant)
    timed: Callable[[], object] = functools.partial(implementation.start, *given)  # gives back what to wait for
    if isinstance(implementation, Binds):
        timed = implementation.bind(*given)
    return HostWay(case, tensors, call, timed)


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

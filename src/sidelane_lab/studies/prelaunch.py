"""Prelaunched collectives, from their trigger to their end (DMA collectives paper, section 4.2.5, Figures 13 and 14).

    stream   spin | barrier of all ranks | event | trigger | event
    engines  wait .................................. copies |
                                           |<---- time ---->|

Every call is armed outside of the time. A trigger of the stream or of a kernel is timed by events on the device, as the
calls are that are not prelaunched: all of them behind a spin, so that no host is on the path. A kernel's time has that
of the same kernel without its trigger taken off. A trigger of the host is timed by the host's clock: from its store,
after the barrier has ended, until it sees the end of the collective.

On CPUs a trigger blocks until the end, and the host's clock times everything; kernels do not take part.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sidelane.choice.candidate import DMA
from sidelane.program.collective import Kind
from sidelane.program.wraparound import as_int32
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.case_way import CaseWay
from sidelane_lab.harness.options import (
    LAUNCHES,
    StudyOptions,
    count,
    implementations,
    kinds,
    names,
    size_span,
    study_command,
)
from sidelane_lab.harness.report import Cell, spread, tables_by
from sidelane_lab.harness.study import IMPLEMENTATIONS, FlatRow, Study
from sidelane_lab.harness.table import Table, place_of
from sidelane_lab.harness.ways import Job, Rounds, Way, outcome

if TYPE_CHECKING:
    import torch

    from sidelane_lab.baselines.candidate import Entrant
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.baselines.roster import OwnDma, Roster
    from sidelane_lab.harness.launch import Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender

CALL, STREAM, HOST, KERNEL = TRIGGERS = ("call", "stream", "host", "kernel")
"""Beginnings of a collective: the call itself, or a write of the stream, the host or a kernel."""

MOVING = ("all_gather", "all_to_all")


HIDDEN_US = 200.0
"""Microseconds of the spin in front of a sample: arming has ended by then, and all is queued."""

SWAP = "swap"
FLOOR = "kernel alone"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrelaunchOptions(StudyOptions):
    """Time prelaunched collectives from their trigger to their end, and ordinary calls.

    A call is armed outside of the time, and fired by the stream, by the host or by a running kernel. Beside it are the
    same variant as an eager call and in a graph, and the library's in a graph.
    """

    study = "prelaunch"
    examples = (
        ("sidelane prelaunch --json prelaunch.json", "all variants, triggers and sizes"),
        ("sidelane prelaunch --collective all_gather --variants b2b --max-bytes 1M", "one variant at small sizes"),
    )

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER, Kind.ALL_TO_ALL), MOVING)
    sizes: tuple[int, ...] = size_span(gpus=("1K", "4G"), cpus=("1K", "64K"))
    variants: tuple[str, ...] = names(
        "--variants", ("pcpy", "bcst", "swap", "b2b"), "Of Sidelane's copy engines.", some=True
    )
    triggers: tuple[str, ...] = names(
        "--triggers", TRIGGERS, "What begins the collective.", allowed=TRIGGERS, some=True
    )
    implementations: tuple[str, ...] = implementations()
    warmup: int = count("--warmup", 3, "Rounds before the measured ones.", 0)
    repeats: int = count("--repeats", 15, "Measured rounds.")


prelaunch = study_command("prelaunch", PrelaunchOptions)


@dataclasses.dataclass(frozen=True, slots=True)
class PrelaunchRow(FlatRow):
    """The time of a collective from what begins it until its end.

    Attributes:
        bytes: gathered size of an all_gather, size of the whole local buffer of an all_to_all.
        launch: ``graph`` if a captured call was replayed.
        trigger: ``call`` if nothing was submitted ahead; otherwise its source: ``stream``, ``host``, ``kernel``.
        arm_us: host time of arming, median over the rounds of the slowest rank; null for calls.
        time_us: time from the trigger until the end, median over the rounds of the slowest rank.
        correct: True if outputs agreed with a reference in this run; None when it could not run.
        note: reason why there is no time, or a remark.
    """

    allowed = (("launch", LAUNCHES), ("trigger", TRIGGERS), ("implementation", (*IMPLEMENTATIONS, FLOOR)))
    figures = ("time_us",)

    collective: str
    bytes: int
    in_place: bool
    implementation: str
    variant: str
    launch: str
    trigger: str
    arm_us: float | None
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    correct: bool | None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class WayKey:
    """One way to have a collective done, by the names of the result file."""

    implementation: str
    variant: str
    in_place: bool
    launch: str
    trigger: str


class FiredCall(CaseWay):
    """A prelaunched collective with the trigger that begins it.

    Args:
        own: Sidelane's copy engines.
        case: the collective.
        entrant: variant and place.
        trigger: ``stream``, ``host`` or ``kernel``.

    Attributes:
        arm_us: host time of each arming.
    """

    def __init__(self, own: OwnDma, case: Case, entrant: Entrant, trigger: str) -> None:
        super().__init__(case, own.tensors(case, entrant), f"{entrant} by {trigger}")
        output, input = self.tensors.output, self.tensors.input
        assert output is not None
        comm = own.communicator
        prepare = comm.prepare_all_gather if case.kind is Kind.ALL_GATHER else comm.prepare_all_to_all
        self._handle = prepare(output, input, variant=entrant.variant, host_trigger=trigger == HOST)
        self.trigger = trigger
        self.arm_us: list[float] = []
        if trigger == KERNEL:
            self.run_kernel_alone = functools.partial(_launch, _scratch(case.device), 0)
            self.run_kernel_alone()  # CUDA loads a kernel at its first launch, which would wait for what is armed

    def arm(self) -> None:
        began = time.perf_counter_ns()
        self._handle.arm()
        self.arm_us.append((time.perf_counter_ns() - began) / 1e3)

    def fire(self) -> None:
        """Fire it, and order the current stream behind its end; on CPUs wait for that."""
        handle = self._handle
        if self.trigger == STREAM:
            handle.trigger()
            return
        if self.trigger == HOST:
            handle.trigger_from_host()
        else:
            _launch(handle.trigger_address, as_int32(handle.trigger_value))
        handle.wait()

    def run(self) -> None:
        """Arm it and fire it."""
        self.arm()
        self.fire()

    def job(self) -> Job:
        """Return the job that times a trigger of the stream or of a kernel by the device."""
        return Job(self.fire, before=self.arm, hide_launch_us=HIDDEN_US)

    def host_time_us(self, line_up: Callable[[], None]) -> float:
        """Arm it, line up with the peers, and return the microseconds from the host's store until it sees the end."""
        import torch

        self.arm()
        line_up()
        began = time.perf_counter_ns()
        self.fire()
        if self.case.device.type != "cpu":
            end = torch.cuda.Event()
            end.record()
            while not end.query():
                pass
        return (time.perf_counter_ns() - began) / 1e3

    def close(self) -> None:
        self._handle.close()


def _launch(address: int, value: int) -> None:
    from sidelane.device.triton_interpreter import launch
    from sidelane_lab.studies.firing import fire

    launch(fire, (1,), (address, value), {})


@functools.cache
def _scratch(device: torch.device) -> int:
    """Return the address of a word that nobody waits for."""
    import torch

    words = torch.zeros(4, dtype=torch.int32, device=device)
    _kept.append(words)
    return words.data_ptr()


_kept: list[torch.Tensor] = []


def _measure(rank: Rank, options: PrelaunchOptions, sender: Sender) -> Iterator[PrelaunchRow]:
    """Make the rows. Collective."""
    from sidelane_lab.baselines.reference import cases_of
    from sidelane_lab.baselines.roster import make_roster

    on_cpu = rank.device.type == "cpu"
    wanted = options.implementations or (("dma",) if on_cpu else ("nccl", "nccl_ce", "symm_mem", "dma"))
    roster = make_roster(rank, wanted=wanted, timeout_s=options.step_s)
    cases = cases_of(rank, options, sender, options.collectives)
    roster.reserve_for(cases, sender.note)
    triggers = [one for one in options.triggers if not (on_cpu and one == KERNEL)]
    if on_cpu and KERNEL in options.triggers:
        sender.note("kernels do not fire here: on CPUs Triton's interpreter would run them, which is not timed")
    seeds = itertools.count(options.seed + 1)
    for case in cases:
        sender.step(f"{case.kind} {format_bytes(case.nbytes)} from trigger to end")
        yield from rows_of(roster, case, options, triggers, seeds)
    roster.close()


def rows_of(
    roster: Roster, case: Case, options: PrelaunchOptions, triggers: Sequence[str], seeds: Iterator[int]
) -> Iterator[PrelaunchRow]:
    """Measure all that takes part at one size. Collective."""
    floor_us: list[float] = []

    def timed(ready: dict[WayKey, Any]) -> Mapping[WayKey, Rounds]:
        calls = {key: way for key, way in ready.items() if key.trigger == CALL}
        fired: dict[WayKey, FiredCall] = {key: way for key, way in ready.items() if key.trigger != CALL}
        jobs: dict[Any, Job] = {key: call.job(HIDDEN_US) for key, call in calls.items()}
        jobs |= {key: one.job() for key, one in fired.items() if key.trigger != HOST}
        by_kernel = [one for key, one in fired.items() if key.trigger == KERNEL]
        if by_kernel:
            jobs[FLOOR] = Job(by_kernel[0].run_kernel_alone, hide_launch_us=HIDDEN_US)
        for one in fired.values():
            one.arm_us.clear()
        rounds = roster.meter.in_turns(jobs, options)
        if by_kernel:
            floor_us.append(rounds.pop(FLOOR).median_us)
        for key, one in fired.items():
            if key.trigger == HOST:
                rounds[key] = _host_rounds(roster.meter, one, options)
            elif key.trigger == KERNEL:
                rounds[key] = _less(rounds[key], floor_us[0])
            one.arm_us = [max(map(statistics.median, roster.meter.of_all_ranks(one.arm_us[-options.repeats :])))]
        return rounds

    makers = _calls(roster, case, options, triggers) | _fired(roster, case, options, triggers)
    for found in roster.meter.compare(makers, seeds, timed):
        key, way = found.key, found.way
        taken_off = f"{floor_us[0]:.1f} us of the same kernel without a trigger are taken off" if floor_us else ""
        yield PrelaunchRow(
            collective=case.kind,
            bytes=case.nbytes,
            **dataclasses.asdict(key),
            arm_us=way.arm_us[0] if isinstance(way, FiredCall) and found.problem is None else None,
            **outcome(found.rounds, found.problem, taken_off if key.trigger == KERNEL else ""),
        )


def _calls(
    roster: Roster, case: Case, options: PrelaunchOptions, triggers: Sequence[str]
) -> dict[WayKey, Callable[[], Way]]:
    """Return what is not submitted ahead: Sidelane's variants, eager and in a graph, and the library's in a graph."""
    from sidelane_lab.baselines.candidate import Entrant, ReadyCall

    found: dict[WayKey, Callable[[], Way]] = {}
    for implementation in roster.implementations.values() if CALL in triggers else ():
        own = implementation.name == DMA
        launches = [one for one in implementation.launches if own or one == "graph" or case.device.type == "cpu"]
        for in_place in (False, True):
            names = implementation.variants(case.kind, in_place)
            variants = [one for one in options.variants if one in names and in_place == (one == SWAP)] if own else names
            for variant, launch in itertools.product(variants, launches):
                entrant = Entrant(implementation.name, variant, in_place, launch)
                key = WayKey(implementation.name, variant, in_place, launch, CALL)
                found[key] = functools.partial(ReadyCall, entrant, case, implementation, 1)
    return found


def _fired(
    roster: Roster, case: Case, options: PrelaunchOptions, triggers: Sequence[str]
) -> dict[WayKey, Callable[[], Way]]:
    from sidelane_lab.baselines.candidate import Entrant
    from sidelane_lab.baselines.roster import OwnDma

    own = roster.implementations.get(DMA)
    if not isinstance(own, OwnDma):
        return {}
    return {
        WayKey(DMA, variant, variant == SWAP, "eager", trigger): functools.partial(
            FiredCall, own, case, Entrant(DMA, variant, variant == SWAP), trigger
        )
        for variant, trigger in itertools.product(options.variants, triggers)
        if trigger != CALL and variant in own.variants(case.kind, variant == SWAP)
    }


def _host_rounds(meter: Meter, one: FiredCall, options: PrelaunchOptions) -> Rounds:
    """Time triggers of the host. Collective."""

    def line_up() -> None:
        meter.line_up("a trigger of the host")

    times = []
    for number in range(options.warmup + options.repeats):
        meter.finish("what came before a trigger of the host")
        meter.agree(None)
        taken = one.host_time_us(line_up)
        if number >= options.warmup:
            times.append(taken)
    return Rounds(tuple(max(each) for each in zip(*meter.of_all_ranks(times), strict=True)))


def _less(rounds: Rounds, us: float) -> Rounds:
    return dataclasses.replace(rounds, times_us=tuple(max(0.0, one - us) for one in rounds.times_us))


COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": "variant",
    "<launch": "launch",
    "<place": lambda row, _: place_of(row.in_place),
    "<begun by": "trigger",
    "time\nus": "time_us",
    "p10-p90\nus": spread,
    "arming\nus": "arm_us",
    "<correct": "correct",
}


def prelaunch_tables(rows: Sequence[PrelaunchRow]) -> list[Table]:
    """Make one table a collective; the fastest of each size is set off."""
    return tables_by(
        rows,
        lambda row: row.collective,
        lambda row: f"{row.collective}: from what begins it to its end",
        COLUMNS,
        keys=6,
        groups=lambda row: row.bytes,
        least=lambda row: row.time_us,
    )


STUDY = Study(
    name="prelaunch",
    title="Prelaunched collectives, from trigger to end",
    legend=(
        "Microseconds from what begins a collective to its end; medians over rounds of the slowest rank. 'call': not "
        "submitted ahead, behind a spin that hides the host, or replayed from a graph. 'stream', 'host' and 'kernel': "
        "armed outside of the time, and fired by a write of the stream, the host or a running kernel. A host's time is "
        "that of its own clock, until it sees the end. The fastest of each size is bold; every output was compared."
    ),
    row=PrelaunchRow,
    tables=prelaunch_tables,
    measure=_measure,
    progress="prelaunched collectives",
)

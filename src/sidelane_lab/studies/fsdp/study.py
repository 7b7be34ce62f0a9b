"""A training step of layers that FSDP2 shards: how much of it is communication, by who communicates.

One model serves all implementations, which take turns round by round: what FSDP2 gathers and scatters by is switched
before each step, uncounted (``ways.py``). A step begins on idle devices behind a barrier, so that its first gather and
its last scatter stand uncovered, as they do behind an optimizer; the host has a head start, as it has in a training.

Before it is timed each implementation makes two steps that are compared with the library's: one with every shard's rows
moved on by one, in which parameters that an earlier gather had left would be wrong, and one without.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.fsdp import FsdpOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import MOST_HIDDEN_US, Meter
from sidelane_lab.harness.options import require_all
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.harness.ways import Job, Problem, Rounds, outcome
from sidelane_lab.studies.fsdp.cases import FLOORS, StepCase, predict_row
from sidelane_lab.studies.fsdp.kernels import ATTENTION, COPY_IN, COPY_OUT, GEMM, Profiled, profiled
from sidelane_lab.studies.fsdp.rows import FsdpRow, draw_steps, fsdp_tables
from sidelane_lab.studies.fsdp.step import TOLERANCE, StepOutcome, Stepper
from sidelane_lab.studies.fsdp.ways import STILL, STRAIGHT_STILL, CommunicationWays, names_on


def _check(options: FsdpOptions, place: LaunchTarget) -> None:
    """Refuse an implementation that is not known on this kind of device."""
    require_all("fsdp", "implementations", options.implementations, names_on(place.device_type))


def _measure(rank: Rank, options: FsdpOptions, sender: Sender) -> Iterator[FsdpRow]:
    """Make the rows. Collective."""
    cases, on_cpu = options.parsed(), rank.device.type == "cpu"
    sender.steps = len(cases)
    if on_cpu:
        sender.note("CPU ranks take few layers of small sizes, as the table says")
        cases = [case.small() for case in cases]
        if options.profile:
            sender.note("CPU ranks launch no kernels: nothing is profiled")
    study = _Study(rank, options)
    for case in cases:
        sender.step(str(case))
        yield from study.rows(case)
    study.close()


@dataclasses.dataclass(slots=True)
class TrialResult:
    """The findings about an implementation.

    Attributes:
        outcome: of the step that was compared.
        held_mb: what it keeps from step to step, of the rank that keeps the most; None on CPUs.
        note: what to know about it.
        rounds: its times.
        kernels: of one step.
    """

    outcome: StepOutcome
    held_mb: float | None
    note: str = ""
    rounds: Rounds | None = None
    kernels: Profiled | None = None


class Trial:
    """One case on one rank: implementations are attached and compared, take turns, and are looked into.

    Args:
        rank: of this process.
        meter: of all ranks.
        make: makes the model with its data.
        engines: NCCL on copy engines, where there is any.
        timeout_s: of Sidelane's waits.

    Attributes:
        found: by implementation that is right.
        problems: by other implementation.
    """

    def __init__(
        self,
        rank: Rank,
        meter: Meter,
        make: Callable[[], Stepper],
        engines: Callable[[], Any] | None,
        timeout_s: float,
    ) -> None:
        self._rank, self._meter = rank, meter
        self._stepper = make()
        self._ways = CommunicationWays(self._stepper.model, rank, meter, engines, timeout_s)
        self._wanted: list[StepOutcome] = []
        self.found: dict[str, TrialResult] = {}
        self.problems: dict[str, Problem] = {}

    def prepare(self, names: Sequence[str]) -> bool:
        """Attach implementations and compare each with the first. Collective.

        Returns:
            False where a step broke off: nothing can be run on this model any more.
        """
        for name in names:
            problem = self._ways.attach(name)
            if problem is not None:
                self.problems[name] = Problem(problem)
            elif not self._compare(name, names[0]):
                return False
        return True

    def measure(self, names: Sequence[str], warmup: int, repeats: int) -> None:
        """Time what is right, in turn, and see that it still is. Collective."""
        jobs = {
            name: Job(
                self._stepper.step, hide_launch_us=MOST_HIDDEN_US, before=functools.partial(self._ways.switch, name)
            )
            for name in names
            if name in self.found
        }
        rounds = self._meter.rounds(jobs, warmup=warmup, repeats=repeats)
        wanted: StepOutcome | None = None
        for name in jobs:
            self.found[name].rounds = rounds[name]
            self.found[name].note = self._ways.switch(name).note()
            self._stepper.tried(name)
            outcome = self._stepper.outcome()
            wanted = wanted or outcome
            wrong = None if name in FLOORS else outcome.differs(wanted)
            if wrong is not None:
                self.problems[name] = Problem(f"after the rounds: {wrong}", wrong=True)
        self._stepper.forget()

    def profile(self) -> None:
        """Look into one step of each implementation under a profiler, on the first rank. Collective."""
        for name, found in self.found.items():
            self._ways.switch(name)
            self._stepper.tried(name)
            found.kernels = profiled(self._rank, functools.partial(self._stepper.tried, name))
        self._stepper.forget()

    def close(self) -> None:
        """Let go of everything. Collective."""
        self._stepper.forget()
        self._ways.close()

    def _compare(self, name: str, library: str) -> bool:
        """Make two steps; the second one's outcome is the row's. False where a step broke off."""
        stepper, outcomes, peaks, distance = self._stepper, list[StepOutcome](), list[float | None](), 0.0

        def moved() -> None:
            self._ways.switch(name)
            stepper.move_rows(1)
            stepper.tried(name)

        def again() -> None:
            stepper.move_rows(-1)
            peaks.append(stepper.measured(name))

        refused = self._meter.attempt(moved)
        if refused is None:
            outcomes.append(stepper.outcome())
            if name == library:
                stepper.keep()
            distance = stepper.distance()
            refused = self._meter.attempt(again)
        if refused is not None:
            self.problems[name] = Problem(refused)
            return False
        outcomes.append(stepper.outcome(peaks[0]))
        if name == library:
            self._wanted = outcomes
        elif name not in FLOORS:
            wrong = [text for one, wanted in zip(outcomes, self._wanted, strict=True) if (text := one.differs(wanted))]
            if not distance <= TOLERANCE:
                wrong.append(f"gradients are {100 * distance:.2g}% from those of {library}")
            if wrong:
                self.problems[name] = Problem("; ".join(wrong), wrong=True)
                return True
        way = self._ways.attached[name]
        held = None
        if self._rank.device.type != "cpu":
            held = max(one for (one,) in self._meter.of_all_ranks([way.held() / 1e6]))
        self.found[name] = TrialResult(outcomes[1], held, way.note())
        return True


class _Study:
    """The parts that cases share on one rank: the meter, and NCCL on copy engines."""

    def __init__(self, rank: Rank, options: FsdpOptions) -> None:
        self._rank, self._options = rank, options
        self._on_cpu = rank.device.type == "cpu"
        self._engines: Any = None
        self.meter = make_meter(rank, options.step_s)
        known = names_on(rank.device.type)
        # The library always takes part: the others are held against it.
        self._names = [name for name in known if name in (known[0], *(options.implementations or known))]

    def rows(self, case: StepCase) -> Iterator[FsdpRow]:
        """Measure all that takes part in one case. Collective.

        Yields:
            Rows, the same on every rank but for what was profiled, which the first one has.
        """
        found: dict[str, TrialResult] = {}
        problems: dict[str, Problem] = {}
        library, ended = self._names[0], False
        while not ended and library not in problems:
            with self.meter.on_stream():
                ended, found = self._tried(case, problems)
            gc.collect()  # a model is full of cycles; the next one needs its memory
            if not self._on_cpu:
                torch.cuda.empty_cache()
        for name in self._names:
            if library in problems and name not in problems:
                problems[name] = Problem(f"{library}, which it is held against: {problems[library].text}")
            yield self._row(case, name, found, problems.get(name))

    def close(self) -> None:
        """Let go of everything. Collective."""
        if self._engines is not None:
            self._engines.close()

    def _tried(self, case: StepCase, problems: dict[str, Problem]) -> tuple[bool, dict[str, TrialResult]]:
        """Try a model for all that has no problem so far. Collective.

        Returns:
            False where a step broke off, which leaves FSDP2 in the middle of it: the others begin anew. And what was
            found.
        """
        options, made = self._options, list[Trial]()
        dtype = getattr(torch, options.reduce_dtype)
        make = functools.partial(
            Stepper, case, self._rank, self.meter, dtype, optimizer=options.optimizer, seed=options.seed
        )
        engines = None if self._on_cpu else self._engines_here
        refused = self.meter.attempt(lambda: made.append(Trial(self._rank, self.meter, make, engines, options.step_s)))
        if refused is not None:
            problems[self._names[0]] = Problem(refused)
            return True, {}
        (trial,) = made
        names = [name for name in self._names if name not in problems]
        ended = trial.prepare(names)
        if ended and names[0] in trial.found:
            trial.measure(names, options.warmup, options.repeats)
            if options.profile and not self._on_cpu:
                trial.profile()
        problems |= trial.problems
        if ended:
            trial.close()
        else:
            self.meter.attempt(trial.close)
        return ended, trial.found

    def _engines_here(self) -> Any:
        """Return NCCL on copy engines, made when it is wanted first."""
        if self._engines is None:
            from sidelane_lab.studies.fsdp.ways import NcclEngines

            self._engines = NcclEngines(self._rank.device, self._options.step_s, self.meter)
        return self._engines

    def _row(self, case: StepCase, name: str, found: dict[str, TrialResult], problem: Problem | None) -> FsdpRow:
        one, floor = found.get(name), found.get(STRAIGHT_STILL)
        times = one.rounds if one is not None and problem is None else None
        kernels = one.kernels if one is not None and problem is None else None
        result = None if one is None or name in FLOORS else one.outcome
        peak = None
        if one is not None and result is not None and result.peak_mb is not None:
            peak = result.peak_mb + (one.held_mb or 0.0)
        columns = outcome(times, problem, one.note if one is not None else "")
        return FsdpRow(
            model=case.model.name,
            layers=case.model.layers,
            seq=case.seq,
            batch=case.batch,
            reduce_dtype=self._options.reduce_dtype,
            optimizer=self._options.optimizer,
            implementation=name,
            **{f"{figure}_ms": _ms(columns[f"{place}_us"]) for figure, place in FIGURES},
            exposed_ms=exposed_ms(times, _rounds(found, STILL)),
            recovered_percent=recovered_percent(times, _rounds(found, self._names[0]), _rounds(found, STILL)),
            loss=None if result is None else result.loss,
            grad_norm=None if result is None else result.grad_norm,
            peak_mb=peak,
            correct=None if problem is None and name in FLOORS else columns["correct"],
            note=columns["note"],
            **({} if kernels is None else _figures(kernels, floor.kernels if floor else None)),
        )


FIGURES = (("step", "time"), ("p10", "p10"), ("p90", "p90"))


def _ms(time_us: float | None) -> float | None:
    return None if time_us is None else time_us / 1e3


def _figures(kernels: Profiled, floor: Profiled | None) -> dict[str, float | None]:
    """Return what was profiled, by the names of a row."""
    slower = None if floor is None else kernels.slower_gemms_ms(floor)
    named = (COPY_IN, COPY_OUT, GEMM, ATTENTION)
    return {
        **{f"{group}_ms": ms for group, ms in kernels.by_group.items()},
        "first_gather_ms": kernels.first_gather_ms,
        "last_scatter_ms": kernels.last_scatter_ms,
        "profiled_ms": kernels.whole_ms,
        **{f"stream_{group}_ms": kernels.on_stream[group] for group in (COPY_IN, COPY_OUT)},
        "stream_other_ms": sum(ms for group, ms in kernels.on_stream.items() if group not in named),
        "waits_ms": kernels.waits_ms,
        "gemm_beside_ms": None if slower is None else slower[0],
        "gemm_apart_ms": None if slower is None else slower[1],
    }


def _rounds(found: dict[str, TrialResult], name: str) -> Rounds | None:
    return found[name].rounds if name in found else None


def exposed_ms(times: Rounds | None, floor: Rounds | None) -> float | None:
    """Return by how much steps take longer than those that communicate nothing; None without either."""
    if times is None or floor is None:
        return None
    pairs = zip(times.times_us, floor.times_us, strict=True)
    return statistics.median(one - least for one, least in pairs) / 1e3


def recovered_percent(times: Rounds | None, library: Rounds | None, floor: Rounds | None) -> float | None:
    """Return the percent of the library's exposed time; None where it has none."""
    if times is None or library is None or floor is None:
        return None
    rounds = zip(times.times_us, library.times_us, floor.times_us, strict=True)
    shares = [100 * (theirs - ours) / (theirs - least) for ours, theirs, least in rounds if theirs > least]
    return statistics.median(shares) if shares else None


STUDY = Study(
    name="fsdp",
    title="Training steps with FSDP2, by who communicates",
    legend=(
        "A forward and a backward through layers that FSDP2 shards. exposed: a step less one whose collectives "
        "move nothing (compute_only), in the same round; recovered: of the exposed time of NCCL (Gloo on CPUs). "
        "Medians over rounds of the slowest rank; the least of each case is bold. Loss, gradient norm and "
        "gradients were compared with those of NCCL. compute_only still copies shards in and parameters out; "
        "compute_only_straight copies none out. Where the rest goes (with --profile): the stream of the "
        "computation in one step of the first rank, less that of compute_only_straight; GEMMs by transfers run "
        "next to a collective or a copy between peers for half of their time and more; waits are pauses of the "
        "stream."
    ),
    row=FsdpRow,
    tables=fsdp_tables,
    plots=lambda rows, results, folder: draw_steps(rows, results.where, folder),
    measure=_measure,
    predict_row=predict_row,
    check=_check,
    progress="training steps",
)

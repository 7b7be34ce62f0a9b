"""A training step of layers that FSDP2 shards: how much of it is communication, by who communicates.

One model serves all implementations, which take turns round by round: what FSDP2 gathers and scatters by is switched
before each step, uncounted (``ways.py``). A step begins on idle devices behind a barrier, so that its first gather and
its last scatter stand uncovered, as they do behind an optimizer; the host has a head start, as it has in a training.

Before it is timed each implementation makes two steps that are compared with the library's: one with every shard's rows
moved on by one, in which parameters that an earlier gather had left would be wrong, and one without.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sidelane.errors import UnavailableError
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.fsdp import FsdpOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import MOST_HIDDEN_US, Meter
from sidelane_lab.harness.options import require_all
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import Study
from sidelane_lab.harness.ways import Job, Problem, Rounds, Way, outcome
from sidelane_lab.studies.fsdp.cases import FLOORS, StepCase, predict_row
from sidelane_lab.studies.fsdp.kernels import ATTENTION, COPY_IN, COPY_OUT, GEMM, Profiled, profiled
from sidelane_lab.studies.fsdp.rows import FsdpRow, draw_steps, fsdp_tables
from sidelane_lab.studies.fsdp.step import TOLERANCE, StepOutcome, Stepper
from sidelane_lab.studies.fsdp.ways import STILL, STRAIGHT_STILL, CommunicationWays, NcclEngines, names_on
from sidelane_lab.studies.steps import exposed_ms, recovered_percent


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
    # The library always takes part: the others are held against it.
    library, *others = names_on(rank.device.type)
    names = [library, *(name for name in others if name in (options.implementations or others))]
    meter = make_meter(rank, options.step_s)
    engines = functools.cache(lambda: NcclEngines(rank.device, options.step_s, meter))
    for case in cases:
        sender.step(str(case))
        trial = Trial(case, rank, meter, options, engines)
        with meter.on_stream():
            yield from rows_of(trial, names)
            refused = meter.attempt(trial.close)
        if refused is not None:
            sender.note(f"{case} could not be closed: {refused}")
        del trial
        gc.collect()  # a model is full of cycles; the next one needs its memory
        if not on_cpu:
            torch.cuda.empty_cache()
    if engines.cache_info().currsize:
        engines().close()


class Trial:
    """A case on one rank: a model on which implementations take turns.

    Args:
        case: sizes.
        rank: of this process.
        meter: of all ranks.
        options: of the study.
        engines: makes NCCL on copy engines, or returns it where it is made.

    Attributes:
        first: outcomes of the library's two steps before the rounds; empty until it has made them.
        gradients: this rank's, of the library's first step.
        last: outcome of the library's step after the rounds.
        begun: names of the implementations that have begun a step, which another model gets, too.
    """

    def __init__(
        self, case: StepCase, rank: Rank, meter: Meter, options: FsdpOptions, engines: Callable[[], Any]
    ) -> None:
        self.case, self.rank, self.meter, self.options, self._engines = case, rank, meter, options, engines
        self.first: list[StepOutcome] = []
        self.gradients: list[torch.Tensor] = []
        self.last: StepOutcome | None = None
        self.begun: dict[str, None] = {}
        self._lost: str | None = None
        self._made: tuple[Stepper, CommunicationWays] | None = None

    @property
    def stepper(self) -> Stepper:
        """The model."""
        return self._model[0]

    @property
    def ways(self) -> CommunicationWays:
        """The implementations that are attached to the model."""
        return self._model[1]

    @property
    def _model(self) -> tuple[Stepper, CommunicationWays]:
        """The model, made if there is none, always with the same parameters and data. Collective then.

        Raises:
            UnavailableError: on every rank, from the first time on that some rank could not make it.
        """
        if self._made is None and self._lost is None:
            made = list[tuple[Stepper, CommunicationWays]]()
            self._lost = self.meter.attempt(lambda: made.append(self._new_model()))
            self._made = made[0] if self._lost is None else None
        if self._made is None:
            raise UnavailableError(f"the model cannot be made: {self._lost}")
        return self._made

    def _new_model(self) -> tuple[Stepper, CommunicationWays]:
        options, dtype = self.options, getattr(torch, self.options.reduce_dtype)
        stepper = Stepper(self.case, self.rank, self.meter, dtype, optimizer=options.optimizer, seed=options.seed)
        ways = CommunicationWays(stepper.model, self.rank, self._engines, options.step_s)
        for name in self.begun:
            ways.attach(name)
        return stepper, ways

    def break_off(self, name: str) -> None:
        """Go on with another model: FSDP2 is in the middle of a step of this one. Collective."""
        del self.begun[name]
        self.meter.attempt(self.close)
        self.last = None  # the next model has made no step
        gc.collect()

    def close(self) -> None:
        """Let go of the model. Collective."""
        made, self._made = self._made, None
        if made is not None:
            stepper, ways = made
            stepper.forget()
            ways.close()


class FsdpWay(Way):
    """An implementation of the collectives of a step.

    Before the rounds two of its steps are compared with the library's, in one of which every shard's rows are moved on
    by one, and after them one step.

    Args:
        name: of the implementation.
        library: name of the one that it is compared with.
        trial: the model.

    Attributes:
        result: outcome of the step as it is timed, before the rounds.
        peak_mb: most memory of a rank in that step, and what the implementation keeps; None on CPUs.
        note: what to know about it.
    """

    result: StepOutcome | None = None
    peak_mb: float | None = None
    note = ""

    def __init__(self, name: str, library: str, trial: Trial) -> None:
        if name != library and not trial.first:
            raise UnavailableError(f"{library} has made no step")
        trial.ways.attach(name)
        self.label, self._library, self._trial = name, library, trial
        self._moved: tuple[float, ...] = ()
        self._measured_mb: float | None = None
        self._is_timed = self._is_under_way = False

    def fill(self, seed: int) -> None:
        """Leave parameters and data as they are."""
        self._is_under_way = True
        self._trial.begun[self.label] = None

    def run(self) -> None:
        stepper = self._trial.stepper
        self._trial.ways.switch(self.label)
        stepper.move_rows(1)
        stepper.tried(self.label)
        if self.label == self._library:
            self._trial.gradients = stepper.kept()
        self._moved = (*stepper.sums(), *stepper.apart(self._trial.gradients))
        stepper.move_rows(-1)
        self._measured_mb = stepper.measured(self.label)

    def run_again(self) -> None:
        self._is_timed = True
        self._trial.ways.switch(self.label)
        self._trial.stepper.tried(self.label)

    def error(self, seed: int) -> str | None:
        trial, self._is_under_way = self._trial, False
        if not self._moved:
            return "there is no step"
        kept_mb = trial.ways.attached[self.label].held() / 1e6
        mine = [*trial.stepper.sums(), *self._moved, self._measured_mb or 0.0, kept_mb]
        losses, squares, *moved, peaks, kept = zip(*trial.meter.of_all_ranks(mine), strict=True)
        last = StepOutcome.of(losses, squares)
        if self._is_timed:
            trial.last = trial.last or last
            wrong = None if self.label in FLOORS else last.differs(trial.last)
            return None if wrong is None else f"after the rounds: {wrong}"
        outcomes = [StepOutcome.of(*moved[:2]), last]
        trial.first = trial.first or outcomes
        if self.label not in FLOORS:
            distance = math.sqrt(sum(moved[2]) / max(sum(moved[3]), 1e-30))
            found = [one.differs(wanted) for one, wanted in zip(outcomes, trial.first, strict=True)]
            if not distance <= TOLERANCE:
                found.append(f"gradients are {100 * distance:.2g}% from those of {self._library}")
            if any(found):
                return "; ".join(filter(None, found))
            self.result = last
            self.peak_mb = None if self._measured_mb is None else max(peaks) + max(kept)
        return None

    def settle(self) -> None:
        self.note = self._trial.ways.attached[self.label].note()

    def close(self) -> None:
        if self._is_under_way:
            self._trial.break_off(self.label)


def rows_of(trial: Trial, names: Sequence[str]) -> list[FsdpRow]:
    """Compare implementations in a case, the library first. Collective.

    Returns:
        Rows, the same on every rank but for what was profiled, which the first one has.
    """
    options, library = trial.options, names[0]

    def timed(ready: dict[str, FsdpWay]) -> Mapping[str, Rounds]:
        # The last way may have broken off. Without another model the last checks fail, and say why.
        if trial.meter.run("the model", lambda: trial.stepper) is not None:
            return {}
        jobs = {
            name: Job(
                trial.stepper.step, hide_launch_us=MOST_HIDDEN_US, before=functools.partial(trial.ways.switch, name)
            )
            for name in ready
        }
        return trial.meter.in_turns(jobs, options)

    makers = {name: functools.partial(FsdpWay, name, library, trial) for name in names}
    found = {one.key: one for one in trial.meter.compare(makers, itertools.count(), timed)}
    kernels: dict[str, Profiled | None] = {}

    def profile(name: str) -> None:
        trial.ways.switch(name)
        trial.stepper.tried(name)
        kernels[name] = profiled(trial.rank, functools.partial(trial.stepper.tried, name))

    for name, one in found.items():
        if one.problem is None and one.way is not None and options.profile:
            refused = trial.meter.run(name, functools.partial(profile, name))
            if refused is not None:
                one.way.note = "; ".join(filter(None, (one.way.note, f"not profiled: {refused.text}")))
                trial.break_off(name)
    floor, least = (None if name not in found else found[name].rounds for name in (STILL, library))
    rows = []
    for name, one in found.items():
        problem, lost = one.problem, found[library].problem
        if lost is not None and name != library:
            problem = Problem(f"{library}, which it is held against: {lost.text}")
        times, profiled_step = (None, None) if problem is not None else (one.rounds, kernels.get(name))
        columns = outcome(times, problem, one.way.note if one.way is not None else "")
        result = None if one.way is None else one.way.result
        of_rounds: dict[str, Any] = {f"{figure}_ms": _ms(columns[f"{place}_us"]) for figure, place in FIGURES}
        rows.append(
            FsdpRow(
                model=trial.case.model.name,
                layers=trial.case.model.layers,
                seq=trial.case.seq,
                batch=trial.case.batch,
                reduce_dtype=options.reduce_dtype,
                optimizer=options.optimizer,
                implementation=name,
                **of_rounds,
                exposed_ms=exposed_ms(times, floor),
                recovered_percent=recovered_percent(times, least, floor),
                loss=None if result is None else result.loss,
                grad_norm=None if result is None else result.grad_norm,
                peak_mb=None if one.way is None else one.way.peak_mb,
                correct=None if problem is None and name in FLOORS else columns["correct"],
                note=columns["note"],
                **({} if profiled_step is None else _figures(profiled_step, kernels.get(STRAIGHT_STILL))),
            )
        )
    return rows


FIGURES = (("step", "time"), ("p10", "p10"), ("p90", "p90"))


def _ms(time_us: float | None) -> float | None:
    return None if time_us is None else time_us / 1e3


def _figures(kernels: Profiled, floor: Profiled | None) -> dict[str, Any]:
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

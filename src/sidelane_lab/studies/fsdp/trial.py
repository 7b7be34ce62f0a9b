"""One case with its model: implementations are attached and compared, take turns, and are looked into."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from sidelane.cli.launch import Rank
from sidelane_lab.harness.measure import MOST_HIDDEN_US, Job, Meter, Problem, Rounds
from sidelane_lab.studies.fsdp.profiled import Profiled, profiled
from sidelane_lab.studies.fsdp.step import TOLERANCE, Outcome, Stepper
from sidelane_lab.studies.fsdp.ways import FLOORS, Ways


@dataclasses.dataclass(slots=True)
class Found:
    """What is known of an implementation.

    Attributes:
        outcome: of the step that was compared.
        held_mb: what it keeps from step to step, of the rank that keeps the most; None on CPUs.
        note: what to know about it.
        rounds: its times.
        kernels: of one step.
    """

    outcome: Outcome
    held_mb: float | None
    note: str = ""
    rounds: Rounds | None = None
    kernels: Profiled | None = None


class Trial:
    """A case on one rank, together with the other ranks.

    Args:
        rank: of this process.
        meter: of all ranks.
        make: the model with its data.
        engines: NCCL on copy engines, where there is any.
        timeout_s: of Sidelane's waits.

    Attributes:
        found: of each implementation that is right.
        problems: of each other one.
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
        self._ways = Ways(self._stepper.model, rank, meter, engines, timeout_s)
        self._wanted: list[Outcome] = []
        self.found: dict[str, Found] = {}
        self.problems: dict[str, Problem] = {}

    def prepare(self, names: Sequence[str]) -> bool:
        """Attach implementations and compare each with the first. Collective.

        Returns:
            False where a step broke off: nothing can be run on this model any more.
        """
        library = names[0]
        for name in names:
            problem = self._ways.attach(name)
            if problem is not None:
                self.problems[name] = Problem(problem)
            elif not self._compare(name, library):
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
        wanted: Outcome | None = None
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
        """One step of each implementation under a profiler, on the first rank. Collective."""
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
        """Two steps; the second one's outcome is the row's. False where a step broke off."""
        stepper, outcomes = self._stepper, list[Outcome]()
        distance = 0.0

        def moved() -> None:
            self._ways.switch(name)
            stepper.move_rows(1)
            stepper.tried(name)

        def again() -> None:
            stepper.move_rows(-1)
            peaks.append(stepper.measured(name))

        peaks: list[float | None] = []
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
        self.found[name] = Found(outcomes[1], held, way.note())
        return True

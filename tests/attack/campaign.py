"""The campaign: case after case, each from a seed and its number alone, until the time is over.

A case draws right programs that follow each other in one communicator, or makes some up (``messages``, ``sums``), and
holds ``verify`` to four rules. A finding is what breaks one of the first three.

1. It accepts right programs, also in other words (``variations``), and they survive all schedules.
2. What it accepts of their mutants and of what was made up survives all schedules.
3. More rounds do not change what it says.
4. What it refuses for a race, a deadlock, a lost signal or wrong bytes fails in a schedule. How often none shows that
   is counted: it may be that too few were tried, or that ``verify`` asks for more than it must.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

from attack.interpreter import run
from attack.machine import Failure, Machine
from attack.messages import messages
from attack.mutations import mutants
from attack.sequences import sequence
from attack.sums import sums
from attack.variations import variation
from sidelane.errors import ProgramError
from sidelane.program.ir import Program
from sidelane.program.verify import verify, verify_sequence

SHOWN = ("race", "deadlock", "lost signal", "wrong bytes")
"""Refusals that a schedule should show."""

MUTANTS = 12
"""In a case."""

MADE_UP = "made up"
"""Counted like the name of a mistake."""

MORE_ROUNDS = 5
"""What ``verify`` is asked for now and then, beside what it unrolls of its own accord."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How many schedules are tried: of right programs, of accepted mutants, and of refused ones until one fails."""

    right: int = 30
    accepted: int = 60
    refused: int = 60


EFFORT = Effort()


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Where ``verify`` and the interpreter disagree.

    Attributes:
        seed: of the campaign.
        case: number of the case.
        mistakes: put into the programs; none in right programs that are refused or fail.
        failure: what a schedule shows, or what ``verify`` says of right programs.
        programs: one an invocation.
        schedule: seed of the schedule that fails; None where it takes none.
    """

    seed: int
    case: int
    mistakes: tuple[str, ...]
    failure: str
    programs: tuple[Program, ...]
    schedule: int | None = None


@dataclasses.dataclass
class Tally:
    """What was tried.

    Attributes:
        cases, programs, schedules: how many.
        made: mutants by kind of mistake; several at once count as ``several``.
        accepted: of these, what ``verify`` let through.
        refused: the others, by what they were refused for.
        hidden: of these, what no schedule shows, of the kinds in ``SHOWN``.
        findings: where ``verify`` was wrong.
    """

    cases: int = 0
    programs: int = 0
    schedules: int = 0
    made: Counter[str] = dataclasses.field(default_factory=Counter)
    accepted: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    hidden: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what another one has counted, too."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, field.name, mine + theirs)


def attack(seed: int, number: int, effort: Effort = EFFORT) -> Tally:
    """Run one case."""
    return _Case(seed, number, effort).run()


class _Case:
    def __init__(self, seed: int, number: int, effort: Effort) -> None:
        self.seed, self.number, self.effort = seed, number, effort
        self.rng = random.Random(f"{seed}:{number}")
        self.tally = Tally(cases=1)

    def run(self) -> Tally:
        if self.rng.random() < 0.2:
            for _ in range(MUTANTS):
                self._make_up()
            return self.tally
        programs = sequence(self.rng)
        self._right(programs)
        if self.rng.random() < 0.5:
            self._right(variation(programs, self.rng))
        if any(queue.commands for program in programs for queue in program.queues):
            for _ in range(MUTANTS):
                mistakes, mutant = mutants(programs, self.rng)
                if mutant and mutant != programs:
                    self._mutant(mistakes, mutant)
        return self.tally

    def _make_up(self) -> None:
        programs: tuple[Program, ...] = (self.rng.choice((messages, messages, sums))(self.rng),)
        mistakes: tuple[str, ...] = (MADE_UP,)
        if self.rng.random() < 0.4 and programs[0].queues:
            names, programs = mutants(programs, self.rng)
            mistakes += names
        self._mutant(mistakes, programs)

    def _right(self, programs: Sequence[Program]) -> None:
        self.tally.programs += len(programs)
        refusal = self._refusal((), programs)
        if refusal:
            self._find((), f"refused: {refusal[0]}", programs)
        self._survives((), programs, self.effort.right)

    def _mutant(self, mistakes: tuple[str, ...], programs: Sequence[Program]) -> None:
        kind = mistakes[0] if len(mistakes) == 1 or mistakes[0] == MADE_UP else "several"
        tally = self.tally
        tally.made[kind] += 1
        refusal = self._refusal(mistakes, programs)
        if not refusal:
            tally.accepted[kind] += 1
            self._survives(mistakes, programs, self.effort.accepted)
            return
        reason = reason_of(refusal)
        tally.refused[reason] += 1
        if reason in SHOWN and self._failure(programs, self.effort.refused) is None:
            tally.hidden[reason] += 1

    def _refusal(self, mistakes: tuple[str, ...], programs: Sequence[Program]) -> tuple[str, ...]:
        try:
            refusal = refused(programs)
            more = mistakes[:1] == (MADE_UP,) or self.rng.random() < 0.1  # what is made up is small
            again = refused(programs, rounds=MORE_ROUNDS) if more else refusal
        except Exception as error:  # whatever a program is like, verify has to say so in its own words
            self._find(mistakes, f"verify raised {error!r}", programs)
            return ("raised",)
        if bool(refusal) != bool(again):
            text = f"{MORE_ROUNDS} rounds change the verdict: {(*refusal, *again)[0]}"
            self._find(mistakes, text, programs)
        return refusal

    def _survives(self, mistakes: tuple[str, ...], programs: Sequence[Program], schedules: int) -> None:
        if failed := self._failure(programs, schedules):
            failure, invocations, schedule = failed
            self._find(mistakes, str(failure), invocations, schedule)

    def _failure(
        self, programs: Sequence[Program], schedules: int
    ) -> tuple[Failure, tuple[Program, ...], int | None] | None:
        invocations = unrolled(programs, self.rng)
        schedule: int | None = None
        try:
            machine = Machine(invocations)
            for _ in range(schedules):
                schedule = self.rng.getrandbits(32)
                self.tally.schedules += 1
                run(machine, schedule)
        except Failure as failure:
            return failure, invocations, schedule
        return None

    def _find(
        self, mistakes: tuple[str, ...], failure: str, programs: Sequence[Program], schedule: int | None = None
    ) -> None:
        found = Finding(self.seed, self.number, mistakes, failure, tuple(programs), schedule)
        self.tally.findings.append(found)


def unrolled(programs: Sequence[Program], rng: random.Random) -> tuple[Program, ...]:
    """Some rounds: at least two, and at least four invocations."""
    rounds = max(2, -(-4 // len(programs)))
    return tuple(programs) * (rounds + (rng.random() < 0.3))


def refused(programs: Sequence[Program], rounds: int | None = None) -> tuple[str, ...]:
    """What ``verify`` has against programs that follow each other round after round; empty if it accepts them."""
    try:
        if len(programs) > 1:
            verify_sequence(programs, **({"rounds": rounds} if rounds else {}))
        else:
            verify(programs[0], **({"invocations": rounds} if rounds else {}))
    except ProgramError as error:
        return error.violations
    return ()


def reason_of(refusal: Sequence[str]) -> str:
    """The kind of a refusal: the words that its first line begins with; ``rules`` for what needs no runs."""
    first = refusal[0]
    return next((kind for kind in (*SHOWN, "unpaired wait", "unpaired signal") if first.startswith(kind)), "rules")

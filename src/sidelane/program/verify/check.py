"""Proofs of ``verify``, in the order in which they build on each other.

1. structure: each command on its own, engines, flags (``structure``); values of flags (``values``);
2. happens-before over unrolled invocations: deadlocks, lost signals, signals without a wait (``order``, ``flags``,
   ``counters``, ``progress``);
3. races between commands, and between commands and callers (``races``);
4. provenance: every output holds what the collective defines, bit by bit (``provenance``).

Why two invocations suffice for any number. By the rules of ``values``, the effect of a signal on a wait depends only on
which invocation each of them belongs to, never on which number an invocation has. And a wait must need a signal of its
own invocation (``flags``, ``counters``). So the order of two events inside one invocation is the same in every one, and
so is the order between events of two successive invocations: invocations are a chain of equal links. Any further error
needs two of them.

- *A flag starts at 0*, and at the value that the invocation before has left: the first and the second invocation.
- *A signal of a later invocation* erases one that was not seen yet, or spoils the value that a wait needs: the signal
  of the next one does so first. Those behind it come after it, in the same queue.
- *Commands of two invocations race.* Commands a of i and b of j > i+1 that share bytes share them with b of i+1 too,
  where a is proven to come before b; and each b comes before the next b.
- *Bytes may be stale.* Outputs are right whatever staging held before (``provenance``).

Programs that alternate (two flag sets) meet their own flags again two invocations later, so a *round* of all of them
takes the place of one invocation. Tests compare the verdicts with those over five.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator, Sequence

from sidelane.errors import ProgramError
from sidelane.fields import an, several, whole
from sidelane.program.ir import Program
from sidelane.program.verify.counters import Counters
from sidelane.program.verify.flags import check_values
from sidelane.program.verify.layout import Layout, lay_out_programs
from sidelane.program.verify.order import HappensBefore, check_progress
from sidelane.program.verify.provenance import check_provenance
from sidelane.program.verify.structure import check_structure

_PROGRAM, _PROGRAMS = an(Program), several(an(Program), Program)

INVOCATIONS = 2
"""Number of unrolled invocations: one on fresh flags, and one behind it (see above)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """Extent of a successful verification.

    Attributes:
        commands: number of commands in one invocation (of all programs of a sequence).
        invocations: number of invocations unrolled back to back.
        pairs: number of pairs of accesses to the same bytes that were compared.
        seconds: time that the verification took.
    """

    commands: int
    invocations: int
    pairs: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"proved: {self.commands} commands, {self.invocations} invocations back to back, "
            f"{self.pairs} pairs of accesses compared, {self.seconds * 1e3:.1f} ms"
        )


def verify(program: Program, *, invocations: int = INVOCATIONS) -> Verification:
    """Prove that ``program`` does what its collective defines, alone and invoked again and again back to back.

    Args:
        program: program to prove.
        invocations: number of invocations to unroll, > 0. Fewer than the default prove less.

    Raises:
        ProgramError: the program is wrong; the text names the ranks, the commands and the bytes.
        TypeError: ``program`` is no program, or ``invocations`` is no whole number.
        ValueError: ``invocations`` is not positive.
    """
    program, invocations = _PROGRAM("verify: program", program), whole("verify: invocations", invocations)
    if invocations < 1:
        raise ValueError(f"verify: invocations (value={invocations}, allowed=1 or more)")
    return _verify((program,), invocations)


def verify_sequence(programs: Sequence[Program], *, rounds: int = INVOCATIONS) -> Verification:
    """Prove programs of one communicator, which share flags and staging, when they run back to back, round after round.

    Args:
        programs: programs in the order of one round; the same object may stand there more than once.
        rounds: number of rounds to unroll, > 0. Fewer than the default prove less.

    Raises:
        ProgramError: a program is wrong, or they disturb each other; the text names ranks, commands and bytes.
        TypeError: one is no program, or ``rounds`` is no whole number.
        ValueError: no programs, programs of different world sizes, or ``rounds`` is not positive.
    """
    given: tuple[Program, ...] = _PROGRAMS("verify_sequence: programs", programs)
    rounds = whole("verify_sequence: rounds", rounds)
    if not given or rounds < 1:
        raise ValueError(f"verify_sequence: needs programs and rounds (value={len(given)}, {rounds})")
    if len({program.world_size for program in given}) > 1:
        sizes = [program.world_size for program in given]
        raise ValueError(f"verify_sequence: programs of one communicator have one world size (value={sizes})")
    return _verify(given, rounds)


def _verify(programs: tuple[Program, ...], rounds: int) -> Verification:
    start = time.perf_counter()
    with _without_collections():
        return _proven(programs, rounds, start)


def _proven(programs: tuple[Program, ...], rounds: int, start: float) -> Verification:
    distinct = list({id(program): program for program in programs}.values())
    title = "verify: refused " + ", then ".join(f"{program.collective} {program.variant}" for program in programs)
    _refuse(title, [line for program in distinct for line in check_structure(program)])
    layout = lay_out_programs(programs * rounds)
    _refuse(title, check_values(layout))
    order = go_through(layout)
    _refuse(title, check_progress(order))
    _refuse(title, [*order.flags.violations(), *order.accesses.describe()])
    _refuse(title, check_provenance(order))
    return Verification(
        commands=sum(len(queue.commands) for program in programs for queue in program.queues),
        invocations=len(programs) * rounds,
        pairs=order.accesses.pairs,
        seconds=time.perf_counter() - start,
    )


def go_through(layout: Layout) -> HappensBefore:
    """Find the order of events, again until all claims about counters hold."""
    counters = Counters()
    while True:
        order = HappensBefore(layout, counters)
        if order.blocked or not counters.revise(order.flags.counters.values()):
            return order


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Turn off garbage collection: no object here refers to itself, and the search takes a third of a large proof."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse(title: str, violations: Sequence[str]) -> None:
    if violations:
        raise ProgramError(title, violations)

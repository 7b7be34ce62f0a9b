"""``verify``: everything that is proven about a program, in the order in which the proofs build on each other.

1. structure: each command on its own, engines, flags, values (``structure``);
2. happens-before over unrolled invocations: deadlocks, lost signals, signals without a wait (``order``, ``flags``);
3. races between commands, and between commands and callers (``races``);
4. provenance: every output holds what the collective defines (``provenance``).

Why three invocations speak for any number. Invocations are alike: the same commands in the same queues, tied to their
neighbours by the same edges. Four things could still go wrong later.

- *Flags start at 0 only once.* So invocation 1 is special, and invocation 2 stands for all that find used flags.
- *Later signals may reach earlier waits.* Waits of invocation i are proven with the signals of i+1 in play. Those of
  i+2 come after those of i+1 in the same queues, so they leave a larger past behind them and take nothing from what
  the wait proves; where i+1's cannot be seen because they come after the wait, neither can i+2's. Invocation 2 has
  a neighbour on either side, and its proof is the step from any invocation to the next.
- *Commands of distant invocations may race.* Commands a of i and b of j > i+1 that share bytes share them with b of
  i+1 too, where a is proven to come before b; and each b comes before the next b.
- *Bytes may be stale.* Origins are labelled by invocation; what invocation 3 finds in staging, any later one finds.

Programs that alternate (two flag sets) meet their own flags again two invocations later, so a *round* of all of them
takes the place of one invocation. Epochs are unrolled in steps of 1 and 2, since a communicator may skip some.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from sidelane.errors import ProgramError
from sidelane.program.ir import Program
from sidelane.program.verify.flags import check_flags, check_progress
from sidelane.program.verify.order import Order
from sidelane.program.verify.provenance import check_provenance
from sidelane.program.verify.races import check_races
from sidelane.program.verify.structure import check_structure
from sidelane.program.verify.unroll import unroll

INVOCATIONS = 3
"""The first, one with a neighbour on either side, and the last (see above)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at to accept a program.

    Attributes:
        commands: in one invocation (of all programs of a sequence).
        invocations: unrolled back to back.
        pairs: pairs of accesses to the same bytes that were compared.
        seconds: that the verification took.
    """

    commands: int
    invocations: int
    pairs: int
    seconds: float


def verify(program: Program, *, invocations: int = INVOCATIONS) -> Verification:
    """Prove that ``program`` does what its collective defines, alone and invoked again and again back to back.

    Args:
        program: what to prove.
        invocations: to unroll, > 0. Fewer than the default prove less.

    Raises:
        ProgramError: the program is wrong; the text names the ranks, the commands and the bytes.
        ValueError: ``invocations`` is not positive.
    """
    if invocations < 1:
        raise ValueError(f"verify: invocations (value={invocations}, allowed=1 or more)")
    return _verify((program,), invocations)


def verify_sequence(programs: Sequence[Program], *, rounds: int = INVOCATIONS) -> Verification:
    """Prove programs of one communicator, which share flags and staging, when they run back to back, round after round.

    Args:
        programs: in the order of one round; the same object may stand there more than once.
        rounds: to unroll, > 0. Fewer than the default prove less.

    Raises:
        ProgramError: a program is wrong, or they disturb each other; the text names ranks, commands and bytes.
        ValueError: no programs, programs of different world sizes, or ``rounds`` is not positive.
    """
    if not programs or rounds < 1:
        raise ValueError(f"verify_sequence: needs programs and rounds (value={len(programs)}, {rounds})")
    if len({program.world_size for program in programs}) > 1:
        sizes = [program.world_size for program in programs]
        raise ValueError(f"verify_sequence: programs of one communicator have one world size (value={sizes})")
    return _verify(tuple(programs), rounds)


def _verify(programs: tuple[Program, ...], rounds: int) -> Verification:
    start = time.perf_counter()
    distinct = list({id(program): program for program in programs}.values())
    title = "verify: refused " + ", then ".join(f"{program.collective} {program.variant}" for program in programs)
    _refuse(title, [line for program in distinct for line in check_structure(program)])
    unrolled = unroll(programs * rounds)
    order = Order(unrolled)
    _refuse(title, check_progress(order))
    races, pairs = check_races(order)
    _refuse(title, [*check_flags(order), *races])
    _refuse(title, check_provenance(order))
    return Verification(
        commands=sum(len(queue.commands) for program in programs for queue in program.queues),
        invocations=len(programs) * rounds,
        pairs=pairs,
        seconds=time.perf_counter() - start,
    )


def _refuse(title: str, violations: Sequence[str]) -> None:
    if violations:
        raise ProgramError(title, violations)

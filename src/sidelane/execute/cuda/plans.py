"""The plans of one rank's programs: each is worked out once, wherever the buffers of a call lie."""

from __future__ import annotations

from sidelane.execute.cuda.calls import Plan
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.program.ir import Program, has_epochs

MOST_PLANS = 1024


class Plans:
    """What a program becomes on this rank's streams.

    A call at new addresses is bound anew, and most of what that took was to order the program's commands again.

    Args:
        rank: whose queues.
        features: of the driver.
    """

    def __init__(self, rank: int, features: DriverFeatures) -> None:
        self._rank, self._features = rank, features
        self._known: dict[int, tuple[Program, Plan]] = {}  # by identity, of programs that are kept: to hash one is slow

    def of(self, program: Program) -> Plan:
        """The plan of a program; that of a graph where it has no epochs.

        Raises:
            ValueError: the program has commands that the driver does not; the text names the first.
        """
        known = self._known.get(id(program))
        if known is not None:
            return known[1]
        plan = plan_calls(
            program,
            self._rank,
            peer_writes=bool(self._features.peer_writes),
            copy_batches=self._features.copy_batches,
            captured=not has_epochs(program),
        )
        if len(self._known) >= MOST_PLANS:
            del self._known[next(iter(self._known))]
        self._known[id(program)] = program, plan
        return plan

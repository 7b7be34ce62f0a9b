"""The plans of one rank's programs: each is worked out once, wherever the buffers of a call lie."""

from __future__ import annotations

import functools

from sidelane.execute.cuda.calls import Plan, Route
from sidelane.execute.cuda.count import counts_of
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.execute.submitted import Counts
from sidelane.program.ir import Program, has_epochs
from sidelane.program.once import Once


class Plans:
    """What a program becomes on this rank's streams.

    A call at new addresses is bound anew, and most of what that took was to order the program's commands again.

    Args:
        rank: whose queues.
        features: of the driver.

    Attributes:
        of: the plan of a program; that of a graph where it has no epochs. Raises ValueError where the program has
            commands that the driver does not.
    """

    def __init__(self, rank: int, features: DriverFeatures) -> None:
        self._rank, self._features = rank, features
        self.of: Once[Program, Plan] = Once(self._plan)
        self._counts = {route: Once(functools.partial(counts_of, route=route)) for route in Route}

    def counts(self, plan: Plan, route: Route) -> Counts:
        """What an invocation submits that takes a route."""
        return self._counts[route](plan)

    def _plan(self, program: Program) -> Plan:
        return plan_calls(
            program,
            self._rank,
            peer_writes=bool(self._features.peer_writes),
            copy_batches=self._features.copy_batches,
            captured=not has_epochs(program),
        )

"""The plans of one rank's programs: each is worked out once, wherever the buffers of a call lie."""

from __future__ import annotations

import functools

from sidelane.execute.cuda.calls import Plan, Route
from sidelane.execute.cuda.count import counts_of
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.execute.submitted import Counts
from sidelane.program.ir import Program
from sidelane.program.once import Once


class Plans:
    """What a program becomes on this rank's streams.

    A call at new addresses is bound anew, and most of what that took was to order the program's commands again.

    Args:
        rank: whose queues.
        features: of the driver.

    """

    def __init__(self, rank: int, features: DriverFeatures) -> None:
        self._rank, self._features = rank, features
        self._plans = {captured: Once(functools.partial(self._plan, captured)) for captured in (False, True)}
        self._counts = {route: Once(functools.partial(counts_of, route=route)) for route in Route}

    def of(self, program: Program, captured: bool = False) -> Plan:
        """The plan of a program, for a graph or not.

        Raises:
            ValueError: the program has commands that the driver does not.
        """
        return self._plans[captured](program)

    def counts(self, plan: Plan, route: Route) -> Counts:
        """What an invocation submits that takes a route."""
        return self._counts[route](plan)

    def _plan(self, captured: bool, program: Program) -> Plan:
        return plan_calls(
            program,
            self._rank,
            peer_writes=bool(self._features.peer_writes),
            copy_batches=self._features.copy_batches,
            captured=captured,
        )

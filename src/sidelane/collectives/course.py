"""Where the inputs of calls that are alike lie on all ranks, while the ranks go on looking: what comes next, and when
it did not come.

As ``pattern``, but for calls that are heard of later, whether they went ahead or not (``learning``). All ranks keep the
same of it, since it changes only with what all of them have read.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Set

from sidelane.collectives.pattern import LEAST_ALIKE, LONGEST, PATIENCE, Sources

Names = frozenset[tuple[int, str]]
"""Owners and names of allocations."""

CAUTION = 4
"""After something else came than was expected, so many times as many calls must have been alike."""

VAIN = 16
"""A call for which some rank had nothing to offer takes as much patience as so many others."""


class Course:
    """Of the calls of one signature in a lane.

    Attributes:
        given_up: nothing came again for too long; nobody offers anything for such calls any more.
    """

    def __init__(self) -> None:
        self.given_up = False
        self._least = LEAST_ALIKE
        self._period: tuple[Sources, ...] = ()
        self._next = 0
        self._needs: Names = frozenset()  # of the period: inputs, and the outputs of its last calls
        self._restart()

    def settled(self, sources: Sources | None, names: Names = frozenset(), *, may_wait: bool = True) -> None:
        """Take where inputs lay in a call that all have heard of; None: some rank offered nothing.

        Args:
            sources: of all ranks.
            names: of what they have offered, outputs too.
            may_wait: a rank for which something else comes than its peers expect may wait for them.
        """
        if self.given_up:
            return
        if self._period:
            if self._period[self._next] == sources:
                self._next = (self._next + 1) % len(self._period)
                self._note(sources, names)
                return
            self._least *= CAUTION
            self._restart()
            if not may_wait:
                self.give_up()
                return
        if sources is None:
            self._restart(self._calls + VAIN)
        else:
            self._learn(sources, names)
        if not self._period and self._calls >= PATIENCE:
            self.give_up()

    def forget(self) -> None:
        """Calls came in between of which not all have heard."""
        self._restart(self._calls)

    def expected(self, later: int) -> Sources:
        """Where inputs lie in a call so many calls behind those that were settled, the next one being 0."""
        return self._period[(self._next + later) % len(self._period)]

    def is_known(self, usable: Set[tuple[int, str]]) -> bool:
        """True if what comes next is known, and all ranks have mapped it."""
        return bool(self._period) and self._needs <= usable

    def give_up(self) -> None:
        """There is no use in it."""
        self._restart()
        self.given_up = True

    def drop(self, owner: int, name: str) -> None:
        """An allocation is mapped no more."""
        if any((owner, name) in names for _, names in self._seen):
            self._restart()

    def _restart(self, calls: int = 0) -> None:
        self._period, self._needs = (), frozenset()
        self._seen: collections.deque[tuple[Sources, Names]] = collections.deque(maxlen=LONGEST)  # the last one first
        self._alike: dict[int, int] = {}  # calls in a row that were as the one so many before, by that number
        self._calls = calls

    def _note(self, sources: Sources, names: Names) -> None:
        self._seen.appendleft((sources, names))
        if not names <= self._needs:
            self._needs = self._needed()

    def _needed(self) -> Names:
        return frozenset().union(*(names for _, names in itertools.islice(self._seen, len(self._period))))

    def _learn(self, sources: Sources, names: Names) -> None:
        self._calls += 1
        alike: dict[int, int] = {}
        for period, (before, _) in enumerate(self._seen, 1):
            if before == sources:
                alike[period] = self._alike.get(period, 0) + 1
        self._alike = alike
        self._seen.appendleft((sources, names))
        for period, count in alike.items():
            if count >= max(period, self._least):
                self._period = tuple(reversed([each for each, _ in itertools.islice(self._seen, period)]))
                self._next = 0
                self._needs = self._needed()
                return

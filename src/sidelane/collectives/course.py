"""Where the inputs of calls that are alike lie on all ranks, while the ranks go on looking: what comes next, and when
it did not come.

Calls are heard of later, whether they went ahead or not (``learning``). All ranks keep the same of it, since it changes
only with what all of them have read.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Set

Source = tuple[str, int] | None
"""Name of an allocation, and an offset in it; None for a rank that sends nothing."""

Inputs = tuple[Source, ...]
"""Where a rank's inputs lie: one, or those of a list."""

Sources = tuple[Inputs, ...]
"""Of all ranks."""

Names = frozenset[tuple[int, str]]
"""Owners and names of allocations."""

LONGEST = 128
"""Calls after which addresses are expected again at the latest: a model with so many layers of one size."""

LEAST_ALIKE = 3
"""Calls that were as the ones a period before, before that is relied upon."""

PATIENCE = 1024
"""Calls that bring nothing that comes again, before the ranks give up."""

CAUTION = 4
"""After something else came than was expected, so many times as many calls must have been alike."""

PATIENCE_WITH_NEW = 2 * LONGEST + 32
"""Calls in a row in which inputs lay where they had not lain before. A program that allocates elsewhere in its first
step than in all others, with the longest period there may be, has two steps of such calls."""

VAIN = 16
"""A call for which some rank had nothing to offer takes as much patience as so many others."""


class Course:
    """Of the calls of one signature in a lane.

    Attributes:
        given_up: nothing came again for too long; nobody offers anything for such calls any more.
        period: what comes again, call by call; another object whenever it is another one.
        next: which of these comes behind the calls that were settled.
    """

    def __init__(self) -> None:
        self.given_up = False
        self.period: tuple[Sources, ...] = ()
        self.next = 0
        self._least = LEAST_ALIKE
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
        if self.period:
            if self.period[self.next] == sources:
                self.next = (self.next + 1) % len(self.period)
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
        if not self.period and (self._calls >= PATIENCE or self._new >= PATIENCE_WITH_NEW):
            self.give_up()

    def forget(self) -> None:
        """Calls came in between of which not all have heard."""
        self._restart(self._calls)

    def is_known(self, usable: Set[tuple[int, str]]) -> bool:
        """True if what comes next is known, and all ranks have mapped it."""
        return bool(self.period) and self._needs <= usable

    def give_up(self) -> None:
        """There is no use in it."""
        self._restart()
        self.given_up = True

    def drop(self, owner: int, name: str) -> None:
        """An allocation is mapped no more."""
        if any((owner, name) in names for _, names in self._seen):
            self._restart(0 if self.period else self._calls)

    def _restart(self, calls: int = 0) -> None:
        self.period, self._needs = (), frozenset()
        self._seen: collections.deque[tuple[Sources, Names]] = collections.deque(maxlen=LONGEST)  # the last one first
        self._alike: dict[int, int] = {}  # calls in a row that were as the one so many before, by that number
        self._calls, self._new = calls, 0

    def _note(self, sources: Sources, names: Names) -> None:
        self._seen.appendleft((sources, names))
        if not names <= self._needs:
            self._needs = self._needed()

    def _needed(self) -> Names:
        return frozenset().union(*(names for _, names in itertools.islice(self._seen, len(self.period))))

    def _learn(self, sources: Sources, names: Names) -> None:
        self._calls += 1
        alike: dict[int, int] = {}
        for period, (before, _) in enumerate(self._seen, 1):
            if before == sources:
                alike[period] = self._alike.get(period, 0) + 1
        self._alike = alike
        self._new = 0 if alike else self._new + 1
        self._seen.appendleft((sources, names))
        for period, count in alike.items():
            if count >= max(period, self._least):
                self.period = tuple(reversed([each for each, _ in itertools.islice(self._seen, period)]))
                self.next = 0
                self._needs = self._needed()
                return

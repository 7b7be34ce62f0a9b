"""Where the inputs of calls that are alike lie on all ranks, from call to call: what comes again, and what comes next.

All ranks keep the same of it without a word: it changes only with what all of them have read (``ahead``).
"""

from __future__ import annotations

import collections
import itertools
from enum import Enum

Source = tuple[str, int] | None
"""Name of an allocation, and an offset in it; None for a rank that sends nothing."""

Sources = tuple[Source, ...]
"""Of all ranks."""

Guard = tuple[object, str, object]
"""Object, attribute, and the very object that lets a call pass."""

Turn = tuple[object, str, int, int]
"""Object, attribute, what it is in the call's turn, and what it is next."""

LONGEST = 128
"""Calls after which addresses are expected again at the latest: a model with so many layers of one size."""

LEAST_ALIKE = 3
"""Calls that were as the ones a period before, before that is relied upon."""

PATIENCE = 1024
"""Calls in which the ranks wait for each other's hosts and find nothing that comes again, before they give up."""


class State(Enum):
    """What the ranks do in such a call."""

    LEARNING = "offer, wait for the peers' hosts, and look for a period"
    AHEAD = "wait for nobody, and expect what comes next in the period"
    WATCHING = "offer and wait once more, to see whether the period goes on"
    GIVEN_UP = "stage"


class Pattern:
    """Of the calls of one signature in a lane.

    Attributes:
        state: see :class:`State`.
        period: what comes again, call by call; another object whenever it is another one.
    """

    def __init__(self) -> None:
        self.state = State.LEARNING
        self.period: tuple[Sources, ...] = ()
        self._next = 0
        self._seen: collections.deque[Sources] = collections.deque(maxlen=LONGEST)  # that of the last call comes first
        self._restart()

    def settled(self, sources: Sources) -> bool:
        """Take where inputs lay in a call that all ranks have offered memory for. True: from the next one on, ahead."""
        if self.state is State.WATCHING:
            if self.expected() == sources:
                self.state = State.AHEAD
                return True
            self._restart()
        if self.state is State.LEARNING:
            self._learn(sources)
        return self.state is State.AHEAD

    def expected(self) -> Sources:
        """Where inputs lie in the next call, which is taken as made."""
        found = self.period[self._next]
        self._next = (self._next + 1) % len(self.period)
        return found

    def guards(self) -> tuple[Guard, ...]:
        """What stands, besides the turn, while the last call is expected again: for code that asks as it repeats it."""
        return (self, "state", State.AHEAD), (self, "period", self.period)

    def turn(self) -> Turn:
        """Of the last call: whose turn it was, and whose it is next."""
        return self, "_next", (self._next - 1) % len(self.period), self._next

    def pause(self) -> None:
        """Some rank wishes to be heard: offer in the next call."""
        self.state = State.WATCHING

    def give_up(self) -> None:
        """There is no use in it."""
        self.state = State.GIVEN_UP
        self.period = ()
        self._seen.clear()

    def drop(self, rank: int, name: str) -> None:
        """An allocation is mapped no more."""
        if self.state is State.GIVEN_UP:
            return
        places = (sources[rank] for sources in itertools.chain(self.period, self._seen))
        if any(place is not None and place[0] == name for place in places):
            self._restart()

    def _restart(self) -> None:
        self.state = State.LEARNING
        self.period = ()
        self._seen.clear()
        self._alike = [0] * (LONGEST + 1)  # by period: calls in a row that were as the one so many before
        self._calls = 0

    def _learn(self, sources: Sources) -> None:
        self._calls += 1
        for period, before in enumerate(self._seen, 1):
            self._alike[period] = self._alike[period] + 1 if before == sources else 0
        self._seen.appendleft(sources)
        for period in range(1, len(self._seen) + 1):
            if self._alike[period] >= max(period, LEAST_ALIKE):
                self.period, self._next = tuple(reversed([*itertools.islice(self._seen, period)])), 0
                self.state = State.AHEAD
                return
        if self._calls >= PATIENCE:
            self.give_up()

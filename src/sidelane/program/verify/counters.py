"""Flags that many signals add to, and that their owner resets to 0: the signals that a wait requires, and errors.

A signal is *required* by a wait if the others that may come before the wait do not add up to its value. Without a
signal there is also nothing that comes after it, so its successors are left out of the sum with it.

Which others may come before the wait depends on what other waits require, of this invocation and of those behind it.
So the first claim is that each wait requires all signals of its invocation, alike in all invocations; ``order``
goes through the events with that; claims that do not hold then are given up; and so on until all claims hold.

That claims may rest on each other is right, by induction over any run: take the first wait that ends without a signal
that it is claimed to require. All additions by then came behind waits that ended before, for which
the claims hold. So nothing has been added that comes after the wait itself by them; the rest does not suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sidelane.program.verify.layout import FlagUse, Occurrence, event_at, name_event
from sidelane.program.verify.races import Clock


class Counters:
    """Claims about all counters: the signals that each wait requires, in every invocation alike."""

    def __init__(self) -> None:
        self._claims: dict[int, frozenset[int]] = {}

    def may_require(self, wait: Occurrence, add: Occurrence) -> bool:
        """Return True if it is (still) claimed that a wait requires a signal of its own invocation."""
        claims = self._claims.get(_step(wait))
        return wait[0] == add[0] and (claims is None or _step(add) in claims)

    def revise(self, counters: Iterable[Counter]) -> bool:
        """Give up the claims that do not hold; return True if there were any."""
        before, self._claims = self._claims, {}
        for counter in counters:
            for wait, adds in counter.required():
                held = self._claims.get(wait, before.get(wait, adds))
                self._claims[wait] = held & adds
        return self._claims != before


class _Use(NamedTuple):
    """A signal or a wait: its position in the order of events taken, and the clock of its past."""

    number: int
    chain: int
    tick: int
    past: Clock
    place: Occurrence
    value: int
    equal: int = 0


class Counter:
    """One flag in one order of events.

    Args:
        use: uses of the flag.
        known: claims about all counters.
        ticks: ticks of each chain.

    Attributes:
        violations: errors of the counter; filled by :meth:`judge`.
        awaited: signals that waits need; also filled by :meth:`judge`.
        sum: value of the flag in that order.
    """

    def __init__(self, use: FlagUse, known: Counters, ticks: list[int]) -> None:
        self.use, self._known, self._ticks = use, known, ticks
        self._adds: dict[Occurrence, _Use] = {}
        self._resets: list[_Use] = []
        self._waits: list[_Use] = []
        self._blocked: set[int] = set()
        self.sum = self._events = 0
        self.violations: list[str] = []
        self.awaited: set[int] = set()

    def add(self, value: int, chain: int, clock: Clock, place: Occurrence) -> Iterable[int]:
        """See ``FlagStates.add``."""
        self._adds[place] = self._note(value, chain, clock, place, signal=True)
        self.sum += value
        woken, self._blocked = self._blocked, set()
        return woken

    def reset(self, chain: int, clock: Clock, place: Occurrence) -> Iterable[int]:
        """See ``FlagStates.write``."""
        self._resets.append(self._note(0, chain, clock, place, signal=True))
        self.sum = 0
        return ()

    def wait(self, value: int, equal: int, chain: int, clock: Clock, place: Occurrence) -> bool:
        """See ``FlagStates.wait``."""
        if self.sum < value:
            self._blocked.add(chain)
            return False
        for add in self._adds.values():
            if self._known.may_require(place, add.place):
                np.maximum(clock, add.past, out=clock)
        self._waits.append(self._note(value, chain, clock, place, signal=False, equal=equal))
        return True

    def required(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield for each wait the signals of its invocation that it requires, if all claims hold."""
        for wait in self._waits:
            own = (add for add in self._required(wait) if add.place[0] == wait.place[0])
            yield _step(wait.place), frozenset(_step(add.place) for add in own)

    def judge(self) -> None:
        """Record the errors, once all claims hold."""
        if lost := next(self._lost(), None):
            self.violations.append(lost)
        for wait in self._waits:
            required = self._required(wait)
            fresh = [add for add in required if add.place[0] == wait.place[0]]
            self.awaited |= {_step(add.place) for add in fresh}
            if not fresh:
                name = name_event(event_at(wait.place))
                if required:
                    why = f"is already satisfied by {name_event(event_at(required[0].place))}"
                else:
                    why = "needs none of its signals: others suffice"
                self.violations.append(f"unpaired wait: {name} {why}")
            if not lost and (problem := self._miscounts(wait)):
                self.violations.append(problem)

    def _note(self, value: int, chain: int, clock: Clock, place: Occurrence, *, signal: bool, equal: int = 0) -> _Use:
        tick, past = self._ticks[chain], clock.copy()
        if signal:
            self._ticks[chain] = past[chain] = tick + 1
        self._events += 1
        return _Use(self._events, chain, tick, past, place, value, equal)

    def _before(self, first: _Use, second: _Use) -> bool:
        if first.chain == second.chain:
            return first.number < second.number
        return bool(second.past[first.chain] > first.tick)

    def _possible(self, wait: _Use) -> list[_Use]:
        """Return the adds that the wait may see: not after it, and not erased by a reset before it."""
        resets = [reset for reset in self._resets if self._before(reset, wait)]
        return [
            add
            for add in self._adds.values()
            if not self._before(wait, add) and not any(self._before(add, reset) for reset in resets)
        ]

    def _required(self, wait: _Use) -> list[_Use]:
        possible = self._possible(wait)
        total = sum(add.value for add in possible)
        found = []
        for add in possible:
            without = sum(other.value for other in possible if other is add or self._before(add, other))
            if total - without < wait.value:
                found.append(add)
        return found

    def _lost(self) -> Iterator[str]:
        """Yield resets that nothing orders with another write, which they then may erase."""
        for reset in self._resets:
            for other in [*self._adds.values(), *self._resets]:
                if other is reset or self._before(reset, other) or self._before(other, reset):
                    continue
                one, two = sorted((reset.place, other.place), key=lambda place: place[0])
                yield (
                    f"lost signal on flag {self.use.flag.index} of rank {self.use.flag.rank}: nothing orders "
                    f"{name_event(event_at(one))} and {name_event(event_at(two))}, so that one can erase the other"
                )

    def _miscounts(self, wait: _Use) -> str | None:
        """Check that the flag reaches the value of a wait, and stays there until the wait has seen it."""
        possible = self._possible(wait)
        least = sum(add.value for add in possible if self._before(add, wait))
        lost = f"lost signal: {name_event(event_at(wait.place))}"
        if least < wait.value:
            return f"{lost} is not sure to see {wait.value}: only {least} is certain to come before it"
        if wait.equal and sum(add.value for add in possible) != wait.value:
            return f"{lost} may never see {wait.value}: more can be added before it looks"
        for reset in self._resets:
            if not self._before(reset, wait) and not self._before(wait, reset):
                culprit = name_event(event_at(reset.place))
                return f"{lost} may never see {wait.value}: {culprit} may come first"
        return None


def _step(place: Occurrence) -> int:
    _, plan, number = place
    assert plan is not None
    return plan.first + number

"""Happens-before: go through all events once, with the events that precede each of them in every run.

Each chain has a *clock*: for every chain, how many *ticks* (publications of its past) it had made by the last time that
this one is sure to have heard of it. A signal leaves a copy of its chain's clock behind; a wait takes over the copy of
the signal that it needs. An event comes after another one, in every run, if its clock has the tick of that one.

The signal that a wait needs. The writes of a flag are in one order in every run (``flags`` refuses a program in which
they are not), so a flag goes through the same values in every run. A wait ends no earlier than the first of those
values that it accepts and that may still be there when it begins: the write that makes it must have happened. So one
way through the events finds the must-order of all runs, in whatever order chains take their turns on it: a wait looks
at the flag's whole history, not at its current value.

That this holds is shown by induction over any run. Take the first wait that ends without the write w that was found for
it. Some write x has satisfied it, and everything that must come before x has happened. If x comes after w in the flag's
order, w has happened. If x comes before w, the wait does not accept it, or it was overwritten before the wait began.

The cost is a few operations on clocks for each signal and wait, however many bytes move. If some events are never
reached, :func:`check_progress` says why: waits that never end, and cycles of waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from sidelane.program.verify.counters import Counters
from sidelane.program.verify.flags import FlagStates
from sidelane.program.verify.layout import (
    ADD,
    RUN,
    SIGNAL,
    Event,
    Layout,
    Occurrence,
    QueuePlan,
    event_at,
    name_chain,
    name_event,
)
from sidelane.program.verify.races import Accesses, Clock


class HappensBefore:
    """One pass through all invocations.

    Args:
        layout: layout of the programs.
        counters: claims about counters.

    Attributes:
        layout: layout of the programs.
        flags: findings about flags.
        accesses: findings about bytes.
        places: runs and user events, in one possible order.
        blocked: the wait at which each stuck chain stands. A correct program leaves none.
    """

    def __init__(self, layout: Layout, counters: Counters) -> None:
        self.layout = layout
        self.places: list[Occurrence] = []
        self.blocked: dict[int, Occurrence] = {}
        count, ranks, last = layout.chains, range(layout.world_size), len(layout.programs)
        self._clocks: list[Clock] = [np.zeros(count, np.int32) for _ in range(count)]
        self._ticks = [0] * count
        self.flags = FlagStates(layout, counters, self._ticks)
        self.accesses = Accesses(layout)
        # The work of each chain, from invocation to invocation, and its position: index into the work, and step.
        self._work: list[list[tuple[int, QueuePlan]]] = [[] for _ in range(count)]
        self._at = [0] * count
        self._step = [0] * count
        # For each rank: queues that have not come to the end of an invocation, clocks of those that have, and the last
        # invocation that is over. Chains that begin behind its caller, but for the one that is the caller's, too.
        self._left = [[0] * (last + 1) for _ in ranks]
        self._joining: dict[tuple[int, int], list[Clock]] = {}
        self._over = [-1] * len(ranks)
        self._held: list[set[int]] = [set() for _ in ranks]
        for invocation in range(1, last + 1):
            for plan in layout.plans_of(invocation):
                rank = plan.queue.rank
                self._work[plan.chain].append((invocation, plan))
                self._left[rank][invocation] += 1
                if plan.held and plan.chain != layout.users[rank]:
                    self._held[rank].add(plan.chain)
        self._ready: deque[int] = deque(chain for chain, work in enumerate(self._work) if work and not work[0][1].held)
        for rank in ranks:
            self._end(rank)
        while self._ready:
            self._advance(self._ready.popleft())

    def has_done(self, place: Occurrence) -> bool:
        """Return True if the pass has gone through a step of a queue."""
        invocation, plan, number = place
        assert plan is not None
        work, at = self._work[plan.chain], self._at[plan.chain]
        now = work[at][0] if at < len(work) else len(self.layout.programs) + 1
        return invocation < now or (invocation == now and number < self._step[plan.chain])

    def holder(self, place: Occurrence) -> Occurrence:
        """Return the wait that keeps a step from being reached."""
        _, plan, _ = place
        assert plan is not None
        if plan.chain in self.blocked:
            return self.blocked[plan.chain]
        rank = plan.queue.rank  # its caller waits for another queue
        return next(
            blocked for _, blocked in sorted(self.blocked.items()) if blocked[1] and blocked[1].queue.rank == rank
        )

    def _advance(self, chain: int) -> None:
        """Advance a chain as far as it can go."""
        clock, work, ticks = self._clocks[chain], self._work[chain], self._ticks
        flags, accesses = self.flags, self.accesses
        self.blocked.pop(chain, None)
        while self._at[chain] < len(work):
            invocation, plan = work[self._at[chain]]
            if plan.held and self._over[plan.queue.rank] < invocation - 1:
                return  # the caller will call
            for number in range(self._step[chain], len(plan.steps)):
                kind, _, target, base, per_epoch, equal = plan.steps[number]
                place = (invocation, plan, number)
                if kind == RUN:
                    accesses.run(target, (chain, ticks[chain], place), clock)
                    self.places.append(place)
                elif kind == SIGNAL:
                    self._ready.extend(flags.write(target, base + per_epoch * invocation, chain, clock, place))
                elif kind == ADD:
                    self._ready.extend(flags.add(target, base, chain, clock, place))
                elif not flags.wait(target, base + per_epoch * invocation, equal, chain, clock, place):
                    self._step[chain] = number
                    self.blocked[chain] = place
                    return
            self._at[chain] += 1
            self._step[chain] = 0
            self._finish(invocation, plan, clock)

    def _finish(self, invocation: int, plan: QueuePlan, clock: Clock) -> None:
        """Record that a queue has come to its end in an invocation."""
        rank, chain = plan.queue.rank, plan.chain
        if chain != self.layout.users[rank]:
            self._ticks[chain] = clock[chain] = self._ticks[chain] + 1
            # Queues that are not held may go on before the caller has joined them.
            self._joining.setdefault((rank, invocation), []).append(clock if plan.held else clock.copy())
        self._left[rank][invocation] -= 1
        if not self._left[rank][invocation] and self._over[rank] == invocation - 1:
            self._end(rank)

    def _end(self, rank: int) -> None:
        """End the next invocation of a rank, and those behind it whose queues have ended before."""
        user = self.layout.users[rank]
        clock = self._clocks[user]
        while True:
            invocation = self._over[rank] = self._over[rank] + 1
            for other in self._joining.pop((rank, invocation), ()):
                np.maximum(clock, other, out=clock)
            place = (invocation, None, rank)
            self.accesses.user(rank, (user, self._ticks[user], place), clock)
            self.places.append(place)
            if self._held[rank]:
                self._ticks[user] = clock[user] = self._ticks[user] + 1
                for chain in self._held[rank]:
                    np.copyto(self._clocks[chain], clock)
            if invocation == len(self.layout.programs):
                return
            self._ready.extend(self._held[rank])
            self._ready.append(user)
            if self._left[rank][invocation + 1]:
                return


def check_progress(order: HappensBefore) -> list[str]:
    """Return one line for each wait that never ends, or else for each cycle; then signals that no queue waits for at
    all. A program that deadlocks allows no further findings. The list is empty if it does not. If a signal can get
    lost, only that is reported: a wait may then hang in this order, and end in another run.
    """
    if not order.blocked:
        return []
    if lost := order.flags.lost():
        return lost
    lines: dict[tuple[object, ...], str] = {}  # by command: only the first invocation in which it hangs is reported
    for chain in sorted(order.blocked):
        place = order.blocked[chain]
        if why := _why_stuck(order, place):
            lines.setdefault(place[1:], f"deadlock: {name_event(event_at(place))} never ends: {why}")
    if not lines:
        lines = {(text,): text for text in _cycles(order)}
    return [*lines.values(), *order.flags.unpaired()]


def _why_stuck(order: HappensBefore, place: Occurrence) -> str:
    """Return the reason why no signal can satisfy a wait; empty if one could, but does not come."""
    invocation, plan, number = place
    assert plan is not None
    _, _, target, base, per_epoch, equal = plan.steps[number]
    use, wanted = order.layout.flags[target], base + per_epoch * invocation
    if not use.writes:
        return "no command signals this flag"
    if use.counts:
        total = sum(amount for _, amount, done in _writes(order, target) if not done)
        have = order.flags.counters[target].sum
        if have + total < wanted:
            return f"the signals that can come before it add up to {have + total}, it waits for {wanted}"
    right = [
        (where, done)
        for where, value, done in _writes(order, target)
        if use.counts or value == wanted or (value > wanted and not equal)
    ]
    if not right:
        values = ", ".join(dict.fromkeys(str(value) for _, value, _ in _writes(order, target)))
        return f"it waits for {wanted}, the flag is only ever set to {values}"
    coming = [where for where, done in right if not done]
    if not coming:
        return f"{name_event(event_at(right[0][0]))} is always overwritten before the wait begins"
    if all(where[1] is not None and where[1].chain == plan.chain for where in coming):
        return f"its signal comes after it: {name_chain([event_at(place), event_at(coming[0])], [False])}"
    return ""


def _writes(order: HappensBefore, target: int) -> Iterator[tuple[Occurrence, int, bool]]:
    """Yield each write of a flag: its place, the value that it sets or adds, and whether it has happened."""
    layout = order.layout
    for invocation in range(1, len(layout.programs) + 1):
        plans = layout.plans_of(invocation)
        for plan, number in layout.flags[target].writes:
            if any(plan is each for each in plans):
                _, _, _, base, per_epoch, _ = plan.steps[number]
                where = (invocation, plan, number)
                yield where, base + per_epoch * invocation, order.has_done(where)


def _cycles(order: HappensBefore) -> Iterator[str]:
    """Follow each wait to a signal that it needs, and from there to the wait that blocks the signal."""
    told: set[Occurrence] = set()
    for start in sorted(order.blocked):
        path: list[Occurrence] = []  # waits, each of which waits for the next
        signals: list[Occurrence] = []
        place = order.blocked[start]
        while place not in path and place not in told:
            path.append(place)
            signal = _missing(order, place)
            signals.append(signal)
            place = order.holder(signal)
        if place in told:
            continue
        told.update(path)
        first = path.index(place)
        events: list[Event] = [event_at(place)]
        for wait, signal in zip(reversed(path[first:]), reversed(signals[first:]), strict=True):
            events += [event_at(signal), event_at(wait)]
        yield f"deadlock: {name_chain(events, [k % 2 == 1 for k in range(len(events) - 1)])}"


def _missing(order: HappensBefore, place: Occurrence) -> Occurrence:
    """Return a signal that a wait needs, and that has not come."""
    invocation, plan, number = place
    assert plan is not None
    _, _, target, base, per_epoch, equal = plan.steps[number]
    wanted, counts = base + per_epoch * invocation, order.layout.flags[target].counts
    return next(
        where
        for where, value, done in _writes(order, target)
        if not done and (counts or value == wanted or (value > wanted and not equal))
    )

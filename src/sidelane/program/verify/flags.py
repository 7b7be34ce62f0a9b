"""Flags: rules for their values, their history, and whether a signal can get lost before its wait sees it.

An epoch is the number of a call: it grows from invocation to invocation, by any step, for as long as a program lives,
and flags are words of 32 bits. A proof about the first invocations holds for all only if the effect of a signal on a
wait depends only on the invocations to which both belong. Three rules for values ensure that.

1. *One slope.* All values of a flag change alike with the epoch: ``k * epoch + b`` with one k for every signal, wait
   and reset, in all programs of a sequence.
2. *No overlap.* Where k > 0, two such b differ by less than k. Then any value set by an earlier invocation is less than
   the value that a later one waits for, and any value set by a later one is more than an earlier one waits for, by
   whichever step epochs grow; and within an invocation the difference is that of the constants.
3. *Counters count from 0.* Signals that add, add a constant; waits for such flags wait for a constant; their owner
   resets them to 0, and no rank sets them to anything else. (``counters`` proves that the reset comes in every
   invocation, at the right time.)

The circle. Hardware compares flags by the sign of a 32-bit difference. ``RENEWAL_CALLS`` bounds the age of a flag's
value: after so many calls, communicators make all flags count as set by the call before (``collectives/renewal``). So
two values that meet are less than ``MAX_SLOPE * RENEWAL_CALLS`` apart, plus the difference of the constants, which is
less than half of the circle.

The history. ``FlagStates`` treats flags that are *set*, by epochs or with resets; ``counters`` treats those that are
added to. For a set flag it is required, and checked as ``order`` goes through the events, that

- its writes are in one order in every run (else one can erase the other before a wait has seen it);
- once a wait has the value that it waits for, the flag keeps one that it accepts until the wait has seen it;
- each wait needs a signal of its own invocation, and each signal is needed by a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sidelane.program.ir import RENEWAL_CALLS, Signal, SignalOp, Value, Wait
from sidelane.program.verify.counters import Counter, Counters
from sidelane.program.verify.layout import (
    ADD,
    SIGNAL,
    WAIT,
    FlagUse,
    Layout,
    Occurrence,
    QueuePlan,
    event_at,
    name_command,
    name_event,
)
from sidelane.program.verify.races import Clock

MAX_FLAG_VALUE = 2**31 - 1
"""Largest value of a flag of 32 bits: hardware compares by the sign of the difference (cuStreamWaitValue32, GEQ)."""

MAX_SLOPE = 2**30 // RENEWAL_CALLS

MAX_BASE = 2**30 - 1
"""Largest constant of values that follow the epoch; unwritten flags hold 0, and are compared with these as well."""

NOBODY: tuple[int, ...] = ()


_Write = list[Any]
"""A value that a flag has had: the value, the chain that wrote it and its tick, the clock that it left behind (None
once no chain needs it), and the place."""

_Seen = tuple[int, int, int, int, Occurrence]
"""A wait that has ended, while a later write may still break its condition: the value, whether it must be equal, the
chain, its tick, and the place."""


class _State:
    """A flag that is set.

    Attributes:
        history: writes of the flag, from the last one that is sure to be over at any later event.
        seen: waits that the writers may not know of.
        blocked: chains that wait.
        alone: only one chain waits for this flag, so that no other chain needs the clocks that it has taken over.
    """

    __slots__ = ("alone", "blocked", "history", "lost", "seen", "use")

    def __init__(self, use: FlagUse) -> None:
        self.use = use
        self.history: list[_Write] = []
        self.seen: list[_Seen] = []
        self.blocked: set[int] = set()
        self.alone = len(use.waits) < 2 or len({plan.chain for plan, _ in use.waits}) == 1
        self.lost: tuple[Occurrence, Occurrence] | None = None


class FlagStates:
    """All flags of a layout.

    Args:
        layout: layout of the programs.
        counters: claims about counters.
        ticks: ticks of each chain; a write is a tick of its chain.
    """

    def __init__(self, layout: Layout, counters: Counters, ticks: list[int]) -> None:
        self._layout, self._ticks = layout, ticks
        self._states = [_State(use) for use in layout.flags]
        self.counters = {number: Counter(use, counters, ticks) for number, use in enumerate(layout.flags) if use.counts}
        self._awaited = bytearray(layout.steps)
        self._idle: dict[tuple[QueuePlan | None, int], str] = {}
        self._hanging: dict[tuple[int, QueuePlan | None, int], tuple[int, Occurrence, Occurrence]] = {}

    def write(self, target: int, value: int, chain: int, clock: Clock, place: Occurrence) -> Iterable[int]:
        """Set a flag by a signal; return the chains that may go on."""
        state = self._states[target]
        if state.use.counts:
            return self.counters[target].reset(chain, clock, place)
        history = state.history
        if history:
            _, writer, tick, _, before = history[-1]
            if writer != chain and clock[writer] <= tick and state.lost is None:
                state.lost = (before, place)
        if state.seen:
            self._note_unseen(target, state, value, chain, clock, place)
        tick = self._ticks[chain]
        self._ticks[chain] = tick + 1
        past = None
        if value:  # no wait accepts 0
            past = clock.copy()
            past[chain] = tick + 1
        history.append([value, chain, tick, past, place])
        if not state.blocked:
            return NOBODY
        woken, state.blocked = state.blocked, set()
        return woken

    def add(self, target: int, value: int, chain: int, clock: Clock, place: Occurrence) -> Iterable[int]:
        """Add to a flag by a signal; return the chains that may go on."""
        return self.counters[target].add(value, chain, clock, place)

    def wait(self, target: int, value: int, equal: int, chain: int, clock: Clock, place: Occurrence) -> bool:
        """Take a chain to a wait. Return True if it goes on, with its new knowledge in its clock."""
        state = self._states[target]
        if state.use.counts:
            return self.counters[target].wait(value, equal, chain, clock, place)
        history = state.history
        first = len(history) - 1
        while first > 0 and history[first][1] != chain and clock[history[first][1]] <= history[first][2]:
            first -= 1
        for number in range(max(first, 0), len(history)):
            was = history[number][0]
            if was == value or (was > value and not equal):
                break
        else:
            state.blocked.add(chain)
            return False
        if number + 1 < len(history):
            for later in history[number + 1 :]:
                if not (later[0] == value or (later[0] > value and not equal)):
                    self._hanging.setdefault(place, (target, place, later[4]))
        write = history[number]
        _, writer, _, past, (invocation, plan, step) = write
        if invocation == place[0]:
            self._awaited[plan.first + step] = True
        elif place[1:] not in self._idle:
            older = name_event(event_at(write[4]))
            self._idle[place[1:]] = f"{name_event(event_at(place))} is already satisfied by {older}"
        if past is not None:
            if writer != chain:
                np.maximum(clock, past, out=clock)
            if state.alone:
                write[3] = None
        if state.alone and number:
            del history[:number]
        state.seen.append((value, equal, chain, self._ticks[chain], place))
        return True

    def _note_unseen(self, target: int, state: _State, value: int, chain: int, clock: Clock, place: Occurrence) -> None:
        """Forget the waits that surely come before a write; the others must accept its value."""
        unseen = []
        for seen in state.seen:
            wanted, equal, waiter, tick, where = seen
            if waiter == chain or clock[waiter] > tick:
                continue
            if value == wanted or (value > wanted and not equal):
                unseen.append(seen)
            else:
                self._hanging.setdefault(where, (target, where, place))
        state.seen = unseen

    def lost(self) -> list[str]:
        """Return the signals that can get lost, so that waits may hang although they are signalled."""
        lost = {number: state.lost for number, state in enumerate(self._states) if state.lost is not None}
        lines = [_lost(self._states[number].use, *places) for number, places in lost.items()]
        for target, wait, culprit in self._hanging.values():
            if target not in lost:
                lines.append(
                    f"lost signal: {name_event(event_at(wait))} may never see {_value(wait)}: "
                    f"{name_event(event_at(culprit))} may come first"
                )
        return lines

    def violations(self) -> list[str]:
        """Return the lines of :meth:`lost`, and waits and signals without a partner."""
        lines = self.lost() + [f"unpaired wait: {text}" for text in self._idle.values()]
        for counter in self.counters.values():
            counter.judge()
            lines += counter.violations
            for step in counter.awaited:
                self._awaited[step] = True
        return [*dict.fromkeys(lines), *self.unpaired(self._awaited)]

    def unpaired(self, awaited: bytearray | None = None) -> Iterator[str]:
        """Yield the signals that no wait needs; without ``awaited``, those on flags that have no wait at all."""
        for state in self._states:
            use = state.use
            if awaited is None and use.waits:
                continue
            for plan, number in use.writes:
                kind, index, *_ = plan.steps[number]
                command = plan.queue.commands[index]
                assert isinstance(command, Signal)
                if awaited is not None and awaited[plan.first + number]:
                    continue
                if kind == SIGNAL and is_reset(plan.queue.rank, command):
                    continue
                name = name_event(event_at((0, plan, number))).rpartition(" in invocation")[0]
                yield f"unpaired signal: {name}: no wait of rank {use.flag.rank} needs it"


def _lost(use: FlagUse, first: Occurrence, second: Occurrence) -> str:
    # Name the one first that a run would have first: in the hazard, the earlier invocation's write comes late.
    one, other = sorted((first, second), key=lambda place: place[0])
    return (
        f"lost signal on flag {use.flag.index} of rank {use.flag.rank}: nothing orders {name_event(event_at(one))} and "
        f"{name_event(event_at(other))}, so that one can erase the other"
    )


def _value(place: Occurrence) -> int:
    invocation, plan, number = place
    assert plan is not None
    _, _, _, base, per_epoch, _ = plan.steps[number]
    return base + per_epoch * invocation


def check_values(layout: Layout) -> list[str]:
    """Return one line for each value that breaks the rules; for a flag that breaks one, for one pair of uses."""
    return [line for use in layout.flags for line in _flag(use)]


def is_reset(queue_rank: int, signal: Signal) -> bool:
    """Return True for the signal by which the owner of a flag resets it to 0 after its wait; no queue waits for it."""
    return signal.flag.rank == queue_rank and signal.op is SignalOp.SET and signal.value == Value(0)


def _flag(use: FlagUse) -> Iterator[str]:
    everything = [*use.writes, *use.waits]
    values = {plan.steps[number][3:5] for plan, number in everything}
    if values == {(0, 1)} and not use.counts:
        return  # plain epochs
    lines = [line for where in everything for line in _alone(where)]
    yield from lines
    if lines:
        return
    if use.counts:
        yield from _counter(use)
    slopes = sorted({per_epoch for _, per_epoch in values})
    if len(slopes) > 1:
        first, second = (next(w for w in everything if w[0].steps[w[1]][4] == k) for k in (slopes[0], slopes[-1]))
        yield (
            f"{_name(second)}: flag {use.flag.index} of rank {use.flag.rank} changes by {slopes[-1]} an epoch here, "
            f"and by {slopes[0]} in {_name(first)} ; all uses of a flag change by one number"
        )
    elif slopes[0]:
        bases = sorted(base for base, _ in values)
        if bases[-1] - bases[0] >= slopes[0]:
            first, second = (next(w for w in everything if w[0].steps[w[1]][3] == b) for b in (bases[0], bases[-1]))
            yield (
                f"{_name(second)}: {bases[-1] - bases[0]} more than {_name(first)} in the same epoch, of flag "
                f"{use.flag.index} of rank {use.flag.rank}, which changes by {slopes[0]} an epoch: signals of one "
                f"invocation would pass for those of another (allowed={slopes[0] - 1} more)"
            )


def _alone(where: tuple[QueuePlan, int]) -> Iterator[str]:
    """Yield the errors of a value by itself, whatever the other values are."""
    plan, number = where
    kind, _, _, base, per_epoch, _ = plan.steps[number]
    value = Value(base, per_epoch)
    if kind == ADD and per_epoch:
        yield f"{_name(where)}: adds {value}; a counter adds the same in all epochs, and is reset to 0"
        return
    least = 1 if kind == ADD else 0
    if not 0 <= per_epoch <= MAX_SLOPE:
        yield f"{_name(where)}: the value {value} does not fit (allowed=changes of 0..{MAX_SLOPE} an epoch)"
    elif per_epoch and not (least <= value.at(1) and base <= MAX_BASE):
        allowed = f"{least} and more in the first epoch, and at most {MAX_BASE} beside what changes"
        yield f"{_name(where)}: the value {value} does not fit (allowed={allowed})"
    elif not least <= value.at(1) <= MAX_FLAG_VALUE:
        yield f"{_name(where)}: the value {value} does not fit (allowed={least}..{MAX_FLAG_VALUE})"
    elif kind == WAIT and value.at(1) < 1:
        yield f"unpaired wait: {_name(where)} is satisfied before anybody signals"


def _counter(use: FlagUse) -> Iterator[str]:
    total = 0
    for plan, number in use.writes:
        kind, index, _, base, _, _ = plan.steps[number]
        command = plan.queue.commands[index]
        assert isinstance(command, Signal)
        if kind == SIGNAL and not is_reset(plan.queue.rank, command):
            adding = next(where for where in use.writes if where[0].steps[where[1]][0] == ADD)
            yield (
                f"{_name((plan, number))}: other signals add to this flag, as {_name(adding)} does; "
                "a counter is only ever reset to 0, by its own rank"
            )
            return
        if kind == ADD:
            total += base
    if total > MAX_FLAG_VALUE:
        yield (
            f"flag {use.flag.index} of rank {use.flag.rank}: all that is added to it is {total} "
            f"(allowed=..{MAX_FLAG_VALUE})"
        )


def _name(where: tuple[QueuePlan, int]) -> str:
    plan, number = where
    index = plan.steps[number][1]
    command = plan.queue.commands[index]
    assert isinstance(command, Signal | Wait)
    return name_command(plan.queue.rank, plan.queue.engine, index, command)

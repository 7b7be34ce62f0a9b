"""History of flags, and whether a signal can get lost before its wait sees it.

This module treats flags that are *set*, by epochs or with resets; ``counters`` treats those that are added to. For a
set flag it is required, and checked as ``order`` goes through the events, that

- its writes are in one order in every run (else one can erase the other before a wait has seen it);
- once a wait has the value that it waits for, the flag keeps one that it accepts until the wait has seen it;
- each wait needs a signal of its own invocation, and each signal is needed by a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sidelane.program.ir import Signal
from sidelane.program.verify.counters import Counter, Counters
from sidelane.program.verify.layout import SIGNAL, FlagUse, Layout, Occurrence, QueuePlan, event_at, name_event
from sidelane.program.verify.races import Clock
from sidelane.program.verify.values import is_reset

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
            self._keep_unseen(target, state, value, chain, clock, place)
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

    def _keep_unseen(self, target: int, state: _State, value: int, chain: int, clock: Clock, place: Occurrence) -> None:
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

"""Happens-before: which events come before which in every run of a program.

Queues and callers give the first edges. A wait adds more: whatever every signal that could possibly satisfy it has in
common must have happened before it (``support``). New edges rule out signals for other waits, so this repeats
until nothing changes. Edges hold in every run, so a cycle of them, or a wait that nothing can satisfy, is a deadlock.

Sets of events are Python integers with one bit an event: a union is one machine operation for each 64 events.
"""

from __future__ import annotations

from itertools import pairwise

from sidelane.program.verify.report import name_chain, name_event
from sidelane.program.verify.support import support
from sidelane.program.verify.unroll import FlagUse, Unrolled


class Order:
    """The happens-before order of all events.

    Attributes:
        unrolled: the events.
        ancestors: for each event, the bit set of those that happen before it.
        position: for each event, its place in one order in which all could run (a linearization).
        sequence: the events in that order.
        stuck: each wait that nothing can satisfy, with its flag.
        cycles: one line for each cycle. Where either is not empty there is a deadlock, and the order ends at it.
    """

    def __init__(self, unrolled: Unrolled) -> None:
        self.unrolled = unrolled
        self._predecessors = [list(before) for before in unrolled.predecessors]
        self.ancestors: list[int] = []
        self.position: list[int] = []
        self.sequence: list[int] = []
        self.stuck: list[tuple[FlagUse, int]] = []
        self.cycles: list[str] = []
        self._close()
        while not self.cycles and not self.stuck and self._add_flag_edges():
            self._close()

    def before(self, first: int, second: int) -> bool:
        """True if event ``first`` happens before event ``second`` in every run."""
        return bool(self.ancestors[second] >> first & 1)

    def chain(self, first: int, last: int) -> str:
        """Tell why ``last`` comes after ``first``, where it does."""
        came_from = {last: last}
        frontier = [last]
        while first not in came_from:
            frontier = [
                before
                for event in frontier
                for before in self._predecessors[event]
                if (before == first or self.before(first, before)) and came_from.setdefault(before, event) == event
            ]
        path = [first]
        while path[-1] != last:
            path.append(came_from[path[-1]])
        return self._name_path(path)

    def _close(self) -> None:
        """Recompute ancestors and a linearization from the edges; find a cycle where there is one."""
        count = len(self._predecessors)
        successors: list[list[int]] = [[] for _ in range(count)]
        missing = [0] * count
        for event, before in enumerate(self._predecessors):
            missing[event] = len(before)
            for predecessor in before:
                successors[predecessor].append(event)
        ready = [event for event in range(count) if not missing[event]]
        sequence: list[int] = []
        ancestors = [0] * count
        closed = [0] * count
        while ready:
            event = ready.pop()
            sequence.append(event)
            mask = 0
            for predecessor in self._predecessors[event]:
                mask |= closed[predecessor]
            ancestors[event] = mask
            closed[event] = mask | 1 << event
            for successor in successors[event]:
                missing[successor] -= 1
                if not missing[successor]:
                    ready.append(successor)
        if len(sequence) < count:
            self.cycles.append(self._cycle(missing))
            return
        self.sequence, self.ancestors = sequence, ancestors
        self.position = [0] * count
        for place, event in enumerate(sequence):
            self.position[event] = place

    def _add_flag_edges(self) -> bool:
        """Add what the waits imply; return whether anything is new."""
        added = False
        for use in self.unrolled.flags.values():
            for wait in use.waits:
                found = support(self.unrolled.events, self.ancestors, use, wait)
                if found is None:
                    self.stuck.append((use, wait))
                    continue
                new = found.required & ~self.ancestors[wait]
                while new:
                    last = self._latest(new, found.witnesses)
                    self._predecessors[wait].append(last)
                    new &= ~(self.ancestors[last] | 1 << last)
                    added = True
        return added

    def _latest(self, events: int, likely: tuple[int, ...]) -> int:
        """One event of the bit set that comes before no other one of it."""
        for event in likely:
            if events >> event & 1 and not events & ~(self.ancestors[event] | 1 << event):
                return event
        latest, rest = -1, events
        while rest:
            event = rest.bit_length() - 1
            rest &= ~(1 << event)
            if latest < 0 or self.position[event] > self.position[latest]:
                latest = event
        return latest

    def _cycle(self, missing: list[int]) -> str:
        # Every event that could not be placed has a predecessor that could not be placed: walking back finds a cycle.
        event = next(number for number, count in enumerate(missing) if count)
        seen: dict[int, int] = {}
        walk: list[int] = []
        while event not in seen:
            seen[event] = len(walk)
            walk.append(event)
            event = next(before for before in self._predecessors[event] if missing[before])
        cycle = walk[seen[event] :][::-1]
        # Turn it so that it ends at a wait that a signal holds, and repeat that wait at the front.
        turn = next(k for k in range(len(cycle)) if self._is_flag_edge(cycle[k - 1], cycle[k]))
        cycle = [*cycle[turn:], *cycle[: turn + 1]]
        return f"deadlock: {self._name_path(cycle)}"

    def _name_path(self, path: list[int]) -> str:
        flag_edges = [self._is_flag_edge(first, second) for first, second in pairwise(path)]
        return name_chain([self.unrolled.events[event] for event in path], flag_edges)

    def _is_flag_edge(self, first: int, second: int) -> bool:
        return first not in self.unrolled.predecessors[second]

    def name(self, event: int) -> str:
        """Name an event for people."""
        return name_event(self.unrolled.events[event])

"""What the study of phases calls again and again: one program, or several that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sidelane.program.builders.alternating import TURNS
from sidelane_lab.studies.phases.split import Sample


class Call(Protocol):
    """A program that this rank calls again and again. Its methods are called in this order, once a call."""

    def arm(self, epoch: int) -> None:
        """Prepare what may be prepared before the call."""
        ...

    def begin(self, epoch: int) -> None:
        """The call. Returns when the host is done with it."""
        ...

    def finish(self) -> None:
        """Return as soon as the host can know that everything has finished."""
        ...

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        """What was seen, with stamps if the program has any."""
        ...


class TurnCounter:
    """Whose turn it is, on every rank alike: all calls that share a pair of slots count here, in the order of calls."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        """Take the next turn: 0, 1, 0, 1 ..."""
        turn = self._next
        self._next = (turn + 1) % TURNS
        return turn

    def open(self) -> None:
        """A call that is a turn 0 and may follow anything: turn 1 is next."""
        self._next = 1


class InTurn:
    """Calls of which each time one is made, when it is prepared.

    Args:
        counter: of the slots that they use.
        calls: for turn 0 and turn 1, or the one that opens a row of turns.
    """

    def __init__(self, counter: TurnCounter, calls: Sequence[Call]) -> None:
        if len(calls) not in (1, TURNS):
            raise ValueError(f"InTurn: calls (value={len(calls)}, allowed=1 that opens, or {TURNS})")
        self._counter, self._calls, self._now = counter, tuple(calls), calls[0]

    def arm(self, epoch: int) -> None:
        if len(self._calls) == 1:
            self._counter.open()
        else:
            self._now = self._calls[self._counter.take()]
        self._now.arm(epoch)

    def begin(self, epoch: int) -> None:
        self._now.begin(epoch)

    def finish(self) -> None:
        self._now.finish()

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        return self._now.sample(begin_ns, returned_ns, known_ns)

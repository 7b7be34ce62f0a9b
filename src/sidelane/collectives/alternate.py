"""Alternating calls (``program/builders/alternating.py``): which of two programs runs next, and their slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sidelane.execute.base import Place, Repetition, Runnable
from sidelane.program.builders.alternating import SLOT_BYTES, TURNS, Alternation, flags_of, staging_of
from sidelane.program.collective import MAX_NODE_RANKS
from sidelane.program.ir import Program

OPENING = TURNS
"""Turn number of the opening program."""

SLOTS_BYTES = staging_of(SLOT_BYTES)
"""Bytes of slots for the eager calls of a rank; the calls in graphs need as many again."""

FLAGS = flags_of(MAX_NODE_RANKS)
"""Number of flags for all alternating programs together: they may share them."""


class CallTurns:
    """Counts the alternating calls of one communicator, as every rank of it does.

    Args:
        capture_of: returns the number of the capture that a place is in; numbers are never used twice.

    Attributes:
        next_eager: number of the next eager turn, 0 or 1.
    """

    def __init__(self, capture_of: Callable[[Place], int]) -> None:
        self.next_eager = 0
        self._capture_of = capture_of
        self._capture: int | None = None
        self._captured = 0

    def eager(self, place: Place) -> int:
        """Take the next eager turn: 0, 1, 0, 1 ..."""
        turn = self.next_eager
        self.next_eager = 1 - turn
        return turn

    def captured(self, place: Place) -> int:
        """Take the next turn of a graph: ``OPENING``, which is a turn 0, and then 1, 0, 1, 0 ..."""
        capture = self._capture_of(place)
        if capture != self._capture:
            # Each capture starts with an opening, which may follow any call.
            self._capture, self._captured = capture, 1
            return OPENING
        turn = self._captured
        self._captured = 1 - turn
        return turn


class AlternatingProgram:
    """The loaded programs of an alternation. Each call runs the program of its turn.

    Args:
        alternation: the programs.
        load: loads one program.
        turns: turn counter of the communicator.
        captured: the call is recorded into a graph.
        late: load each program when its turn first comes, since the call may be made only once.
    """

    def __init__(
        self,
        alternation: Alternation,
        load: Callable[[Program], Runnable],
        turns: CallTurns,
        *,
        captured: bool,
        late: bool = False,
    ) -> None:
        opening = () if alternation.opening is None else (alternation.opening,)
        self._programs: tuple[Program, ...] = (*alternation.turns, *opening)
        self._load, self._turns, self._captured = load, turns, captured
        self._take_turn = turns.captured if captured else turns.eager
        # A call in a graph keeps one turn. Eager calls take both, so that both programs are loaded before any call.
        self._loaded = [None if opening or late else load(program) for program in self._programs]

    @property
    def program(self) -> Program:
        """The program of turn 0."""
        return self._programs[0]

    def repetition(self, place: Place, moving: Sequence[tuple[int, str]] | None = None) -> Repetition | None:
        """Return the repetition of the program that every other call runs (see ``execute.base.Runnable``)."""
        turn = 1 - self._turns.next_eager
        loaded = self._loaded[turn]
        found = None if self._captured or loaded is None else loaded.repetition(place, moving)
        return None if found is None else dataclasses.replace(found, turn=(self._turns, "next_eager", turn, 1 - turn))

    def run(self, epoch: int, place: Place) -> None:
        """Run the program whose turn it is (see :class:`sidelane.execute.base.Runnable`)."""
        turn = self._take_turn(place)
        loaded = self._loaded[turn]
        if loaded is None:
            loaded = self._loaded[turn] = self._load(self._programs[turn])
        loaded.run(epoch, place)

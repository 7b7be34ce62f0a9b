"""Programs whose tensors change from call to call, each in its own way.

All addresses but those of new segments lie in one pair of buffers, a step apart: for every library, an address is new
whether or not the bytes behind it are. What makes and binds tensors comes before a sample (``stock``), so that nothing
but calls is in it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import torch

from sidelane_lab.baselines.candidate import Tensors, views
from sidelane_lab.baselines.reference import Case
from sidelane_lab.studies.ordinary.rows import NEW_ADDRESS, NEW_SEGMENT, REPEATED, ROTATING
from sidelane_lab.studies.ordinary.ways import LEARNING_CALLS, Way

STEP_BYTES = 4096
SLOTS = 8
"""Pairs of tensors that rotate."""

MOST_ADDRESSES = 2048
"""Addresses of a way."""

SEGMENT_BYTES = 32 << 20
"""torch's allocator gives a tensor of that size memory of its own, of which nothing is left for others."""

SETTLING = {REPEATED: LEARNING_CALLS, ROTATING: LEARNING_CALLS, NEW_ADDRESS: LEARNING_CALLS, NEW_SEGMENT: 0}
"""Programs, with the calls before their first sample. What came before has taught the ranks something else."""


class Room:
    """Buffers of one way, with places for many addresses.

    Args:
        way: whose.
        case: that fits in at each.
    """

    def __init__(self, way: Way, case: Case) -> None:
        extra = STEP_BYTES * (MOST_ADDRESSES + SLOTS)
        self.output, self.input = way.memory(case.output_bytes + extra), way.memory(case.input_bytes + extra)
        self._case = case
        self._fresh = iter(range(SLOTS, SLOTS + MOST_ADDRESSES))

    def at(self, number: int) -> Tensors:
        """The tensors at a place."""
        offset = number * STEP_BYTES
        return views(self._case, False, self.output[offset:], self.input[offset:])

    def fresh(self) -> Tensors:
        """Tensors at a place where none has been.

        Raises:
            RuntimeError: there was one everywhere.
        """
        number = next(self._fresh, None)
        if number is None:
            raise RuntimeError(f"Room: no place is left (value={MOST_ADDRESSES} calls, allowed=fewer rounds)")
        return self.at(number)


class ChangingProgram:
    """Calls of one way.

    Args:
        change: how tensors change; of ``SETTLING``.
        way: which way.
        case: what each call does.
        room: of the way.

    Attributes:
        tensors: of the call that comes next.
    """

    def __init__(self, change: str, way: Way, case: Case, room: Room) -> None:
        self.way = way
        self._change, self._case, self._room = change, case, room
        self._places = self._all_places()
        self._stock: collections.deque[tuple[Tensors, Callable[[], object]]] = collections.deque()
        self._kept: list[torch.Tensor] = []
        self._last: Tensors | None = None

    @property
    def tensors(self) -> Tensors:
        return self._stock[0][0]

    def stock(self, calls: int) -> None:
        """Make the tensors of the next calls, and whatever comes before these. Every rank does, at once."""
        if self._change == NEW_SEGMENT and self._case.device.type != "cpu":
            torch.cuda.empty_cache()  # or what was freed before is given out, which peers may know
        for _ in range(calls):
            tensors = next(self._places)
            self._stock.append((tensors, self.way.bind(self._case, tensors)))

    def run(self) -> None:
        """Make the next call."""
        self._last, call = self._stock.popleft()
        call()

    def settle(self) -> None:
        """Make calls until they are as those to come."""
        calls = SETTLING[self._change]
        self.stock(calls)
        for _ in range(calls):
            self.run()

    def objection(self) -> str | None:
        """Why peers do not reach the tensors of the last call as they should."""
        return None if self._last is None else self.way.objection(self._last)

    def close(self) -> None:
        """Drop all tensors. No call is under way."""
        self._stock.clear()
        self._kept.clear()
        self._last = None

    def _all_places(self) -> Iterator[Tensors]:
        number = 0
        while True:
            if self._change == REPEATED:
                yield self._room.at(0)
            elif self._change == ROTATING:
                yield self._room.at(number % SLOTS)
            elif self._change == NEW_SEGMENT:
                buffers = [
                    self.way.memory(max(nbytes, SEGMENT_BYTES if self._case.device.type != "cpu" else 0))
                    for nbytes in (self._case.output_bytes, self._case.input_bytes)
                ]
                self._kept += buffers  # or the next ones would be given the same memory
                yield views(self._case, False, buffers[0], buffers[1])
            else:
                yield self._room.fresh()
            number += 1

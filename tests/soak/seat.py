"""A rank's place in the world of an episode, and its line to the parent."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import time
from multiprocessing import connection

import torch

from soak.endings import Seen
from soak.judge import Tally

BEAT_S = 0.5
SHOWS_S = 10.0
"""Seconds before the parent loses patience, at which a rank that says nothing shows where it stands."""

BEAT, COUNTED, FROZEN, THAWED, FAULTED, DONE = "beat", "counted", "frozen", "thawed", "faulted", "done"


@dataclasses.dataclass(slots=True)
class Outcome:
    """The course of an episode on one rank: its counts, the error that ended its calls, and what was left behind."""

    rank: int
    tally: Tally
    seen: Seen | None = None
    leftovers: list[str] = dataclasses.field(default_factory=list)


class Seat:
    """One rank's place.

    Args:
        rank, world_size: its number, among how many.
        device: the device of its tensors.
        line: the line to the parent.
        patience_s: seconds without a word after which the parent ends it.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, line: connection.Connection, patience_s: float
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._line, self._patience_s = line, patience_s
        self._next_beat = 0.0

    def beat(self, calls: int) -> None:
        """Say, now and then, that this rank lives, and how many calls it has counted."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._line.send((BEAT, calls))
            faulthandler.dump_traceback_later(self._patience_s - SHOWS_S)

    def freeze(self, seconds: float) -> None:
        """Stop this process, all threads at once. The parent lets it go on."""
        self._line.send((FROZEN, seconds))
        os.kill(os.getpid(), signal.SIGSTOP)
        self._line.send((THAWED, 0))

    def counted(self, tally: Tally) -> None:
        """Say what was counted so far, for a rank that may have no other word."""
        self._line.send((COUNTED, Outcome(self.rank, tally)))

    def fault(self) -> None:
        """Say that the fault comes now."""
        self._line.send((FAULTED, time.monotonic()))

    def wait_for_the_others(self) -> None:
        """Wait until the parent has heard of all others."""
        self._line.recv()

    def done(self, outcome: Outcome) -> None:
        """Say how it went."""
        self._line.send((DONE, outcome))

"""What a rank of an episode has besides its plan: its place in the world, and a line to the parent."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import time
from multiprocessing import connection

import torch

from sidelane_lab.soak.endings import Told
from sidelane_lab.soak.tally import Tally

BEAT_S = 0.5
SHOWS_S = 10.0
"""Before the parent loses patience, a rank that says nothing shows where it stands: a signal may not reach it."""

BEAT, COUNTED, FROZEN, THAWED, FAULTED, DONE = "beat", "counted", "frozen", "thawed", "faulted", "done"


@dataclasses.dataclass(slots=True)
class Outcome:
    """How an episode went on one rank.

    Attributes:
        rank: which.
        tally: what it counted.
        told: the error that ended its calls, if one did.
        leftovers: what was left in the process when everything was closed.
    """

    rank: int
    tally: Tally
    told: Told | None = None
    leftovers: list[str] = dataclasses.field(default_factory=list)


class Seat:
    """One rank's place.

    Args:
        rank: in the world.
        world_size: ranks.
        device: of its tensors.
        line: to the parent.
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
        """Until the parent has heard of all others."""
        self._line.recv()

    def done(self, outcome: Outcome) -> None:
        """Say how it went."""
        self._line.send((DONE, outcome))

"""Numbering of flags: the same in every program, so that all programs of a communicator can share flag memory.

A transfer moves bytes between two ranks; the *mover* is the rank whose engine executes it, the *partner* the other one.

- entry: the partner tells the mover that its side may be touched (its buffer is free, or its bytes are ready);
- exit: the mover tells the partner that it has finished.

Each flag has one writer in a program. Programs differ in their phases, so a flag of a later phase may be a local one of
another program, which its own rank writes while it is still in that call. Only signals that a rank gives after it
has heard from the other one, in the same call, may have a later phase; its first signal has phase 0, whose flags have
one meaning in all programs.

With 4 ranks, the exit of phase 1 that rank 2 writes has index 1*8 + 4 + 2 = 14 on every rank.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from sidelane.program.ir import EPOCH, Flag, Signal, Wait


class FlagRole(StrEnum):
    """Purpose of a flag."""

    ENTRY = "entry"
    EXIT = "exit"
    LOCAL = "local"


@dataclasses.dataclass(frozen=True, slots=True)
class FlagPlan:
    """Flags of a program: ``phases`` handshakes between all pairs, then one flag for each queue of the own rank."""

    world_size: int
    phases: int

    @property
    def handshakes(self) -> int:
        """Number of flags that handshakes use; local flags come after them."""
        return 2 * self.world_size * self.phases

    def signal_entry(self, partner: int, mover: int, phase: int = 0) -> Signal:
        return Signal(self._entry(partner, mover, phase), EPOCH)

    def wait_entry(self, partner: int, mover: int, phase: int = 0) -> Wait:
        return Wait(self._entry(partner, mover, phase), EPOCH)

    def signal_exit(self, partner: int, mover: int, phase: int = 0) -> Signal:
        return Signal(self._exit(partner, mover, phase), EPOCH)

    def wait_exit(self, partner: int, mover: int, phase: int = 0) -> Wait:
        return Wait(self._exit(partner, mover, phase), EPOCH)

    def role(self, flag: Flag) -> tuple[int, FlagRole]:
        """Return the phase of a flag (0 for local ones) and its role.

        >>> FlagPlan(world_size=4, phases=2).role(Flag(rank=0, index=14))
        (1, <FlagRole.EXIT: 'exit'>)
        """
        if flag.index >= self.handshakes:
            return 0, FlagRole.LOCAL
        phase, index = divmod(flag.index, 2 * self.world_size)
        return phase, FlagRole.ENTRY if index < self.world_size else FlagRole.EXIT

    def local(self, rank: int, queue: int) -> Flag:
        """Return the flag by which another engine of ``rank`` releases its DMA queue number ``queue``."""
        return Flag(rank, self.handshakes + queue)

    def _entry(self, partner: int, mover: int, phase: int) -> Flag:
        return Flag(mover, 2 * self.world_size * phase + partner)

    def _exit(self, partner: int, mover: int, phase: int) -> Flag:
        return Flag(partner, 2 * self.world_size * phase + self.world_size + mover)

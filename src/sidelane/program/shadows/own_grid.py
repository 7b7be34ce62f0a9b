"""Grids of kernels with a device context (``device/context.py``), whose flags are their own."""

from __future__ import annotations

import dataclasses

from sidelane.program.batch import Definition
from sidelane.program.collective import ReduceOp, Reduction
from sidelane.program.ir import Flag, Program
from sidelane.program.shadows.blocks import Blocks, Commands, queues_of

SUM = Reduction(ReduceOp.SUM, "float32")


@dataclasses.dataclass(frozen=True, slots=True)
class OwnGrid(Blocks):
    """The programs of a launch on every rank.

    Flag ``phase * count + block`` of the kernel is the one of a phase and a block; each sender has its own word of it.
    """

    def flag(self, rank: int, phase: int, block: int, sender: int) -> Flag:
        return Flag(rank, (phase * self.count + block) * self.world_size + sender)

    def flag_count(self, phases: int) -> int:
        """Flags of each rank."""
        return phases * self.count * self.world_size

    def made(self, definition: Definition, name: str, commands: Commands, *, staging_bytes: int, flags: int) -> Program:
        """The shadow of a kernel whose blocks have these commands."""
        places = [(rank, block) for rank in range(self.world_size) for block in range(self.count)]
        queues = tuple(queue for place in places for queue in queues_of(*place, commands(*place)))
        return Program(definition, f"{name}, in a kernel", queues, (staging_bytes,) * self.world_size, flags)

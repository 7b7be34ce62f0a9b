"""Grids of kernels with a device context (``device/context.py``), whose flags are their own."""

from __future__ import annotations

import dataclasses

from shadows.blocks import Blocks, Commands, queues_of
from sidelane.program.batch import Definition
from sidelane.program.collective import Buffer, ReduceOp, Reduction, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.kernel import MOST_BLOCKS

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

    def ends_early(self, program: Program) -> Program:
        """The shadow of a kernel whose blocks count themselves by ``end_relaxed`` long before they end.

        A block reads the generation and then counts itself; the last one (any may be; here, that with the highest
        number) writes the next one when all have. The count vouches for that reading and for nothing else that the
        block does, which stands in other queues, before or behind it. The next launch reads what this one has written:
        streams order launches, and so does ``verify``.
        """
        word, word_bytes = max(program.staging_bytes), 4
        first_turn = 1 + max(queue.engine.index for queue in program.queues) // MOST_BLOCKS

        def staged(rank: int, number: int) -> Span:
            return Span(rank, Buffer.STAGING, word + number * word_bytes, word_bytes)

        def counted(rank: int, block: int) -> list[Command]:
            read = Copy(staged(rank, 1 + block), staged(rank, 0))
            count = Signal(Flag(rank, program.flag_count + block), EPOCH)
            if block < self.count - 1:
                return [read, count]
            waits = [Wait(Flag(rank, program.flag_count + other), EPOCH) for other in range(self.count)]
            return [read, count, *waits, Copy(staged(rank, 0), staged(rank, 1 + block))]

        queues = [
            Queue(rank, Engine(EngineKind.COMPUTE, first_turn * MOST_BLOCKS + block), tuple(counted(rank, block)))
            for rank in range(self.world_size)
            for block in range(self.count)
        ]
        staging_bytes = (word + (1 + self.count) * word_bytes,) * self.world_size
        flags = program.flag_count + self.count
        return dataclasses.replace(
            program, queues=(*program.queues, *queues), staging_bytes=staging_bytes, flag_count=flags
        )

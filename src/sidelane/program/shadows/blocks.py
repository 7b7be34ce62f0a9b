"""What shadows are made of: the tiles, flags and generations of thread blocks (``device/flags.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from sidelane.program.collective import Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.kernel import KernelProgram

Commands = Callable[[int, int], Iterator[Command]]
"""Those of a block of a rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The thread blocks of a launch on every rank.

    Attributes:
        world_size: ranks.
        count: blocks of a rank. Block b of each rank meets the blocks b of the others.
        tile_bytes: that a block moves at a time.
        phases: in which blocks meet.
    """

    world_size: int
    count: int
    tile_bytes: int
    phases: int

    @property
    def flag_count(self) -> int:
        """Flags of each rank: one for each phase, block and sender."""
        return self.phases * self.count * self.world_size

    def flag(self, rank: int, phase: int, block: int, sender: int) -> Flag:
        """Where ``sender`` tells a block of ``rank`` that it has come to ``phase``."""
        return Flag(rank, (phase * self.count + block) * self.world_size + sender)

    def meet(self, rank: int, block: int, phase: int) -> Iterator[Command]:
        """Tell all ranks, and wait for all."""
        yield from self.tell(rank, block, phase)
        yield from self.hear(rank, block, phase)

    def tell(self, rank: int, block: int, phase: int) -> Iterator[Command]:
        """Say to all ranks that this block has come to a phase. A generation grows with each call, as an epoch does."""
        for peer in rotated(rank, self.world_size):
            yield Signal(self.flag(peer, phase, block, rank), EPOCH)

    def hear(self, rank: int, block: int, phase: int) -> Iterator[Command]:
        """Wait until all ranks have come to a phase."""
        for sender in range(self.world_size):
            yield Wait(self.flag(rank, phase, block, sender), EPOCH)

    def tiles(self, block: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of what a block moves of a part: every so many tiles, then what is left over, if its."""
        whole, rest = divmod(nbytes, self.tile_bytes)
        for tile in range(block, whole, self.count):
            yield tile * self.tile_bytes, self.tile_bytes
        if rest and block == whole % self.count:
            yield whole * self.tile_bytes, rest

    def queue(self, rank: int, block: int, commands: Sequence[Command]) -> Queue:
        """The commands of one block."""
        return Queue(rank, Engine(EngineKind.COMPUTE, block), tuple(commands))


def rotated(rank: int, world_size: int) -> Iterator[int]:
    """Ranks in the order in which a rank turns to them, itself first."""
    return ((rank + turn) % world_size for turn in range(world_size))


def copied(dst: Span, src: Span) -> Iterator[Command]:
    """A copy, if there is anything to copy: in place, what stays where it is is stored as it was."""
    if dst.nbytes and dst != src:
        yield Copy(dst, src)


def made_of(program: KernelProgram, grid: Blocks, commands: Commands, *, staging_bytes: int) -> Program:
    """The shadow of a kernel whose blocks have these commands."""
    n = program.world_size
    places = [(rank, block) for rank in range(n) for block in range(grid.count)]
    queues = tuple(grid.queue(rank, block, list(commands(rank, block))) for rank, block in places)
    name = f"{program.variant} {program.protocol}, in a kernel"
    return Program(program.collective, name, queues, (staging_bytes,) * n, grid.flag_count)

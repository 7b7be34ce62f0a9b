"""What shadows are made of: the flags and generations of thread blocks (``device/flags.py``), and what orders nothing.

Flags have the numbers that they have in an arena (``device/layout.py``): so any two shadows can follow each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from sidelane.program.collective import Reduction, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Reduce, Signal, Wait
from sidelane.program.kernel import MOST_BLOCKS, MOST_RANKS, KernelProgram
from sidelane.program.kernel_chunks import MOST_CHUNKS

DONE = MOST_CHUNKS + 1
"""The last phase, of kernels that have one for each chunk."""

BLOCK_FLAGS = (DONE + 1) * MOST_BLOCKS * MOST_RANKS
"""Of each rank: one for each phase, block and sender."""


@dataclasses.dataclass(frozen=True, slots=True)
class Apart:
    """Commands of a block that nothing orders with what else it does in the same launch: a queue of their own.

    What is relaxed is said so: a signal that releases nothing, a wait that acquires nothing but for what follows the
    kernel, a cell, which vouches for nothing but its own bytes.
    """

    commands: tuple[Command, ...]


Commands = Callable[[int, int], Iterator[Command | Apart]]
"""Those of a block of a rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The thread blocks of a launch on every rank.

    Attributes:
        world_size: ranks.
        count: blocks of a rank. Block b of each rank meets the blocks b of the others.
        tile_bytes: that a block moves at a time.
    """

    world_size: int
    count: int
    tile_bytes: int

    def flag(self, rank: int, phase: int, block: int, sender: int) -> Flag:
        """Where ``sender`` tells a block of ``rank`` that it has come to ``phase``."""
        return Flag(rank, (phase * MOST_BLOCKS + block) * MOST_RANKS + sender)

    def meet(self, rank: int, block: int, phase: int) -> Iterator[Command]:
        """Tell all ranks, and wait for all."""
        yield from self.tell(rank, block, phase)
        yield from self.hear(rank, block, phase)

    def tell(self, rank: int, block: int, phase: int, *, but: int | None = None) -> Iterator[Command]:
        """Say to all ranks (but one, who does not listen) that this block has come to a phase. A generation grows with
        each call, as an epoch does.
        """
        for peer in rotated(rank, self.world_size):
            if peer != but:
                yield Signal(self.flag(peer, phase, block, rank), EPOCH)

    def hear(self, rank: int, block: int, phase: int) -> Iterator[Command]:
        """Wait until all ranks have come to a phase."""
        for sender in range(self.world_size):
            yield self.hear_from(sender, rank, block, phase)

    def hear_from(self, sender: int, rank: int, block: int, phase: int) -> Command:
        """Wait until one rank has come to a phase."""
        return Wait(self.flag(rank, phase, block, sender), EPOCH)


def rotated(rank: int, world_size: int) -> Iterator[int]:
    """Ranks in the order in which a rank turns to them, itself first."""
    return ((rank + turn) % world_size for turn in range(world_size))


def others(rank: int, world_size: int) -> list[int]:
    """The same without itself."""
    return list(rotated(rank, world_size))[1:]


def copied(dst: Span, src: Span) -> Iterator[Command]:
    """A copy, if there is anything to copy: in place, what stays where it is is stored as it was."""
    if dst.nbytes and dst != src:
        yield Copy(dst, src)


def reduced(dst: Span, srcs: tuple[Span, ...], reduction: Reduction | None) -> Iterator[Command]:
    """Combine, in the order of the ranks; of a single one there is nothing to add."""
    assert reduction is not None
    if len(srcs) > 1:
        yield Reduce(dst, srcs, reduction)
    else:
        yield from copied(dst, srcs[0])


def made_of(
    program: KernelProgram, grid: Blocks, commands: Commands, *, staging_bytes: int, flags: int = BLOCK_FLAGS
) -> Program:
    """The shadow of a kernel whose blocks have these commands: a queue for each block, and one for what is apart."""
    n = program.world_size
    places = [(rank, block) for rank in range(n) for block in range(grid.count)]
    queues = tuple(queue for place in places for queue in queues_of(*place, commands(*place)))
    name = f"{program.variant} {program.protocol}, in a kernel"
    return Program(program.collective, name, queues, (staging_bytes,) * n, flags)


def block_of(queue: Queue) -> tuple[int, bool]:
    """Whose commands a queue of a shadow has, and whether they are apart."""
    turn, block = divmod(queue.engine.index, MOST_BLOCKS)
    return block, turn > 0


def queues_of(rank: int, block: int, commands: Iterable[Command | Apart]) -> Iterator[Queue]:
    """Those of a block: one, and one for each of what is apart."""
    everything = list(commands)
    together = tuple(command for command in everything if not isinstance(command, Apart))
    apart = (command.commands for command in everything if isinstance(command, Apart))
    for turn, some in enumerate((together, *apart)):
        yield Queue(rank, Engine(EngineKind.COMPUTE, turn * MOST_BLOCKS + block), some)

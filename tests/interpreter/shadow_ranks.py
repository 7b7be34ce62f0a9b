"""Ranks as processes under Triton's interpreter: what every block of a kernel does is what its shadow says.

Run as a program with ``TRITON_INTERPRET=1``; the arguments are the number of ranks, and which kernels: ``lists`` for
those of lists as well, ``first`` or ``second`` for a half of all others. Each shadow is then given mistakes, which must
be noticed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from accesses import recorded
from kernel_ranks import World, run_ranks
from shadowed_kernels import half_of, kernels, name_of
from shadows import shadows_of
from shadows.blocks import block_of
from steps import Byte, Places, bytes_of, compare, steps_of, steps_said, touched

from sidelane.execute.base import Addresses
from sidelane.execute.cuda.kernel_program import arrange
from sidelane.kernels import block_flags, broadcast, direct, ll, staged, through_host
from sidelane.program import kernel_chunks
from sidelane.program.batch import parts_of
from sidelane.program.collective import Buffer, Kind, ReduceOp, Reduction, Span
from sidelane.program.ir import Copy, Flag, Queue, Reduce, Signal, Wait
from sidelane.program.kernel import KernelProgram
from sidelane.program.verify import verify_sequence

TILE = 64
BLOCKS = 2
for module in (block_flags, broadcast, kernel_chunks, through_host):
    module.TILE_BYTES = TILE
broadcast.RELAYED_TILE_BYTES = TILE
through_host.LEAST_ROUNDS = 1
staged.MOVED_TILE_BYTES = staged.REDUCED_TILE_BYTES = TILE
direct.MOVED_TILE_BYTES = direct.LISTED_TILE_BYTES = direct.TILE_BYTES = TILE
direct.PAIR_TILE_BYTES = direct.FEW_TILE_BYTES = TILE
ll.WORDS_PER_TILE = ll.FEW_WORDS_PER_TILE = TILE // 4
INTS = Reduction(ReduceOp.SUM, "int32")
PARTS = {1: (100,), 2: (4, 300), 3: (100,), 4: (36,)}
"""Bytes from rank to rank, about: fewer tiles than blocks and more, with some left over."""

MANY = 4
"""Ranks, from which on each protocol is run once, of a single tensor: interpreters are slow."""


class Case:
    """A kernel on this rank, with the memory that it needs.

    Attributes:
        work: its launch.
        stays: bytes that are in their place already.
        places: what lies where.
    """

    def __init__(self, world: World, kernel: KernelProgram) -> None:
        self._world, self._kernel = world, kernel
        collective, ranks = kernel.collective, range(world.world_size)
        self._tensors: dict[str, torch.Tensor] = {}
        buffers: dict[tuple[int, str], tuple[int, int]] = {}
        for name in (Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING):
            size = kernel.staging_bytes if name == Buffer.STAGING else collective.buffer_bytes(world.rank, name)
            self._tensors[name], addresses = world.carve(size)
            buffers |= {(rank, str(name)): (addresses[rank], size) for rank in ranks if size}
        at = {place: address for place, (address, _) in buffers.items()}
        self._table = np.empty(0, np.int64)

        def store_table(values: npt.NDArray[np.int64]) -> int:
            self._table = values  # stays
            return int(values.ctypes.data)

        site = dataclasses.replace(world.site, most_blocks=kernel.blocks)
        work = arrange(kernel, site, Addresses(at, (), world.arenas), store_table)
        assert work is not None
        self.work = work
        self.stays = frozenset(byte for span in self._staying() for byte in bytes_of(span))
        self.places = Places(
            world.arenas, world.status_words, buffers, (int(self._table.ctypes.data), self._table.nbytes)
        )

    def fill(self) -> None:
        """Poison everything, then write the inputs, which may lie in outputs."""
        for tensor in self._tensors.values():
            tensor.fill_(0xA5)
        rank = self._world.rank
        for number, (part, placed) in enumerate(parts_of(self._kernel.collective)):
            span = placed(part.input_span(rank, 0, part.input_bytes(rank)))
            self._view(span).copy_(_input(number, rank, span.nbytes))

    def check(self) -> None:
        """The outputs are what they must be."""
        rank = self._world.rank
        for number, (part, placed) in enumerate(parts_of(self._kernel.collective)):
            inputs = [_input(number, peer, part.input_bytes(peer)) for peer in range(part.world_size)]
            size = part.output_bytes(rank)
            own = slice(rank * part.counts[0][0], (rank + 1) * part.counts[0][0])
            match part.kind:
                case Kind.ALL_GATHER:
                    want = torch.cat(inputs)
                case Kind.BROADCAST:
                    want = inputs[part.root or 0]
                case Kind.ALL_TO_ALL:
                    want = torch.cat([data[own] for data in inputs])
                case _:
                    want = torch.stack([data.view(torch.int32) for data in inputs]).sum(0, dtype=torch.int32)
                    want = want.view(torch.uint8)
                    want = want[own] if part.kind is Kind.REDUCE_SCATTER else want
            assert torch.equal(self._view(placed(part.output_span(rank, 0, size))), want), f"{part} in {self._kernel}"

    def _staying(self) -> Iterator[Span]:
        rank = self._world.rank
        for part, placed in parts_of(self._kernel.collective):
            if part.in_place and part.world_size == 1:  # there is nothing to move
                yield placed(part.output_span(rank, 0, part.output_bytes(rank)))
            elif part.in_place and part.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL):
                size = part.counts[0][0]
                yield placed(part.output_span(rank, rank * size, size))

    def _view(self, span: Span) -> torch.Tensor:
        return self._tensors[Buffer(span.buffer)][span.offset : span.end]


def _input(number: int, rank: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 250, (nbytes,), dtype=torch.uint8, generator=generator)


def compare_blocks(world: World, kernel: KernelProgram, generation: int, noticed: set[str]) -> int:
    """Run a kernel, see that its bytes are right, and hold every block against its shadow; how many steps it had.

    Args:
        world: of this rank.
        kernel: to run.
        generation: of this launch.
        noticed: mistakes that made a difference to some kernel, and were noticed.
    """
    case = Case(world, kernel)
    case.fill()
    with recorded() as accesses:
        world.launch(case.work)
    case.check()
    blocks, n = case.work.blocks, world.world_size
    turns = shadows_of(kernel, blocks, TILE)
    if generation % n == world.rank:  # once is enough
        verify_sequence(turns)
    shadow = turns[generation % len(turns)]
    queues = shadow.queues_of(world.rank)
    assert set(accesses) == {block_of(queue)[0] for queue in queues}, "the blocks of the launch"
    total = 0
    for block, made in accesses.items():
        where = f"rank {world.rank} block {block} of {name_of(kernel)}, {kernel.variant}, {kernel.collective}"
        mine = [queue for queue in queues if block_of(queue)[0] == block]
        found, said = steps_of(made, case.places), steps_said(mine, n)
        compare(found, said, shadow, case.stays, where)
        total += len(said.steps)
        for mistake, wrong in planted(mine, case.stays, n):
            try:
                compare(found, steps_said(wrong, n), shadow, case.stays, where)
            except AssertionError:
                noticed.add(f"{mistake} in {name_of(kernel)}")
                continue
            raise AssertionError(f"not noticed: {mistake} in {where}")
    world.release()
    return total


def planted(queues: Sequence[Queue], stays: frozenset[Byte], world_size: int) -> Iterator[tuple[str, list[Queue]]]:
    """A block's shadow with a mistake, each that there is room for. A copy of bytes that stay makes no difference."""
    together, apart = queues[0], list(queues[1:])
    assert not block_of(together)[1]
    commands = list(together.commands)
    copies = [
        number
        for number, command in enumerate(commands)
        if isinstance(command, Copy | Reduce) and not touched(command, world_size) <= stays
    ]
    signals = [number for number, command in enumerate(commands) if isinstance(command, Signal)]
    waits = [number for number, command in enumerate(commands) if isinstance(command, Wait)]

    def with_commands(changed: Sequence[object]) -> list[Queue]:
        return [dataclasses.replace(together, commands=tuple(changed)), *apart]

    if copies:
        yield "a copy left out", with_commands([c for k, c in enumerate(commands) if k != copies[-1]])
    behind = [number for number in signals if copies and number > copies[0]]
    if behind:
        others = [c for k, c in enumerate(commands) if k != behind[-1]]
        yield (
            "a signal before stores",
            with_commands([*others[: copies[0]], commands[behind[-1]], *others[copies[0] :]]),
        )
    if signals:
        signal = commands[signals[0]]
        assert isinstance(signal, Signal)
        wrong = Signal(Flag(signal.flag.rank, signal.flag.index + 1), signal.value)
        yield "another flag", with_commands([wrong if k == signals[0] else c for k, c in enumerate(commands)])
    if waits:
        yield "a wait left out", with_commands([c for k, c in enumerate(commands) if k != waits[-1]])
    for number, queue in enumerate(apart):
        if number in (0, len(apart) - 1):
            yield "something apart left out", [together, *apart[:number], *apart[number + 1 :]]
            yield "something apart in order", with_commands([*queue.commands, *commands])


def cases(world_size: int, lists: bool) -> Iterator[KernelProgram]:
    """Kernels of one tensor with all sizes, of lists with the last one."""
    *some, last = PARTS[world_size]
    if world_size >= MANY:
        single = [kernel for kernel in kernels(world_size, last, BLOCKS, INTS) if not kernel.listed]
        yield from {(kernel.protocol, kernel.collective.kind, kernel.two_shot): kernel for kernel in single}.values()
        return
    for part in some:
        yield from (kernel for kernel in kernels(world_size, part, BLOCKS, INTS) if not kernel.listed)
    yield from (kernel for kernel in kernels(world_size, last, BLOCKS, INTS) if lists or not kernel.listed)


def run(world: World) -> None:
    steps, noticed = 0, set[str]()
    every = list(cases(world.world_size, "lists" in sys.argv))
    chosen = half_of({name_of(kernel) for kernel in every}, sys.argv[2])
    every = [kernel for kernel in every if name_of(kernel) in chosen]
    for generation, kernel in enumerate(every, 1):
        steps += compare_blocks(world, kernel, generation, noticed)
    said = [f"rank {world.rank}: {len(every)} kernels, {steps} steps", *sorted(noticed)]
    os.write(1, "".join(f"{line}\n" for line in said).encode())  # in one piece: the ranks share a file


if __name__ == "__main__":
    sys.exit(run_ranks(World(int(sys.argv[1]), BLOCKS), run))

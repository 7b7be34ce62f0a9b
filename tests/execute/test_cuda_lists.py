"""Lists of tensors on the CUDA executor: what it submits, and the bytes that arrive in tensors all over the memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_world import FLAGS, MakeWorld, World, world_of
from fake_driver import LEGACY, Stream
from hip_world import hip_world
from worlds import check, fill

from sidelane.execute.base import Addresses, Pieces
from sidelane.execute.cuda.calls import Memcpy, MemcpyBatch, Operand, StreamCall
from sidelane.execute.cuda.copy_batches import CopyFootprint, batch_copies
from sidelane.program import collective as define
from sidelane.program.batch import Batch, parts_of
from sidelane.program.builders import Transport, build_batch
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify

SUM = Reduction(ReduceOp.SUM, "int32")


def program_of(parts: list[Collective], transports: list[Transport], variant: str = "b2b") -> Program:
    batch = Batch("list", parts[0].world_size, tuple(parts))
    return lower(build_batch(batch, variant, transports), {Copy})


def test_copies_are_joined_exactly_as_far_as_none_touches_what_another_one_writes() -> None:
    """The footprint against a comparison of all pairs."""
    rng = random.Random(5)

    def overlap(a: Operand, b: Operand, a_bytes: int, b_bytes: int) -> bool:
        same = (a.rank, a.buffer) == (b.rank, b.buffer)
        return same and a.offset < b.offset + b_bytes and b.offset < a.offset + a_bytes

    def apart(a: Memcpy, b: Memcpy) -> bool:
        pairs = ((a.dst, b.dst), (a.dst, b.src), (a.src, b.dst))
        return not any(overlap(x, y, a.nbytes, b.nbytes) for x, y in pairs)

    verdicts = {True: 0, False: 0}
    for _ in range(300):
        span = rng.choice((40, 400))
        copies = [
            Memcpy(
                Operand(0, Buffer.OUTPUT, rng.randrange(span)),
                Operand(1, rng.choice((Buffer.OUTPUT, Buffer.INPUT)), rng.randrange(span)),
                rng.randint(1, 9),
                False,
            )
            for _ in range(6)
        ]
        copies[3] = Memcpy(copies[3].src, copies[3].dst, copies[3].nbytes, False)
        footprint = CopyFootprint()
        for index, copy in enumerate(copies):
            verdict = footprint.is_apart(copy)
            assert verdict == all(apart(copy, other) for other in copies[:index])
            verdicts[verdict] += 1
            footprint.add(copy)
        joined = batch_copies([StreamCall(0, copy) for copy in copies])
        assert sum(len(s.call.copies) if isinstance(s.call, MemcpyBatch) else 1 for s in joined) == len(copies)
    assert min(verdicts.values()) > 100


class Lists:
    """A batch loaded on all ranks, every piece an array of its own, in no order."""

    def __init__(self, world: World, program: Program, seed: int, *, frozen: bool = False) -> None:
        self.world, self.program = world, program
        batch = program.collective
        assert isinstance(batch, Batch)
        self.batch = batch
        rng = random.Random(seed)
        places = [
            (rank, buffer, number)
            for rank in range(world.world_size)
            for buffer in (Buffer.INPUT, Buffer.OUTPUT)
            for number in range(len(batch.parts))
        ]
        rng.shuffle(places)
        self.pieces = {
            (rank, buffer, number): np.zeros(batch.parts[number].buffer_bytes(rank, buffer), np.uint8)
            for rank, buffer, number in places
        }
        self.staging = [np.zeros(max(1, nbytes), np.uint8) for nbytes in program.staging_bytes]
        offset = 4 * FLAGS if frozen else 0
        addresses = Addresses(
            {(rank, Buffer.STAGING): array.ctypes.data for rank, array in enumerate(self.staging)},
            tuple(flags.ctypes.data + offset for flags in world.flags),
            pieces={(r, b): self.table(r, b) for r in range(world.world_size) for b in (Buffer.INPUT, Buffer.OUTPUT)},
        )
        self.ranks = [executor.load(program, addresses, captured=frozen) for executor in world.executors]
        self.graphs = world.captured(lambda: world.start(self.ranks)) if frozen else []

    def table(self, rank: int, buffer: Buffer) -> Pieces:
        arrays = [self.pieces[rank, buffer, number] for number in range(len(self.batch.parts))]
        rows = [
            (start, len(array), array.ctypes.data)
            for start, array in zip(self.batch.starts(rank, buffer), arrays, strict=True)
            if len(array)
        ]
        return Pieces(*zip(*rows, strict=True)) if rows else Pieces((), (), ())

    def run_checked(self, seed: int) -> None:
        self.each(fill, seed)
        if self.graphs:
            self.world.replay(self.graphs)
        else:
            self.world.start(self.ranks)
            self.world.synchronize()
        self.each(check, seed)

    def each(self, function: Callable[..., None], seed: int) -> None:
        """Call ``fill`` or ``check`` for the tensors of each rank."""
        for number, (part, _) in enumerate(parts_of(self.batch)):
            for rank in range(self.world.world_size):
                pieces = (self.pieces[rank, buffer, number] for buffer in (Buffer.INPUT, Buffer.OUTPUT))
                function(part, rank, 100 * seed + number, *map(torch.from_numpy, pieces))


def mixture(n: int) -> Program:
    parts = [
        define.all_gather([5] * n),
        define.all_gather([0] * n),
        define.all_gather([300] * n, in_place=True),
        define.all_to_all([[33] * n] * n, in_place=True),
        define.all_to_all([[8] * n] * n),
        define.broadcast(70, n, n - 1, in_place=True),
    ]
    wanted = [Transport.PULL, Transport.PUSH, Transport.PUSH, Transport.STAGED, Transport.STAGED, Transport.PUSH]
    return program_of(parts, wanted)


def reductions(n: int) -> Program:
    shards = [8 * (rank + 1) for rank in range(n)]
    parts = [define.all_reduce(shards, SUM, in_place=True), define.all_reduce([40] * n, SUM)]
    return program_of(parts, [Transport.PUSH] * 2)


@pytest.mark.parametrize("make", [world_of, hip_world])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("listed", [mixture, reductions])
def test_bytes_arrive_in_every_tensor(listed: Callable[[int], Program], frozen: bool, make: MakeWorld) -> None:
    program = freeze(listed(3)) if frozen else listed(3)
    verify(program)
    with make(3) as world:
        lists = Lists(world, program, seed=1, frozen=frozen)
        for seed in range(4):
            lists.run_checked(seed)


def test_lists_on_the_legacy_stream_and_single_channels() -> None:
    with world_of(2, channels=1) as world:
        world.streams = [Stream(LEGACY) for _ in world.streams]
        lists = Lists(world, mixture(2), seed=2)
        for seed in range(3):
            lists.run_checked(seed)


def test_a_piece_without_an_address_is_named_when_loading() -> None:
    moves = [define.all_gather([64 + k] * 2, in_place=True) for k in range(3)]
    program = program_of(moves, [Transport.PUSH] * 3)
    with world_of(2) as world:
        lists = Lists(world, program, seed=3)
        table = lists.table(1, Buffer.OUTPUT)
        cut = Pieces(*(column[:1] for column in (table.starts, table.sizes, table.addresses)))
        pieces = {(0, Buffer.OUTPUT): lists.table(0, Buffer.OUTPUT), (1, Buffer.OUTPUT): cut}
        addresses = Addresses({}, (world.flags[0].ctypes.data, world.flags[1].ctypes.data), pieces=pieces)
        with pytest.raises(ValueError, match="no address of buffer output of rank 1"):
            world.executors[0].load(program, addresses)

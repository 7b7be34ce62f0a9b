"""What ranks do with symmetric memory that comes and goes: the same on CPU processes and GPUs."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator, Config, MismatchError
from sidelane.errors import UnavailableError
from sidelane.memory.heap import generation

DTYPES = (torch.uint8, torch.float32, torch.int64, torch.bfloat16)


def comes_and_goes(group: dist.ProcessGroup, seed: int, steps: int) -> tuple[list[Any], int, int]:
    """Tensors of random sizes, dropped by each rank when it likes, by the collector or late; collectives on them.

    Returns:
        Where each was, bytes that were given out in all, and bytes reserved.
    """
    late, draw = random.Random(100 * seed + dist.get_rank(group)), random.Random(seed)
    locations: list[Any] = []
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        held: dict[int, torch.Tensor] = {}
        lingering: list[Any] = []
        total = 0
        for step in range(steps):
            size, dtype = draw.choice((1, 30, 1000, 70_000)), draw.choice(DTYPES)
            tensor = comm.empty(n, size, dtype=dtype)
            total += tensor.nbytes
            region = comm.heap.locate(tensor)
            locations.append(region.location)
            held[step] = tensor
            for number in draw.sample(sorted(held), min(len(held), 2)):
                each = held[number]
                value = (7 * step + number) % 100
                each.fill_(123)
                each[rank] = value + rank
                variant = draw.choice(("auto", "b2b", "pcpy"))
                work = comm.all_gather(each, each[rank], variant=variant, async_op=draw.random() < 0.3)
                if work is not None:
                    work.wait()
                assert [int(row[-1]) for row in each] == [value + peer for peer in range(n)], (step, number)
            for number in [number for number in sorted(held) if draw.random() < 0.25]:
                gone = held.pop(number)
                if late.random() < 0.3:  # a view lives on, for a while, or until a collection
                    cycle: list[Any] = [gone[:1].view(-1)]
                    cycle.append(cycle)
                    lingering += [cycle] * (late.random() < 0.5)
            del tensor, each
            gone = None
            if lingering and late.random() < 0.3:
                lingering.clear()
            if late.random() < 0.1:
                gc.collect()
                time.sleep(0.002 * late.random())
        use = comm.memory()
        assert use.used <= use.reserved and use.most is None
    return locations, total, use.reserved


def a_loop_that_allocates(group: dist.ProcessGroup, steps: int) -> None:
    """The same tensors again and again: nothing grows, and calls that were made before are still known."""
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        grown = -1
        for step in range(steps):
            output, input = comm.empty(n, 5000), comm.empty(5000)
            input.fill_(step + rank)
            comm.all_gather(output, input, variant="b2b")
            assert output[:, 17].tolist() == [step + peer for peer in range(n)]
            if step == 3:
                grown, reserved = generation(), comm.memory().reserved
            assert step < 3 or (generation() == grown and comm.memory().reserved == reserved), step


def bounded(group: dist.ProcessGroup) -> list[str]:
    """No more than is allowed: an error on all ranks, and room again when something was dropped on all of them."""
    told: list[str] = []
    config = Config(timeout_s=30, memory_bytes=8 << 20)
    with Communicator(group, device=torch.get_default_device(), config=config) as comm:
        first = [comm.empty(2 << 20, dtype=torch.uint8) for _ in range(4)]
        try:
            comm.empty(1, dtype=torch.uint8)
        except UnavailableError as error:
            told.append(str(error))
        if comm.rank == 0:
            del first[1]
        try:
            comm.empty(1, dtype=torch.uint8)  # the others have it still
        except UnavailableError as error:
            told.append(str(error))
        if comm.rank:
            del first[1]
        again = comm.empty(2 << 20, dtype=torch.uint8)
        told.append(f"{comm.memory().used} of {comm.memory().reserved}")
        try:
            comm.empty(1 + comm.rank)
        except MismatchError as error:
            told.append(str(error))
        del again
        last = comm.empty(100)
        last.fill_(comm.rank)
        comm.broadcast(last, root=0)
        assert not last.any()
    return told

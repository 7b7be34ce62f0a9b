"""Symmetric memory that comes and goes, by CPU ranks and on GPUs."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from marks import long
from on_ranks import everyones, on_ranks
from sweeps import communicator

from sidelane import MismatchError
from sidelane.collectives.prepare import FLAGS
from sidelane.errors import UnavailableError
from sidelane.memory.heap import generation

DTYPES = (torch.uint8, torch.float32, torch.int64, torch.bfloat16)


@on_ranks(1, seed=1, steps=100)
@on_ranks(long(2), seed=2, steps=100)
@on_ranks(3, seed=4, steps=100)
@on_ranks(long(4), seed=5, steps=100)
@on_ranks(gpu=True, seed=0, steps=200)
@on_ranks(gpu=True, seed=1, steps=200)
def test_places_are_the_same_on_all_ranks_and_used_again(group: dist.ProcessGroup, seed: int, steps: int) -> None:
    """Tensors of random sizes, dropped by each rank when it likes, by the collector or late; collectives on them."""
    late, draw = random.Random(100 * seed + dist.get_rank(group)), random.Random(seed)
    locations: list[Any] = []
    with communicator(group) as comm:
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
        assert use.own >= 4 * 2 * FLAGS, "flags of 4 bytes for eager programs, and others for captured ones"
    assert len(set(locations)) < len(locations) and use.reserved < total / 2
    assert everyones(group, (locations, total)) == [(locations, total)] * n


@on_ranks(2, steps=30)
@on_ranks(gpu=True, steps=50)
def test_a_loop_that_allocates_grows_nothing(group: dist.ProcessGroup, steps: int) -> None:
    """The same tensors again and again: nothing grows, and calls that were made before are still known."""
    with communicator(group) as comm:
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


@on_ranks(3, gpu=True)
def test_no_more_than_is_allowed(group: dist.ProcessGroup) -> None:
    """No more than is allowed: an error on all ranks, and room again when something was dropped on all of them."""
    told: list[str] = []
    with communicator(group, memory_bytes=8 << 20) as comm:
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
    assert all("allowed=8388608, Config.memory_bytes" in text for text in told[:2]), told
    assert len(told) == 4 and told[2] == "8388608 of 8388608" and "different calls" in told[3], told


@on_ranks(gpu=True)
def test_captured_memory_stays(group: dist.ProcessGroup) -> None:
    """A tensor that a graph has captured is dropped; what is allocated afterwards lies elsewhere."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n, 1000), torch.full((1000,), float(rank))
        comm.all_gather(output, input, variant="b2b")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            comm.all_gather(output, input, variant="b2b")
        address = output.data_ptr()
        del output
        others = [comm.empty(n, 1000) for _ in range(10)]
        assert address not in {each.data_ptr() for each in others}
        for each in others:
            each.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert all(each.eq(-1).all() for each in others)

"""What ranks execute in ``test_device_process_group``."""

from __future__ import annotations

from typing import Any

import group_cases
import torch
import torch.distributed as dist
import two_worlds
from device_context import Context
from torch.distributed import distributed_c10d as c10d

import sidelane


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(group_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def batches_by_nccl(context: Context) -> None:
    """Between all ranks, to oneself too: made one by one they would wait for ever."""
    sidelane.register()
    with torch.device(context.device):
        ours = dist.new_group(backend="sidelane")
        try:
            group_cases.exchange_batches(ours, set(range(context.world_size)))
        finally:
            dist.destroy_process_group(ours)


def joins_worlds(context: Context, folder: str) -> None:
    """A group without a list of ranks, in which each rank has another number than in the default group."""
    sidelane.register()
    size, rank = context.world_size, context.world_size - 1 - context.rank
    store = dist.FileStore(f"{folder}/joint", size)
    ours, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("sidelane"), store, group_name=folder, timeout=two_worlds.TIMEOUT
    )
    c10d._world.pg_group_ranks[ours] = {each: each for each in range(size)}
    try:
        with torch.device(context.device):
            two_worlds.check_calls(ours, size)
    finally:
        dist.destroy_process_group(ours)


def registers_pools(context: Context, allocator: str) -> list[list[str]]:
    """Calls on memory of torch's or NCCL's allocator that the group has registered, eager and in a graph, and again
    behind its registration: how peers reach the tensors."""
    sidelane.register()
    device, said = context.device, []
    ours = dist.new_group(backend="sidelane")
    try:
        backend = ours._get_backend(device)
        size, rank, count = ours.size(), ours.rank(), 3 << 18
        try:
            pool = torch.cuda.MemPool(backend.mem_allocator if allocator == "nccl" else None)
        except RuntimeError as error:  # NCCL has none where a GPU has no multicast
            return [[str(error)]]
        with torch.cuda.use_mem_pool(pool):
            gathered, part = torch.empty(size, count, device=device), torch.empty(count, device=device)
            total = torch.empty(7 << 20, dtype=torch.bfloat16, device=device)
        backend.register_mem_pool(pool, symm=True)
        tensors = gathered, part, total
        comm = ours.communicator(device)

        def calls(step: float) -> None:
            part.fill_(step + rank), total.fill_(step + rank), gathered.fill_(-1)
            dist.all_gather_into_tensor(gathered, part, group=ours)
            dist.all_reduce(total, group=ours)

        def check(step: float) -> None:
            assert torch.equal(gathered[:, 5], torch.arange(step, step + size, device=device)), step
            assert torch.equal(gathered.amin(1), gathered.amax(1)), step
            assert (total == sum(step + peer for peer in range(size))).all(), step

        def several() -> None:
            for step in range(8):
                calls(step)
                check(step)
            said.append([str(comm.reach(tensor)) for tensor in tensors])

        several()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls(3.0)
        for _ in range(5):
            gathered.zero_()
            graph.replay()
            check(3.0)
        torch.cuda.synchronize()
        dist.barrier(group=ours)
        del graph
        backend.deregister_mem_pool(pool)
        several()
        return said
    finally:
        dist.destroy_process_group(ours)


def streams(context: Context) -> None:
    """Asynchronous and synchronous calls between kernels, on streams of the caller: each sees what came before it."""
    with group_cases.sidelane_group(dist.group.WORLD) as ours, torch.device(context.device):
        size, side = ours.size(), torch.cuda.Stream()
        for number in range(50):
            first, second = torch.zeros(1 << 18), torch.zeros(1 << 18)
            torch.cuda._sleep(200_000 * (number % 3))
            first += ours.rank() + number
            work = dist.all_reduce(first, group=ours, async_op=True)
            side.wait_stream(torch.cuda.current_stream())  # for its zeros
            with torch.cuda.stream(side):
                second += 1
                dist.all_reduce(second, group=ours)
                second *= 2
            assert work is not None
            work.wait()
            doubled = first * 2
            torch.cuda.current_stream().wait_stream(side)
            assert doubled.eq(2 * (sum(range(size)) + size * number)).all() and second.eq(2 * size).all()
            del first, second


def memory_of_asynchronous_calls(context: Context) -> None:
    """A tensor that is freed while peers are late keeps its bytes; behind a wait, these are the next tensor's."""
    side, reused = torch.cuda.Stream(), dict.fromkeys(("behind", "elsewhere", "never"), 0)
    with group_cases.sidelane_group(dist.group.WORLD) as ours, torch.device(context.device):
        size, rank = ours.size(), ours.rank()
        for numel in (1 << 10, 1 << 22):
            expected = torch.arange(float(size)).repeat_interleave(numel)
            for way in reused:
                for number in range(12):
                    source, result = torch.full((numel,), float(rank + number)), torch.empty(size * numel)
                    address = source.data_ptr()
                    if rank == number % size:
                        torch.cuda._sleep(3_000_000)
                    work = dist.all_gather_into_tensor(result, source, ours, async_op=True)
                    assert work is not None
                    if way != "never":
                        with torch.cuda.stream(side if way == "elsewhere" else None):
                            work.wait()
                    del work, source
                    other = torch.full((numel,), -1.0)
                    reused[way] += other.data_ptr() == address
                    torch.cuda.synchronize()
                    assert torch.equal(result, expected + number), (numel, way, number)
                    del other, result
    print(reused)
    assert reused["behind"] > 12


def in_a_graph(context: Context) -> None:
    """Collectives of the group, captured: replays are calls; what a graph cannot hold is refused, never dropped."""
    stream = torch.cuda.Stream()
    with group_cases.sidelane_group(dist.group.WORLD) as ours, torch.device(context.device), torch.cuda.stream(stream):
        tensor, output = torch.ones(3000), torch.empty(3000 * ours.size())

        def step() -> None:
            dist.all_reduce(tensor, group=ours)
            work = dist.all_gather_into_tensor(output, tensor, ours, async_op=True)
            assert work is not None
            work.wait()
            tensor.div_(ours.size())

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for number in range(5):
            tensor.fill_(ours.rank() + number)
            graph.replay()
            expected = sum(range(ours.size())) + ours.size() * number
            assert output.eq(expected).all() and tensor.eq(expected / ours.size()).all(), number
        torch.cuda.synchronize()

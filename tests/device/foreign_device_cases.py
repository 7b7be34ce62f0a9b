"""What ranks execute in ``test_device_reach`` on memory that is not of torch's usual allocator: its pools, those of
graphs, and what other libraries allocate."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
from collections.abc import Sequence
from typing import Any

import learn_cases
import reach_cases
import torch
from device_cases import Context
from reach_device_cases import offered_each_time

from sidelane import Communicator

CONFIGS = {"always": reach_cases.MAPPING, "learn": learn_cases.LEARNING}


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Foreign:
    """Bytes as another library has them: of ``cudaMalloc``, or of the driver's pool (``cudaMallocAsync``)."""

    def __init__(self, nbytes: int, *, pooled: bool = False) -> None:
        address, size, default = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_void_p()
        self._free: Any
        if pooled:
            failed = _library().cuMemAllocAsync(ctypes.byref(address), size, default)
            self._free = lambda: _library().cuMemFreeAsync(address, default)
        else:
            failed = _library().cuMemAlloc_v2(ctypes.byref(address), size)
            self._free = lambda: _library().cuMemFree_v2(address)
        assert not failed, failed
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        torch.cuda.synchronize()
        self._free()


def foreign(numel: int, *, pooled: bool = False, by_dlpack: bool = False) -> torch.Tensor:
    """int32 elements in such memory, which is freed with the last tensor there."""
    made = torch.as_tensor(Foreign(4 * max(numel, 1), pooled=pooled), device="cuda").view(torch.int32)[:numel]
    return torch.from_dlpack(made) if by_dlpack else made


def _calls(comm: Communicator, tensors: Sequence[torch.Tensor], step: int) -> None:
    """An all-gather, an all-to-all and an all-reduce on an output and an input; every element is looked at."""
    output, input = tensors
    n, rank, size = comm.world_size, comm.rank, len(input) // comm.world_size
    peers = torch.arange(n, dtype=torch.int32, device=input.device).view(n, 1)
    part = input[:size].fill_(7 * step + rank)
    comm.all_gather(output.fill_(-1), part)
    assert (output.view(n, size) == 7 * step + peers).all(), ("all_gather", step)
    input.view(n, size).copy_(100 * step + 10 * rank + peers)
    comm.all_to_all(output.fill_(-1), input)
    assert (output.view(n, size) == 100 * step + 10 * peers + rank).all(), ("all_to_all", step)
    comm.all_reduce(input.fill_(step + rank), output=output.fill_(-1))
    assert (output == n * step + sum(range(n))).all(), ("all_reduce", step)


@offered_each_time
def in_pools_of_torch(context: Context, rounds: int) -> list[str]:
    """Tensors of pools that come and go; how peers reach them."""
    device, n = context.device, context.world_size
    said = []
    with Communicator(device=device, config=reach_cases.MAPPING) as comm:
        for step in range(rounds):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                size = (3 << 20) + 5 * step if step % 2 else 333
                tensors = [torch.empty(n * size, dtype=torch.int32, device=device) for _ in range(2)]
            said += [str(comm.reach(each)) for each in tensors]
            for repeat in range(3):
                _calls(comm, tensors, 10 * step + repeat)
            del tensors
            torch.cuda.synchronize()
            del pool
            if step % n == context.rank:
                torch.cuda.empty_cache()
    return said


def learnt(context: Context, where: str, calls: int) -> dict[str, int]:
    """A loop around tensors of a pool of torch's, of a graph or of another library, from whose addresses ranks learn;
    what this rank did."""
    device, n = context.device, context.world_size
    size = 300_000
    kept: Any = None
    with learn_cases.counted() as said, Communicator(device=device, config=learn_cases.LEARNING) as comm:
        if where == "pool":
            kept = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(kept):
                tensors = [torch.empty(n * size, dtype=torch.int32, device=device) for _ in range(2)]
        elif where == "graph":
            kept = torch.cuda.CUDAGraph()
            with torch.cuda.graph(kept):
                tensors = [torch.zeros(n * size, dtype=torch.int32, device=device) for _ in range(2)]
        else:
            tensors = [foreign(n * size) for _ in range(2)]
        for step in range(calls):
            _calls(comm, tensors, step)
        found = learn_cases.done(said, comm)
        del tensors
    del kept
    return found


@offered_each_time
def in_memory_of_graphs(context: Context, rounds: int) -> list[str]:
    """Tensors that are made while a graph is captured: used by a call inside of it and by others; how they are reached.
    Then the graph goes, and its memory is given out again."""
    device, n, rank, size = context.device, context.world_size, context.rank, 200_000
    said = []
    with Communicator(device=device, config=reach_cases.MAPPING) as comm:
        source = torch.empty(size, dtype=torch.int32, device=device)
        peers = torch.arange(n, dtype=torch.int32, device=device).view(n, 1)
        usual = torch.empty(n * size, dtype=torch.int32, device=device)
        comm.all_gather(usual, source)
        for step in range(rounds):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                made = source * 2
                gathered = torch.empty(n * size, dtype=torch.int32, device=device)
                comm.all_gather(gathered, made)
                later = gathered + 1
            for replay in range(4):
                source.fill_(1000 * step + 10 * replay + rank)
                gathered.fill_(-1)
                graph.replay()
                expected = 2 * (1000 * step + 10 * replay + peers)
                assert (gathered.view(n, size) == expected).all() and (later.view(n, size) == expected + 1).all()
                comm.all_gather(usual.fill_(-1), made)  # what a graph has made is the input of a call outside of it
                assert (usual.view(n, size) == expected).all()
                comm.all_gather(gathered.fill_(-1), source)
                assert (gathered.view(n, size) == expected // 2).all()
            said += [str(comm.reach(each)) for each in (made, gathered)]
            second = torch.cuda.CUDAGraph()
            with torch.cuda.graph(second):  # a capture of a call on another graph's memory
                comm.all_gather(gathered, made)
            graph.replay()
            gathered.fill_(-1)
            second.replay()
            assert (gathered.view(n, size) == expected).all()
            torch.cuda.synchronize()
            del graph, second, made, gathered, later
            gc.collect()
            torch.cuda.empty_cache()
    return said


@offered_each_time
def of_other_libraries(context: Context, mode: str, rounds: int) -> list[list[str]]:
    """Memory of ``cudaMalloc``, small and large, that is freed and allocated again; of the driver's pool; and of the
    one on one rank, of the other on the rest. How each is reached."""
    n, first = context.world_size, context.rank == 0
    said: list[list[str]] = []
    with Communicator(device=context.device, config=dataclasses.replace(CONFIGS[mode], timeout_s=60)) as comm:
        for step in range(rounds):
            rows = []
            for size in (33, 250, 5001, 400_000, 3 << 20):
                by_dlpack = bool((step + size) % 2)
                # Small ones, side by side in one block of the driver.
                pairs = [[foreign(n * size, by_dlpack=by_dlpack) for _ in range(2)] for _ in range(3)]
                for number, pair in enumerate(pairs):
                    _calls(comm, pair, 100 * step + number)
                rows.append(str(comm.reach(pairs[-1][0])))
            for mixed in (False, True):
                pair = [foreign(n * 5001, pooled=not (mixed and first)) for _ in range(2)]
                _calls(comm, pair, 100 * step + 50 + mixed)
                if not mixed:
                    rows.append(str(comm.reach(pair[0])))
            said.append(rows)
            pairs.clear()
            del pair
    return said

"""Time lists of one tensor beside the plain kernels: in CUDA graphs, and the host's time of eager calls.

Run by hand on GPUs of one node:

    torchrun --nproc-per-node 2 results/scripts/kernels_of_one.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidelane.session import Communicator

CALLS = 20
SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
KINDS = (
    ("all_gather", "one_shot"),
    ("all_to_all", "one_shot"),
    ("reduce_scatter", "one_shot"),
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("broadcast", "one_shot"),
)

Call = Callable[[], Any]


def main() -> None:
    """Time every kind and size, and print a line of each."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    comm, stream = Communicator(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for kind, variant in KINDS:
            for nbytes in SIZES:
                plain, listed = calls_of(comm, kind, variant, nbytes)
                us = [graph_us(comm, call, stream) for call in (plain, listed, plain, listed)]
                ratio = min(us[1], us[3]) / min(us[0], us[2])
                host = host_us(plain), host_us(listed)
                if comm.rank == 0:
                    print(
                        f"{kind:15}{variant:10}{nbytes >> 10:7} KiB  plain {us[0]:8.2f} {us[2]:8.2f}  list "
                        f"{us[1]:8.2f} {us[3]:8.2f} us in graphs ({ratio:.3f}); host {host[0]:6.1f} {host[1]:6.1f} "
                        f"({host[1] / host[0]:.2f})",
                        flush=True,
                    )
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # what is timed has ended, and nothing is to be given back in order


def calls_of(comm: Communicator, kind: str, variant: str, nbytes: int) -> tuple[Call, Call]:
    """The plain call, and that of lists of one tensor, on symmetric memory."""
    whole, other = (comm.empty(nbytes // 2, dtype=torch.bfloat16).zero_() for _ in range(2))
    part = nbytes // 2 // comm.world_size
    options: dict[str, Any] = {"variant": variant} | ({"root": 0} if kind == "broadcast" else {})
    match kind:
        case "all_gather":
            tensors: tuple[torch.Tensor, ...] = (whole, other[:part])
        case "reduce_scatter":
            tensors = (whole[:part], other)
        case "all_to_all":
            tensors = (whole, other)
        case _:
            tensors = (whole,)
    call, lists = getattr(comm, kind), tuple([tensor] for tensor in tensors)
    return lambda: call(*tensors, **options), lambda: call(*lists, **options)


def graph_us(comm: Communicator, call: Call, stream: torch.cuda.Stream, rounds: int = 15) -> float:
    """Return the microseconds of a call in a graph of many."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        comm.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    slowest = torch.tensor(statistics.median(times), device=comm.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def host_us(call: Call, calls: int = 50, rounds: int = 9) -> float:
    """Return the host's microseconds of an eager call."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # no call waits for the device
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    main()

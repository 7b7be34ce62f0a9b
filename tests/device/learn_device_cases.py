"""What ranks execute in ``test_device_learning`` on tensors from whose addresses they learn without waiting."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import learn_cases
import torch
import torch.distributed as dist
from device_cases import Context

import sidelane
from sidelane import Communicator, Config
from sidelane.integrations import ledger
from sidelane.integrations.registration import register


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(learn_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def large_ones(context: Context, calls: int) -> tuple[dict[str, int], str, int]:
    """A loop around calls of 4 MiB that nobody looks at before the end of each round; what they did, why the last one
    ran as it did, and bytes that are wrong."""
    device, n, rank, numel = context.device, context.world_size, context.rank, 1 << 20
    with learn_cases.counted(1 << 20) as said, Communicator(device=device, config=learn_cases.LEARNING) as comm:
        inputs = [torch.empty(numel, device=device) for _ in range(2)]
        output = torch.empty(n, numel, device=device)
        small = torch.empty(n, 100, device=device)
        expected = torch.arange(n, device=device).view(n, 1)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for call in range(calls):
            input = inputs[call % 2].fill_(call + rank)
            output.fill_(-1)
            work = comm.all_gather(output, input, async_op=call % 3 == 1)
            if work is not None:
                work.wait()
            wrong += (output != call + expected).sum()
            comm.all_gather(small, small[rank])  # teaches nothing
            if call % 32 == 31:
                torch.cuda.synchronize()  # hosts stay together, as in a program that looks at its loss
        comm.all_gather(output, inputs[calls % 2])
        choice = comm.last_choice()
        assert choice is not None
        return learn_cases.done(said, comm), choice.reason, int(wrong.item())


def in_graphs(context: Context) -> bool:
    """A graph of a call that goes ahead outside of graphs: it has the same memory there, without staging."""
    device, n, rank, numel = context.device, context.world_size, context.rank, 1 << 20
    config = dataclasses.replace(learn_cases.LEARNING, map_memory=True)
    with learn_cases.counted(1 << 20) as said, Communicator(device=device, config=config) as comm:
        input, output = torch.empty(numel, device=device), torch.empty(n, numel, device=device)
        for _ in range(100):
            comm.all_gather(output, input.fill_(rank))
            torch.cuda.synchronize()
        assert learn_cases.done(said, comm)["hits"] > 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_gather(output, input)
        for replay in range(5):
            input.fill_(replay + rank)
            output.fill_(-1)
            graph.replay()
            assert output[:, -1].tolist() == [replay + peer for peer in range(n)]
        assert comm._path.reach is not None and comm._path.reach._known, "the capture has offered it"
        before = learn_cases.done(said, comm)["hits"]
        comm.all_gather(output, input)
        return learn_cases.done(said, comm)["hits"] == before + 1


def in_a_group(context: Context, calls: int) -> tuple[list[str], float]:
    """A group as torch makes it, with no setting: all-gathers of 64 MiB, asynchronous as FSDP2's, with right bytes.
    What its report says of them; and seconds until the device has its memory back, once the tensors are freed."""
    device, n, rank, numel = context.device, context.world_size, context.rank, 1 << 24
    register()
    group = dist.new_group(backend="sidelane")
    ledger.reset()
    input, output = torch.empty(numel, device=device), torch.empty(n * numel, device=device)
    expected = torch.arange(n, device=device).repeat_interleave(numel)
    for call in range(calls):
        input.fill_(call + rank)
        work = dist.all_gather_into_tensor(output, input, group=group, async_op=True)
        work.wait()
        assert torch.equal(output, expected + call)
    why = [row.why for row in sidelane.report().rows if row.operation.startswith("all_gather")]
    del input, output, expected
    torch.cuda.synchronize()
    dist.barrier()
    free_before, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    cached -= torch.cuda.memory_reserved(device)
    began = time.monotonic()
    while torch.cuda.mem_get_info(device)[0] < free_before + cached and time.monotonic() < began + 20:
        time.sleep(0.01)
    seconds = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group(group)
    return why, seconds


def host_times(context: Context, nbytes: int, calls: int) -> dict[str, float]:
    """Microseconds of an eager all-gather on the host, median: by what the call does. And of the device, beside it."""
    device, n, numel = context.device, context.world_size, nbytes // 4
    found: dict[str, list[float]] = {}

    def timed(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        took = 1e6 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        return took

    output, input = torch.empty(n, numel, device=device), torch.empty(numel, device=device)
    for name, native in (("staged, compiled", True), ("staged", False)):
        with Communicator(device=device, config=Config(timeout_s=30, map_memory=False, native=native)) as comm:
            took = [timed(lambda comm=comm: comm.all_gather(output, input)) for _ in range(calls)]  # type: ignore[misc]
            found[name] = took[10:]
    with learn_cases.counted(0), Communicator(device=device, config=learn_cases.LEARNING) as comm:
        for step in range(2 * calls):
            before = learn_cases.done(collections.Counter(), comm).get("by C", 0)
            took_us, choice = timed(lambda: comm.all_gather(output, input)), comm.last_choice()
            name = "hit" if choice is not None and "no host waits" in choice.reason else "learns"
            if learn_cases.done(collections.Counter(), comm).get("by C", 0) == before:
                name += ", by Python"
            found.setdefault(name if step > 10 else "first", []).append(took_us)
        for _ in range(8 * (calls // 8)):
            began = time.perf_counter()
            comm.all_gather(output, input)
            found.setdefault("hit, on average", []).append(1e6 * (time.perf_counter() - began))
    found["learns, at most"] = [max(found["learns"])]
    found["hit, on average"] = [
        statistics.mean(found["hit, on average"])
    ]  # of windows: the first call of each does more
    return {name: round(statistics.median(times), 1) for name, times in sorted(found.items())}

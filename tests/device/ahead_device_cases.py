"""What ranks execute in ``test_device_reach`` on tensors whose addresses come again."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import ahead_cases
import reach_cases
import torch
import torch.distributed as dist
from ahead_cases import INPUT_ELSEWHERE, by_c
from device_cases import Context

from sidelane import Communicator, Config


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(ahead_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def host_times(context: Context, nbytes: int, calls: int) -> dict[str, float]:
    """Microseconds of an eager all-gather on the host, median: by what the call does."""
    device, n, numel = context.device, context.world_size, nbytes // 4
    found: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        found.setdefault(name, []).append(1e6 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        dist.barrier()  # hosts come together, so that a wait for them is short

    with Communicator(device=device, config=Config(map_memory=False)) as comm:
        whole, part = comm.empty(n, numel), comm.empty(numel)
        output, input = torch.empty(n, numel, device=device), torch.empty(numel, device=device)
        for step in range(calls):
            timed("symmetric" if step > 5 else "warm-up", lambda: comm.all_gather(whole, part))
            timed("staged" if step > 5 else "warm-up", lambda: comm.all_gather(output, input))
    with ahead_cases.ahead_of_peers(lag=32) as said, Communicator(device=device, config=reach_cases.MAPPING) as comm:

        def call(what: str, input: torch.Tensor) -> None:
            before, made = dict(said), by_c(comm)
            timed("last", lambda: comm.all_gather(output, input))
            took = found["last"].pop()
            new = [name for name in said if said[name] != before.get(name, 0)]
            names = {"hits": "hit by Python", INPUT_ELSEWHERE: "miss", "waits": "waits for hosts"}
            name = "hit by C" if by_c(comm) > made else names.get(new[0], new[0]) if new else "staged"
            found.setdefault(f"{name}{what}", []).append(took)

        for step in range(20):
            call("" if step else ", first", input)
        for turn in range(max(2, calls // 50)):
            for _ in range(50):
                call("", input)
            other = torch.empty(numel, device=device)
            call(" at a new address", other)
            large = torch.empty(numel + (3 + turn) * (1 << 20), device=device)[:numel]  # a segment of its own
            for _ in range(40):  # the first misses; later the ranks wait for each other again, and map it
                call(" in a new segment", large)
            del other, large
            torch.cuda.empty_cache()
    mapped = "waits for hosts in a new segment"
    found[f"{mapped}, at most"] = [max(found[mapped])]
    return {name: round(statistics.median(times), 1) for name, times in sorted(found.items()) if name != "last"}


def hits_by_c(context: Context, calls: int) -> tuple[dict[str, int], list[str]]:
    """Calls of two sizes in periods of one and three, on tensors that this rank replaces now and then: for a call or
    for good, by memory of a segment of its own or not, freed at once. No host waits for the device but every 250 calls.
    What this rank did; and what was wrong."""
    device, n, rank = context.device, context.world_size, context.rank
    late, other = random.Random(7 + rank), torch.cuda.Stream(device)
    wrong: list[str] = []
    with ahead_cases.ahead_of_peers(lag=32) as said, Communicator(device=device, config=reach_cases.MAPPING) as comm:

        def new(parts: int, numel: int) -> torch.Tensor:
            return torch.empty(parts * numel, dtype=torch.int32, device=device)

        # A layer's tensors come again in each step; the last two have one size, so that they share a period.
        sizes = (1000, 1 << 18, 3 << 20, 3 << 20, 3 << 20)
        layers = [[new(n, numel), new(1, numel)] for numel in sizes]
        ranks = torch.arange(n, dtype=torch.int32, device=device).view(n, 1)
        errors = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        for step in range(calls // len(sizes)):
            for place, layer in enumerate(layers):
                numel, kept, how = sizes[place], list(layer), late.random()
                if how < 0.002:
                    layer[1] = new(1, numel)
                elif how < 0.004:
                    layer[0] = new(n, numel)
                elif how < 0.006:
                    layer[:] = kept[:] = [new(n, numel), new(1, numel)]
                output, input = layer
                input.fill_(8 * step + rank)
                output.fill_(-1)
                comm.all_gather(output, input, variant="b2b")
                errors[place] += (output.view(n, numel) != 8 * step + ranks).sum()
                input.fill_(-2)  # as soon as the call has ended here
                layer[:] = kept
                del output, input, kept
            if late.random() < 0.01:
                time.sleep(0.005)
            if step % 50 == 49:
                found = errors.tolist()
                wrong += [f"step {step}: {found}"] if any(found) else []
                errors.zero_()
                torch.cuda.empty_cache()
            if step % 100 == 60:  # a stream of its own for one step, and back
                other.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(other):
                    comm.all_gather(layers[0][0], layers[0][1].fill_(rank), variant="b2b")
                torch.cuda.current_stream(device).wait_stream(other)
        torch.cuda.synchronize(device)
        said["by C"] = by_c(comm)
    return dict(said), wrong

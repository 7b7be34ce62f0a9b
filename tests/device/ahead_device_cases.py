"""What ranks execute in ``test_device_reach`` on tensors whose addresses come again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import ahead_cases
import reach_cases
import torch
import torch.distributed as dist
from ahead_cases import INPUT_ELSEWHERE
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
            before = dict(said)
            timed("last", lambda: comm.all_gather(output, input))
            took = found["last"].pop()
            new = [name for name in said if said[name] != before.get(name, 0)]
            names = {"hits": "hit", INPUT_ELSEWHERE: "miss", "waits": "waits for hosts"}
            name = names.get(new[0], new[0]) if new else "staged"
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

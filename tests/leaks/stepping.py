"""Trains a small model for many steps of random sizes under torchrun, and says what the process has at ten of them.

Arguments: ``machine`` or ``nodes``, how many steps, and a folder for what each rank says.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sidelane
from sidelane import Config, fsdp
from sidelane.collectives import call_cache, plan, repeat
from sidelane.integrations import dispatch
from sidelane.integrations.nodes import topology

WHERE, STEPS, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
LOOKS = 10
MOST = 60_000  # elements of a call


class Calls:
    """Counts calls of Python functions and methods: what a step takes the host, on any machine and beside anything."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"


def look(enabled: fsdp.Enabled, calls: int) -> dict[str, float]:
    """What the process has, and what a step of always the same sizes takes."""
    gc.collect()
    memory = enabled.memory()
    return {
        "calls": calls,
        "cpu_s": time.process_time(),  # for who reads it
        "objects": len(gc.get_objects()),
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "reserved": memory.reserved,
        "used": memory.used,
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int, sizes: tuple[int, int, int]) -> None:
    """Of training, and calls of the process group of sizes that nobody has seen before."""
    world = dist.get_world_size()
    optimizer.zero_grad()
    model(torch.ones(tokens, 24)).square().mean().backward()
    optimizer.step()
    reduced, part = torch.ones(sizes[0]), torch.ones(sizes[1], dtype=torch.bfloat16)
    gathered = torch.empty(world * sizes[1], dtype=torch.bfloat16)
    works = [dist.all_reduce(reduced, async_op=True), dist.all_gather_into_tensor(gathered, part, async_op=True)]
    scattered = torch.empty(sizes[2])
    dist.reduce_scatter_tensor(scattered, torch.ones(world * sizes[2]))
    for work in works:
        assert work is not None
        work.wait()
    assert reduced[-1] == scattered[0] == world and gathered[-1] == 1


topology.LEAST_BYTES = 1  # steps for all that there are steps for
for module, bound, most in (
    (plan, "MOST_PROGRAMS", 50),
    (call_cache, "MOST_BYTES", 1 << 18),
    (repeat, "MOST_BYTES", 1 << 18),
    (dispatch, "MOST_CACHED", 16),
):
    assert hasattr(module, bound)
    setattr(module, bound, most)  # full long before the first look: what grows is no cache
torch.set_num_threads(1)
sidelane.register()
dist.init_process_group("sidelane")
draw, own = random.Random(5), random.Random(dist.get_rank())
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 70), nn.GELU(), nn.Linear(70, 24))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
kept: deque[torch.Tensor] = deque(maxlen=20)
seen = []
with fsdp.enable(model, config=Config(timeout_s=60)) as enabled:
    for number in range(1, STEPS + 1):
        kept.append(torch.empty(own.randrange(1, 1 << 20), dtype=torch.uint8))  # other places on each rank
        step(model, optimizer, draw.randrange(1, 64), (draw.randrange(1, MOST), draw.randrange(1, MOST), 7))
        if number % (STEPS // LOOKS) == 0:
            counts = []
            for _ in range(6):  # in the first ones calls may be new, or their tensors in a new place
                with Calls() as calls:
                    step(model, optimizer, 8, (1000, 1000, 7))
                counts.append(calls.count)
            seen.append(look(enabled, min(counts)))
            (FOLDER / f"rank {dist.get_rank()}").write_text(json.dumps(seen))
dist.destroy_process_group()

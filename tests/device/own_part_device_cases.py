"""What ranks execute in ``test_device_own_parts``."""

from __future__ import annotations

import itertools
from typing import Any

import own_part_cases
import torch
import torch.distributed as dist
from device_cases import Context
from own_part_cases import Exchange
from sweeps import communicator


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(own_part_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_graphs(context: Context, replays: int) -> None:
    """Captured and replayed, beside a computation and alone, with fresh bytes each time."""
    torch.set_default_device(context.device)
    try:
        with communicator(dist.group.WORLD) as comm:
            ways = itertools.product(("b2b", "striped", "auto"), (True, False))
            for number, (variant, symmetric) in enumerate(ways):
                case = Exchange(comm, number, 70_000 + number, torch.bfloat16, symmetric=symmetric)
                options = {"copy_own_part": False, "variant": variant, "beside": "compute" if number % 2 else None}
                comm.all_to_all(case.output, case.input, **options)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    comm.all_to_all(case.output, case.input, **options)
                for replay in range(replays):
                    case.fill(100 * replay + number)
                    graph.replay()
                    assert case.is_right(), (variant, symmetric, replay)
    finally:
        torch.set_default_device(None)

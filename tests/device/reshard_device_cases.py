"""Cases that ranks execute in ``test_device_reshard``."""

from __future__ import annotations

import itertools
from typing import Any

import reshard_cases
import torch
import torch.distributed as dist
from device_cases import Context
from expected import any_bytes
from sweeps import communicator


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(reshard_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


SHAPES = ((1, 4096, 8, 128), (2, 1021, 8, 64), (3, 64, 8, 40))
"""Shapes of the whole tensor of [batch, positions, heads, size]: rows of 128 bytes to 8 KiB."""


def large(context: Context, replays: int) -> int:
    """Three tensors there and back, eager and captured and replayed, with fresh bytes each time."""
    torch.set_default_device(context.device)
    checked = 0
    try:
        with communicator(dist.group.WORLD) as comm:
            n, rank = comm.world_size, comm.rank
            for shape, symmetric in itertools.product(SHAPES, (True, False)):
                batch, positions, heads, size = shape
                own = (positions + n - 1 - rank) // n
                most = torch.Size(shape).numel()

                def make(*lengths: int, symmetric: bool = symmetric, most: int = most) -> torch.Tensor:
                    numel = torch.Size(lengths).numel()
                    whole = (
                        comm.empty(most, dtype=torch.bfloat16)
                        if symmetric
                        else torch.empty(numel, dtype=torch.bfloat16)
                    )
                    return whole[:numel].view(lengths)

                given = [make(batch, own, heads, size) for _ in range(3)]
                there = [make(batch, positions, (heads + n - 1 - rank) // n, size) for _ in range(3)]
                back = [make(batch, own, heads, size) for _ in range(3)]

                def calls(given: Any = given, there: Any = there, back: Any = back) -> None:
                    comm.all_to_all(there, given, scatter_dim=2, gather_dim=1)
                    comm.all_to_all(back, there, scatter_dim=1, gather_dim=2)

                calls()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    calls()
                for turn in range(replays):
                    wholes = [any_bytes(10 * turn + k, 0, most, torch.bfloat16).view(shape) for k in range(3)]
                    for tensor, whole in zip(given, wholes, strict=True):
                        tensor.copy_(whole.tensor_split(n, 1)[rank])
                    for tensor in (*there, *back):
                        tensor.view(torch.uint8).fill_(turn)
                    graph.replay() if turn % 2 else calls()
                    for k, whole in enumerate(wholes):
                        want = whole.tensor_split(n, 2)[rank]
                        bits = torch.int16
                        assert torch.equal(there[k].view(bits), want.contiguous().view(bits)), (shape, symmetric, turn)
                        assert torch.equal(back[k].view(bits), given[k].view(bits)), (shape, symmetric, turn)
                        checked += 1
    finally:
        torch.set_default_device(None)
    return checked

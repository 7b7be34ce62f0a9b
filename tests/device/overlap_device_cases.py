"""What ranks execute in ``test_device_overlap``."""

from __future__ import annotations

from typing import Any

import overlap_cases
import torch
import torch.distributed as dist
from device_cases import Context

from sidelane import Communicator, Config, overlap


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(overlap_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_graphs(context: Context, replays: int) -> None:
    """Every strategy, captured and replayed."""
    device, n, rank = context.device, context.world_size, context.rank
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        whole, shard = comm.empty(n, 100_000), torch.empty(100_000, device=device)
        a = torch.empty(512, 512, device=device)
        for way in overlap_cases.WAYS:

            def step() -> torch.Tensor:
                product, _ = overlap(lambda: a @ a, lambda comm: comm.all_gather(whole, shard), comm, strategy=way)  # noqa: B023
                return product.sum() + whole.sum()

            a.fill_(0), shard.fill_(0)
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = step()
            for replay in range(replays):
                a.fill_(1.0)
                shard.fill_(replay + rank)
                whole.fill_(-1)
                graph.replay()
                assert whole[:, -1].tolist() == [replay + peer for peer in range(n)], (way, replay)
                assert total.item() == 512**3 + 100_000 * (n * replay + sum(range(n))), (way, replay)

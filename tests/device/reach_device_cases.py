"""What ranks execute in ``test_device_reach``."""

from __future__ import annotations

from typing import Any

import reach_cases
import torch
import torch.distributed as dist
from device_cases import Context

from sidelane import Communicator


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(reach_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_graphs(context: Context, replays: int) -> None:
    """Graphs on ordinary tensors, by copy engines and in kernels, replayed while other memory comes and goes."""
    device, n, rank, size = context.device, context.world_size, context.rank, 3 << 20
    with Communicator(device=device, config=reach_cases.MAPPING) as comm:
        output, input = torch.empty(n, size, device=device), torch.empty(size, device=device)
        total = torch.empty(5000, device=device)
        summed = torch.empty(5000, device=device)
        for part in (output, input, total, summed):
            assert str(comm.reach(part)) == "mapped"

        def step() -> None:
            comm.all_gather(output, input)
            comm.all_reduce(total, output=summed, variant="one_shot")
            comm.all_reduce(summed, variant="two_shot")

        input.fill_(0), total.fill_(0)
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for replay in range(replays):
            input.fill_(replay + rank)
            total.fill_(replay + rank)
            output.fill_(-1)
            graph.replay()
            assert output[:, -1].tolist() == [replay + peer for peer in range(n)], replay
            assert output[:, 0].tolist() == [replay + peer for peer in range(n)], replay
            once = n * replay + sum(range(n))
            assert summed[::499].unique().tolist() == [n * once], replay
            other = torch.full((n, size + 1000 * replay), -1.0, device=device)
            mine = other[rank].clone().fill_(replay)
            comm.all_gather(other, mine)
            assert (other == replay).all()
            del other, mine
            if replay % 3 == rank:
                torch.cuda.empty_cache()
        staging = comm.lane.preparer._staging.nbytes
        assert staging == 0, staging

"""What ranks execute in ``test_device_pool``."""

from __future__ import annotations

import random
from typing import Any

import pool_cases
import torch
import torch.distributed as dist
from device_context import Context

import sidelane
from sidelane import Communicator


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(pool_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def any_operation(context: Context) -> list[str]:
    """What the ranks of a layer compute, forward and backward, is what collectives take: no byte is staged."""
    device, n, rank = context.device, context.world_size, context.rank
    said = []
    with Communicator(device=device, config=pool_cases.POOLS) as comm:
        pool = sidelane.pool(comm, 256 << 20)
        torch.manual_seed(5)
        layer = torch.nn.Linear(256, 512, device=device)
        with pool:
            tokens = torch.randn(1024, 256, device=device)
            hidden = torch.nn.functional.gelu(layer(tokens)).detach()
            gathered = torch.empty(n, *hidden.shape, device=device)
            exchanged = torch.empty_like(hidden)
            big = torch.full((12 << 20,), float(rank), device=device)
        for _ in range(3):
            comm.all_gather(gathered, hidden)
            comm.all_to_all(exchanged, hidden)
            comm.broadcast(big, root=1)
        assert torch.equal(gathered[rank], hidden)
        assert torch.equal(exchanged.chunk(n)[rank], hidden.chunk(n)[rank])
        assert (big == 1).all()
        assert pool_cases.staging(comm) == 0
        said += [comm.reach(each).how for each in (gathered, exchanged, big)]
        said.append(comm.reach(torch.empty(4, device=device)).how)
    return said


def in_graphs(context: Context, replays: int) -> None:
    """Graphs on tensors of a pool, and with a pool's memory for what is made inside them; other calls in between."""
    device, n, rank, size = context.device, context.world_size, context.rank, 1 << 20
    with Communicator(device=device, config=pool_cases.POOLS) as comm:
        pool = sidelane.pool(comm, 512 << 20)
        with pool:
            output, input = torch.empty(n, size, device=device), torch.empty(size, device=device)
            total = torch.empty(5000, device=device)

        def step() -> torch.Tensor:
            comm.all_gather(output, input)
            comm.all_reduce(total)
            return output.sum(0)

        for captured_in_pool in (False, True):
            input.fill_(1), total.fill_(1)
            comm.all_reduce(step())  # each call once, for its staging, before it is captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool.id if captured_in_pool else None):
                summed = step()
                comm.all_reduce(summed)
            inside = comm.heap.pool_at(summed.data_ptr()) is not None
            assert inside == captured_in_pool
            for replay in range(replays):
                input.fill_(replay + rank), total.fill_(replay + rank)
                graph.replay()
                once = n * replay + sum(range(n))
                assert output[:, -1].tolist() == [replay + peer for peer in range(n)], replay
                assert total[::499].unique().tolist() == [once], replay
                assert summed[:: size // 7].unique().tolist() == [n * once], replay
                with pool:
                    other = torch.full((n, 1000 * (replay % 5 + 1)), -1.0, device=device)
                    mine = torch.full_like(other[0], replay)
                comm.all_gather(other, mine)
                assert (other == replay).all()
            del graph, summed


def streams(context: Context, seed: int, steps: int) -> tuple[int, int]:
    """Tensors that come and go on two streams, with what torch keeps for later given back in between: how many calls
    found a tensor symmetric and staged."""
    device, n, rank = context.device, context.world_size, context.rank
    draw, own = random.Random(seed), random.Random(100 * seed + rank)
    found = {"symmetric": 0, "staged": 0}
    with Communicator(device=device, config=pool_cases.POOLS) as comm:
        pool = sidelane.pool(comm, 512 << 20)
        both = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        kept: list[torch.Tensor] = []
        for step in range(steps):
            size = draw.choice((1, 5000, 70_000, 3 << 20))
            stream = draw.choice(both)
            stream.wait_stream(both[0]), stream.wait_stream(both[1])
            with torch.cuda.stream(stream), pool:
                output = torch.empty(n, size, device=device)
                input = torch.full((size,), float(step + rank), device=device)
                comm.all_gather(output, input)
                expected = torch.arange(step, step + n, device=device).float()
                assert torch.equal(output[:, -1], expected) and torch.equal(output[:, 0], expected), step
            found[comm.reach(output).how] += 1
            if own.random() < 0.1:
                kept.append(input)
            if len(kept) > 3:
                kept.clear()
            if draw.random() < 0.05:
                torch.cuda.empty_cache()
            del output, input
    return found["symmetric"], found["staged"]

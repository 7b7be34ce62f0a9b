"""What ranks execute in ``test_device_reach``: each call offers its memory, as calls of CPU ranks and captures do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import reach_cases
import torch
import torch.distributed as dist
from device_cases import Context

from sidelane import Communicator, Config
from sidelane.choice.candidate import SM
from sidelane.collectives.backend_cuda import CudaBackend


def offered_each_time(case: Callable[..., Any]) -> Callable[..., Any]:
    """A case in which hosts wait for each other in each call, so that what is offered is mapped at once."""

    @functools.wraps(case)
    def run(*args: Any) -> Any:
        with mock.patch.object(CudaBackend, "hosts_meet", True):
            return case(*args)

    return run


@offered_each_time
def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(reach_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


@offered_each_time
def pieces_come_and_go(context: Context, rounds: int) -> list[tuple[int, int, int]]:
    """Expandable segments of many pieces, given back and made again at the same addresses by some of the ranks.

    For each round the bytes that peers have of this rank in one span, whether its name is new, and what this process
    has mapped of others.
    """
    device, n, rank = context.device, context.world_size, context.rank
    found = []
    with Communicator(device=device, config=reach_cases.MAPPING) as comm:
        memory = comm._backend.ordinary
        assert memory is not None
        last = ""
        for step in range(rounds):
            size = (3 << 20) + 8 * step
            output, input = torch.empty(n, size, device=device), torch.empty(size, device=device)
            for repeat in range(2):
                input.fill_(step + repeat + rank)
                output.fill_(-1)
                comm.all_gather(output, input)
                expected = [float(step + repeat + peer) for peer in range(n)]
                assert output[:, 0].tolist() == expected and output[:, -1].tolist() == expected, (step, repeat)
            assert str(comm.reach(output)) == "mapped" and str(comm.reach(input)) == "mapped"
            span, again = memory.allocation_of(output), memory.allocation_of(output)
            assert not isinstance(span, str) and not isinstance(again, str)
            assert span.name == again.name and not memory.is_gone(span)
            found.append((span.nbytes, int(span.name != last), reach_cases.mapped_here()))
            last = span.name
            del output, input, again
            if step % n == rank or step % 3 == 0:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                assert memory.is_gone(span), "its pieces have been given back"
            del span
    return found


@offered_each_time
def same_again(context: Context, rounds: int) -> int:
    """Equal calls on memory that was given back in between, and comes again at the same addresses or elsewhere; how
    often an address was another allocation than before."""
    device, n, rank = context.device, context.world_size, context.rank
    seen, again = set(), 0
    for config in (reach_cases.MAPPING, Config(timeout_s=30, map_memory=False)):
        with Communicator(device=device, config=config) as comm:
            for step in range(rounds):
                output = torch.full((n, 12 << 20), -1.0, device=device)
                input = torch.empty(12 << 20, device=device)
                again += output.data_ptr() in seen
                seen.add(output.data_ptr())
                for repeat in range(2):
                    input.fill_(step + repeat + rank)
                    comm.all_gather(output, input)
                    for peer in range(n):
                        assert (output[peer] == step + repeat + peer).all(), (step, repeat, peer)
                del output, input
                if step % n == rank or step % 3 == 0:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
    return again


@offered_each_time
def all_is_given_back(context: Context) -> int:
    """Bytes of the device that every round leaves missing, in which a communicator uses 100 MB of each rank, and
    all is freed, but for what it has of its own by then: staging of as much as the largest input. Other programs on the
    GPU take and give back memory meanwhile; what is leaked is missing behind every round.
    """
    device, n = context.device, context.world_size

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        return torch.cuda.mem_get_info(device)[0]

    def hear() -> None:
        """Calls that say what has gone; what is seen to have ended meanwhile is let go of by the call behind it."""
        for _ in range(2):
            for _ in range(64):
                comm.all_gather(warm, warm[context.rank : context.rank + 1])
            torch.cuda.synchronize()
            time.sleep(0.1)

    with Communicator(device=device, config=reach_cases.MAPPING) as comm:
        warm = torch.zeros(n, device=device)
        comm.all_gather(warm, warm[context.rank : context.rank + 1])
        missing = []
        for _ in range(6):
            before, own = free(), comm.memory().own
            output = torch.empty(n, (100 << 20) // 4 // n, device=device)
            comm.all_gather(output, output[context.rank])
            del output
            free()
            hear()
            hear()
            missing.append(before - free() - (comm.memory().own - own))
        return min(missing)


@offered_each_time
def reasons(context: Context) -> tuple[str, bool]:
    """Why a tensor is staged; and whether the call was right."""
    with Communicator(device=context.device, config=reach_cases.MAPPING) as comm:
        output = torch.full((context.world_size, 1 << 20), -1.0, device=context.device)
        output[context.rank] = context.rank
        comm.all_gather(output, output[context.rank])
        return str(comm.reach(output)), output[:, -1].tolist() == list(range(context.world_size))


@offered_each_time
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
            kernels = SM in comm.abilities.implementations
            comm.all_reduce(total, output=summed, variant="one_shot" if kernels else "auto")
            comm.all_reduce(summed, variant="two_shot" if kernels else "auto")

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

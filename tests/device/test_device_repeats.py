"""Repeated calls on GPUs, made by compiled code and launched as graphs, with the bytes of every one compared."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_context import Context
from on_ranks import on_ranks

from sidelane import Communicator, Config
from sidelane.choice.candidate import SM

MODULUS = 97
"""Of the values in inputs: all dtypes hold their sums over eight ranks."""


class Repeated:
    """A call on tensors of its own, with inputs that depend on how often it was made; nothing waits for the host."""

    def __init__(self, comm: Communicator, kind: str, variant: str, numel: int, dtype: torch.dtype, place: str) -> None:
        n = comm.world_size
        sizes = {"all_gather": (n, 1), "all_to_all": (n, n), "reduce_scatter": (1, n), "all_reduce": (n, n)}
        self.comm, self.kind, self.variant, self.numel = comm, kind, variant, numel
        make = (
            comm.empty
            if place == "symmetric"
            else lambda size, dtype: torch.empty(size, dtype=dtype, device=comm.device)
        )
        outputs, inputs = sizes[kind]
        self.output, self.input = make(outputs * numel, dtype=dtype), make(inputs * numel, dtype=dtype)
        self.index = torch.arange(n * numel, device=comm.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        self.count = 0

    def _values(self, rank: int, part: slice) -> torch.Tensor:
        return (self.index[part] * 3 + rank * 13 + self.count * 7) % MODULUS

    def expected(self) -> torch.Tensor:
        n, numel, rank = self.comm.world_size, self.numel, self.comm.rank
        own = slice(rank * numel, (rank + 1) * numel)
        match self.kind:
            case "all_gather":
                return torch.cat([self._values(peer, slice(0, numel)) for peer in range(n)])
            case "all_to_all":
                return torch.cat([self._values(peer, own) for peer in range(n)])
            case "reduce_scatter":
                return torch.stack([self._values(peer, own) for peer in range(n)]).sum(0)
            case _:
                return torch.stack([self._values(peer, slice(None)) for peer in range(n)]).sum(0)

    def call(self) -> None:
        self.count += 1
        self.input.copy_(self._values(self.comm.rank, slice(0, self.input.numel())))
        self.output.fill_(-1)
        method: Callable[..., Any] = getattr(self.comm, self.kind)
        if self.kind == "all_reduce":
            method(self.input, output=self.output, variant=self.variant)
        else:
            method(self.output, self.input, variant=self.variant)
        self.wrong += (self.output.to(torch.float64) != self.expected().to(torch.float64)).sum()

    def check(self) -> None:
        wrong = int(self.wrong.item())
        assert not wrong, f"{self.kind} {self.variant} of {self.numel}: {wrong} wrong elements in {self.count} calls"


CALLS = (
    ("all_gather", "b2b", 1000, torch.bfloat16),
    ("all_gather", "striped", 1 << 20, torch.int32),
    ("all_gather", "pcpy", 321, torch.int64),
    ("all_gather", "one_shot", 1, torch.float32),
    ("all_gather", "one_shot", 1_000_003, torch.bfloat16),
    ("all_to_all", "pcpy", 4096, torch.float32),
    ("all_to_all", "one_shot", 333, torch.int32),
    ("all_to_all", "auto", 1 << 18, torch.float16),
    ("reduce_scatter", "b2b", 5000, torch.float32),
    ("reduce_scatter", "one_shot", 100_001, torch.int32),
    ("all_reduce", "b2b", 5000, torch.float32),
    ("all_reduce", "one_shot", 77, torch.int64),
    ("all_reduce", "two_shot_narrow", 1 << 19, torch.float32),
    ("all_reduce", "two_shot_push", 300_001, torch.bfloat16),
)


@on_ranks(gpu=True, timeout_s=150)
@pytest.mark.parametrize("place", ["ordinary", "symmetric"])
def test_repeated_calls_of_every_kind(context: Context, place: str) -> None:
    """Calls of all kinds in turn, from streams that change, around captures, allocations and asynchronous calls."""
    device = context.device
    made, rounds = 0, 48
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        assert comm.path.repeats is not None, "this machine compiles no C"
        kernels = SM in comm.abilities.implementations
        calls = [
            Repeated(comm, kind, variant, numel, dtype, place)
            for kind, variant, numel, dtype in CALLS
            if kernels or "shot" not in variant
        ]
        graphs = []
        streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream(device)]
        kept: list[Any] = []
        for number in range(rounds):
            stream = streams[number // 8 % len(streams)]
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for call in calls:
                    call.call()
                    made += 1
                    submitted = comm.last_submitted()
                    assert submitted is not None
                    graphs.append(submitted.implementation == "sm" and submitted.counts.graph_launches == 1)
            torch.cuda.synchronize()
            match number % 11:
                case 4:  # more staging, and another generation
                    more = torch.ones((number + 1) << 18, device=device)
                    comm.all_gather(torch.empty(comm.world_size * len(more), device=device), more, variant="b2b")
                case 7:
                    kept.append(comm.empty(100))
                case 9:
                    graph, small = torch.cuda.CUDAGraph(), torch.full((10,), comm.rank, device=device)
                    gathered = torch.empty(10 * comm.world_size, dtype=torch.int64, device=device)
                    with torch.cuda.graph(graph, stream=streams[0]):
                        comm.all_gather(gathered, small, variant="b2b")
                    graph.replay()
                    torch.cuda.synchronize()
                    assert gathered.view(-1, 10)[:, 0].tolist() == list(range(comm.world_size))
                case 10:
                    work = comm.all_reduce(torch.ones(1000, device=device), async_op=True)
                    assert work is not None
                    work.wait()
        for call in calls:
            call.check()
        with contextlib.suppress(StopIteration):
            first = next(call for call in calls if call.variant == "b2b")
            assert torch.equal(first.output.to(torch.int64), first.expected())
        native = comm.repeated_calls()
    # Not the first two of each after a change, nor the first from another stream.
    assert made // 4 < native < made
    assert made // 20 < sum(graphs) < native, "kernels, where the stream is not an urgent one"


@on_ranks(gpu=True, timeout_s=300)
def test_sizes_that_never_come_again_take_no_more_memory(context: Context) -> None:
    """Calls of every kind whose sizes never come again, as tensors by themselves and in lists: few are kept, and this
    process does not grow, on the host and on the device, in the second half of them.

    Other tests may have the device at the same time, so that torch and the communicator are asked.
    """
    device, calls = context.device, 3000
    looks: list[tuple[int, int]] = []
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        for number in range(1, calls + 1):
            own, gathered = (torch.empty(size * number, device=device) for size in (1, n))
            if number % 3:
                comm.all_gather(gathered, own.fill_(rank + number))
                assert number % 50 or gathered.view(n, -1)[:, 0].tolist() == [number + peer for peer in range(n)]
            else:
                comm.all_reduce([own.fill_(1), gathered.fill_(2)])
                assert number % 51 or (own[-1].item(), gathered[-1].item()) == (n, 2 * n)
            if number % (calls // 2) == 0:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                gc.collect()
                dist.barrier(context.group)
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                use = comm.memory()
                looks.append((resident, torch.cuda.memory_reserved() + use.reserved + use.own))
                dist.barrier(context.group)
        kept = sum(entry.prepared is not None for entry in comm.preparer.cache)
    (host, taken), (host_then, taken_then) = looks
    assert kept <= 64 + 8 and host_then - host < 48 << 20 and taken_then - taken < 64 << 20

"""Compare sums of few bytes after copies, forks and other kernels, eagerly and in graphs, and print how it ends.

    torchrun --nproc-per-node 2 results/scripts/launched_ahead.py     (CPU processes where there are no GPUs)

It is for kernels that are launched ahead of the end of the kernel before them (results/notes/e2e.md, "Launched ahead").
A sum that reads its input before that is written, or a slot that is still read, has other numbers. Each chain writes
new input for each sum. At the end a graph lives that holds calls of Sidelane, and one that holds NCCL's; each step of
the end is printed, and after 20 s in one of them all threads are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from sidelane import Communicator

LAYERS, ROUNDS, ENDING_S = 40, 5, 20
BYTES = 8 << 10, 64 << 10, 512 << 10
Write = Callable[[torch.Tensor, int], None]


class Chain:
    """Sums of ``nbytes`` bytes, each after its input was written anew: by a product, a copy, a fork or another call."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.comm, count = comm, nbytes // 4
        self.x, self.y = (torch.empty(count, device=comm.device) for _ in range(2))
        self.found = torch.zeros(LAYERS, count, device=comm.device)
        self._rows = torch.ones(count // 64, 64, device=comm.device)
        self._weight = torch.full((64, 64), 1 / 64, device=comm.device)
        self._values = torch.arange(LAYERS, device=comm.device).float() * (comm.rank + 1)
        self._source = self._values[:, None].repeat(1, count)
        self._large = torch.zeros(1 << 21, device=comm.device)
        self._side = torch.cuda.Stream() if comm.device.type == "cuda" else None

    def writers(self) -> dict[str, Write]:
        """Return what writes the input of a sum, by name."""
        writers = (self._kernel, self._product, self._copy, self._fork, self._call)
        return {write.__name__.strip("_"): write for write in writers}

    def _kernel(self, x: torch.Tensor, layer: int) -> None:
        torch.mul(self._source[layer], 1, out=x)

    def _product(self, x: torch.Tensor, layer: int) -> None:
        torch.mm(self._rows * self._values[layer], self._weight, out=x.view(-1, 64))

    def _copy(self, x: torch.Tensor, layer: int) -> None:
        x.zero_()
        x.copy_(self._source[layer])

    def _fork(self, x: torch.Tensor, layer: int) -> None:
        if self._side is None:
            self._copy(x, layer)
            return
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            x.copy_(self._source[layer])
        here.wait_stream(self._side)

    def _call(self, x: torch.Tensor, layer: int) -> None:
        self.comm.all_reduce(self._large)
        self._kernel(x, layer)

    def run(self, write: Write) -> None:
        """Make the sums of all layers on the current stream."""
        for layer in range(LAYERS):
            write(self.x, layer)
            self.comm.all_reduce(self.x, output=self.y)
            self.found[layer].copy_(self.y)

    def check(self, name: str) -> None:
        """Compare all sums, and forget them."""
        n = self.comm.world_size
        right = torch.arange(LAYERS, device=self.comm.device).float()[:, None] * (n * (n + 1) // 2)
        wrong = (self.found != right).any(1).nonzero().flatten().tolist()
        print(f"rank {self.comm.rank} {name}: {f'wrong in layers {wrong}' if wrong else 'equal'}", flush=True)
        self.found.fill_(-1)
        if self._side is not None:
            torch.cuda.synchronize()


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of some work, which is done once before."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        with torch.cuda.graph(graph, stream=stream):
            work()
    return graph


def step(rank: int, name: str, do: Callable[[], object]) -> None:
    """Do a part of the end, with a line before and after, and all threads' lines if it takes too long."""
    print(f"rank {rank} {name} ...", flush=True)
    faulthandler.dump_traceback_later(ENDING_S, exit=True)
    do()
    faulthandler.cancel_dump_traceback_later()
    print(f"rank {rank} {name} ended", flush=True)


def main() -> None:
    """Run all chains of all sizes, and end."""
    device = torch.device("cpu")
    if on_gpu := torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, graphs, comms = dist.get_rank(), [], []
    for nbytes in BYTES:
        comms.append(comm := Communicator(device=device))
        chain = Chain(comm, nbytes)
        for name, write in chain.writers().items():
            streams = {"default stream": contextlib.nullcontext()}
            if on_gpu:
                streams["own stream"] = torch.cuda.stream(torch.cuda.Stream())
            for where, stream in streams.items():
                with stream:
                    for _ in range(ROUNDS):
                        chain.run(write)
                    chain.check(f"{nbytes} bytes after a {name}, {where}")
            if on_gpu:
                graphs.append(captured(lambda chain=chain, write=write: chain.run(write)))
                for _ in range(ROUNDS):
                    graphs[-1].replay()
                chain.check(f"{nbytes} bytes after a {name}, graph")
    if on_gpu:
        one, all_of = torch.ones(64, device=device), torch.empty(64 * dist.get_world_size(), device=device)
        graphs.append(captured(lambda: dist.all_gather_into_tensor(all_of, one)))
        graphs[-1].replay()
        step(rank, "synchronize", torch.cuda.synchronize)
    for number, comm in enumerate(comms):
        step(rank, f"close {number}", comm.close)
    step(rank, "graphs", graphs.clear)  # NCCL waits for the end of graphs that hold its calls
    step(rank, "group", dist.destroy_process_group)


if __name__ == "__main__":
    main()

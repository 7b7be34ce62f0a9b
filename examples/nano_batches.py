"""Train an MLP that is spread over the ranks (tensor parallel) with two half batches that take turns: while the sums of
one half travel on copy engines, the other half is computed, forward and backward.

The results and gradients are those of the whole batch. Each rank has some of the hidden features of every layer, so
that the results of a layer are summed over the ranks.

torchrun --nproc-per-node 2 examples/nano_batches.py        (--tokens, --dim, --hidden, --layers, --steps; CPU: tiny)
"""

import argparse
import os
import time
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane import Communicator, begin_collective, nano_batches

gpu = torch.cuda.is_available()


class Mlp(torch.nn.Module):
    """This rank's hidden features of every layer."""

    def __init__(self, sizes: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        rank, ranks, each = dist.get_rank(), dist.get_world_size(), sizes.hidden // dist.get_world_size()
        dtype = torch.bfloat16 if gpu else torch.float32
        draw = torch.Generator(device).manual_seed(0)  # the whole layer on every rank, of which each keeps its part

        def weights(features: int) -> torch.Tensor:
            whole = torch.randn(ranks, each, features, generator=draw, device=device) * features**-0.5
            return torch.nn.Parameter(whole[rank].to(dtype))

        self.up = torch.nn.ParameterList(weights(sizes.dim) for _ in range(sizes.layers))
        self.down = torch.nn.ParameterList(weights(sizes.dim) for _ in range(sizes.layers))

    def in_turns(self, x: torch.Tensor, sent: torch.Tensor, summed: torch.Tensor, comm: Communicator) -> Generator:
        def all_reduce(part: torch.Tensor):
            return summed, comm.all_reduce(sent.copy_(part), output=summed, async_op=True, beside="compute")

        for up, down in zip(self.up, self.down, strict=True):
            part = functional.gelu(x @ up.T) @ down
            x = x + (yield begin_collective(all_reduce, part))  # the other half is computed here
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, on_gpu, on_cpu in (
        *(("tokens", 8192, 32), ("dim", 4096, 16), ("hidden", 16384, 24)),
        *(("layers", 4, 3), ("steps", 10, 2)),
    ):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    sizes = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with Communicator(device=device) as comm:
        mlp = Mlp(sizes, device)
        x = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator().manual_seed(1)).to(device, mlp.up[0].dtype)

        buffers = comm.empty(2, *x.shape, dtype=x.dtype)  # symmetric memory: what a rank adds, and the sums

        def step(parts: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
            mlp.zero_grad()
            cut = zip(x.chunk(parts), *(buffer.chunk(parts) for buffer in buffers), strict=True)
            results = nano_batches(mlp.in_turns(*tensors, comm) for tensors in cut)
            # Each rank counts its share of the loss, since the gradients are summed over the ranks, too.
            loss = sum(result.float().square().sum() for result in results) / (ranks * x.numel())
            loss.backward()
            return torch.cat([result.detach() for result in results]), [each.grad.clone() for each in mlp.parameters()]

        whole, halves = step(1), step(2)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if gpu else {}
        torch.testing.assert_close(halves, whole, **tolerance)
        times = {parts: timed(lambda parts=parts: step(parts), sizes.steps) for parts in (1, 2)}
        comm.synchronize()
    print(f"rank {rank} of {ranks} on {device}: two half batches give the results and gradients of the whole batch")
    if rank == 0:
        print(f"a step takes {times[1]:.2f} ms with the whole batch, {times[2]:.2f} ms with halves in turn")
    dist.destroy_process_group()


def timed(step: Callable[[], object], steps: int) -> float:
    """Milliseconds of a step."""
    step()
    torch.cuda.synchronize() if gpu else None
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize() if gpu else None
    return 1e3 * (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()

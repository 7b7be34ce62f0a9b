"""Train a small Llama with DDP and AdamW, and with AdamW sharded over the ranks (ZeRO 1), which hides its collectives.

A reduce-scatter of each block's gradients overlaps the backward pass of the block before it. Each rank updates its part
of the weights, and keeps AdamW's state for that part alone. Copy engines gather the parts during the next forward pass,
which waits for a block's weights when it gets there. DDP cannot do this: its all-reduces end before the update.

torchrun --nproc-per-node 2 examples/sharded_optimizer.py    (--dim, --layers, --heads, --length, --batch, --steps,
                                                              --tokenizer, --vocabulary)
"""

import argparse
import copy
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts.llama import Llama, begin, options, rate_of, train
from parts.rates import ON_CPUS
from parts.text import read
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sidelane import Communicator

CLIP = 1.0
"""Norm to which the gradients of all weights together are clipped."""

CHECKED, CHECKED_LENGTH = 12, 512
"""Steps whose losses are compared, and their tokens a sequence. They are in float32: in bfloat16, losses that rise and
fall fast depend on the order in which GPUs add up gradients of attention, which is not fixed."""


class Unit:
    """Weights of some modules in one symmetric tensor, their gradients in another, and this rank's part of both."""

    def __init__(self, modules: list[nn.Module], comm: Communicator) -> None:
        weights = [weight for module in modules for weight in module.parameters()]
        lengths, ranks, dtype = [weight.numel() for weight in weights], comm.world_size, weights[0].dtype
        lengths.append(-sum(lengths) % (64 * ranks))  # parts of one size, each a multiple of 64 elements
        self.comm, self.count, self.missing = comm, len(weights), len(weights)
        self.weights = comm.empty(sum(lengths), dtype=dtype).zero_()
        self.gradients = comm.empty(sum(lengths), dtype=dtype).zero_()
        for weight, held, gradient in zip(
            weights, self.weights.split(lengths), self.gradients.split(lengths), strict=False
        ):
            weight.data = held.copy_(weight.detach().flatten()).view_as(weight)
            weight.grad = gradient.view_as(weight)
            weight.register_post_accumulate_grad_hook(self.scatter_if_whole)
        self.part = nn.Parameter(self.weights.chunk(ranks)[comm.rank])
        self.part.grad = comm.empty(self.part.numel(), dtype=dtype)
        self.scattered: Any = None
        self.gathered: Any = None
        for module in modules:
            module.register_forward_pre_hook(self.wait)

    def scatter_if_whole(self, _: torch.Tensor) -> None:
        self.missing -= 1
        if not self.missing:
            self.missing = self.count
            given = self.part.grad, self.gradients
            self.scattered = self.comm.reduce_scatter(*given, op="avg", async_op=True, beside="compute")

    def gather(self) -> None:
        self.gradients.zero_()
        self.gathered = self.comm.all_gather(self.weights, self.part.data, async_op=True, beside="compute")

    def wait(self, *_: object) -> None:
        if self.gathered is not None:
            self.gathered.wait()
            self.gathered = None


class ShardedAdamW:
    """AdamW of this rank's parts of the units, which are in the order of the forward pass."""

    def __init__(self, comm: Communicator, units: list[Unit], lr: float) -> None:
        self.comm, self.units = comm, units
        self.parts = [unit.part for unit in units]
        self.adamw = torch.optim.AdamW(self.parts, lr=lr)

    def step(self) -> None:
        for unit in self.units:
            unit.scattered.wait()
        gradients = [part.grad for part in self.parts]
        square = square_of(gradients)
        self.comm.all_reduce(square)  # of all parts
        clip(gradients, square)
        self.adamw.step()
        for unit in self.units:
            unit.gather()

    def zero_grad(self) -> None:
        """Do nothing: `gather` has zeroed the gradients. `part.grad` is overwritten by the next reduce-scatter."""

    def save(self, model: nn.Module, path: Path) -> None:
        """Write two files: rank 0 the weights, each rank AdamW's state of its parts."""
        for unit in self.units:
            unit.wait()
        if dist.get_rank() == 0:
            torch.save({name: weight.clone() for name, weight in model.state_dict().items()}, path / "weights.pt")
        torch.save(self.adamw.state_dict(), path / f"adamw-{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, model: nn.Module, path: Path) -> None:
        """Read what as many ranks have saved."""
        for unit in self.units:
            unit.wait()
        # By the host: CUDA does not copy from rank 0's GPU, which the file names, to symmetric memory of another GPU.
        model.load_state_dict(torch.load(path / "weights.pt", map_location="cpu"))
        self.adamw.load_state_dict(torch.load(path / f"adamw-{dist.get_rank()}.pt", map_location="cpu"))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips gradients first, as the sharded one does."""

    def step(self, closure: Any = None) -> Any:
        gradients = [weight.grad for weight in self.param_groups[0]["params"]]
        clip(gradients, square_of(gradients))
        return super().step(closure)


def square_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Square of the norm of all, in float32: norms in bfloat16 differ by 0.4% between a whole and its parts."""
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()


def clip(gradients: list[torch.Tensor], square: torch.Tensor) -> None:
    torch._foreach_mul_(gradients, (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0))


def main() -> None:
    gpu = torch.cuda.is_available()
    sizes, device = options(__doc__, gpu), begin()
    rank, world_size, comm = dist.get_rank(), dist.get_world_size(), Communicator()
    checked = copy.copy(sizes)
    checked.steps, checked.length = CHECKED, min(sizes.length, CHECKED_LENGTH)
    text, vocabulary, words = read(sizes.tokenizer, sizes.vocabulary)
    lr, wait = rate_of(sizes), torch.cuda.synchronize if gpu else lambda: None

    def make(dtype: torch.dtype) -> Llama:
        torch.manual_seed(0)
        with device:
            return Llama(vocabulary, sizes.dim, sizes.layers, sizes.heads).to(dtype)

    def shard(model: Llama) -> ShardedAdamW:
        groups: list[list[nn.Module]] = [[model.embed], *([block] for block in model.blocks), [model.norm, model.out]]
        return ShardedAdamW(comm, [Unit(group, comm) for group in groups], lr)

    def losses_of(steps: argparse.Namespace, model: nn.Module, optimizer: Any) -> tuple[float, list[float]]:
        return train(model, text, steps, device, wait, optimizer)

    def with_ddp(dtype: torch.dtype, steps: argparse.Namespace) -> tuple[float, list[float]]:
        replicated: Any = DistributedDataParallel(make(dtype), gradient_as_bucket_view=True)
        return losses_of(steps, replicated, ClippedAdamW(replicated.parameters(), lr=lr))

    expected = with_ddp(torch.float32, checked)[1]
    model = make(torch.float32)
    optimizer = shard(model)
    course = losses_of(checked, model, optimizer)[1]
    rtol = 1e-3 if gpu else 1e-4
    torch.testing.assert_close(course, expected, rtol=rtol, atol=0)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        optimizer.save(model, Path(shared[0]))
        again = make(torch.float32)
        loaded = shard(again)
        loaded.load(again, Path(shared[0]))
        dist.barrier()
    checked.steps = 3
    resumed = losses_of(checked, again, loaded)[1]
    torch.testing.assert_close(resumed, losses_of(checked, model, optimizer)[1], rtol=rtol, atol=0)
    del model, optimizer, again, loaded
    gc.collect()  # hooks of weights refer to their units

    dtype = torch.bfloat16 if gpu else torch.float32
    before = with_ddp(dtype, sizes)[0]
    model = make(dtype)
    after, losses = losses_of(sizes, model, shard(model))
    assert min(losses) < losses[0], losses
    if rank == 0:
        rates = f"{before:.0f} with DDP and AdamW, {after:.0f} with the sharded AdamW"
        print(f"{words}\ntokens a second: {rates}", flush=True)
    print(
        f"rank {rank} of {world_size} on {device}: loss {losses[0]:.3f} to {losses[-1]:.3f}, in float32 the same as "
        "with DDP; it goes on the same from a saved state"
    )
    if rank == 0 and not gpu:
        print(ON_CPUS)
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a recommender in the style of DLRM, whose tables lie on different ranks: by bags and an all-to-all, and fused.

torchrun --nproc-per-node 2 examples/dlrm.py        (--tables, --rows, --dim, --batch; on CPUs by Triton's interpreter)
"""

import argparse
import os
import time

import torch

gpu = torch.cuda.is_available()
if not gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sidelane import Communicator, ops

DENSE, POOLING = 4, 3  # numbers of a sample, and rows in each of its bags


class Unfused(nn.Module):
    """An ``embedding_bag`` a table, an all-to-all, and a copy into the layout."""

    def __init__(self, tables: list[torch.Tensor]) -> None:
        super().__init__()
        self.tables = nn.ParameterList(tables)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        parts = zip(self.tables, indices.chunk(len(self.tables)), strict=True)
        pooled = torch.stack(
            [functional.embedding_bag(part.view(-1, POOLING), table, mode="sum") for table, part in parts]
        )
        ranks, dim = dist.get_world_size(), pooled.shape[-1]
        sent = pooled.view(len(self.tables), ranks, -1, dim).transpose(0, 1).contiguous()
        came = all_to_all_single_autograd(sent, [1] * ranks, [1] * ranks, dist.group.WORLD)
        return came.view(ranks * len(self.tables), -1, dim).transpose(0, 1).flatten(1)


class Dlrm(nn.Module):
    """What all ranks have: layers for the numbers and for products of all pairs of features."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(DENSE, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.above = nn.Sequential(
            nn.Linear(dim + tables * (tables + 1) // 2, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, 1)
        )
        self.pairs = torch.tril_indices(tables + 1, tables + 1, -1)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        x = self.below(dense)
        features = torch.cat((x[:, None], pooled.unflatten(1, (-1, x.shape[1]))), dim=1)
        products = features @ features.transpose(1, 2)
        return self.above(torch.cat((x, products[:, self.pairs[0], self.pairs[1]]), dim=1))[:, 0]


def train(bags: nn.Module, sizes: argparse.Namespace, device: torch.device) -> tuple[float, list[float]]:
    """Samples a second of all ranks, without the first step, and this rank's loss of each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Dlrm(ranks * sizes.tables, sizes.dim).to(device))
    optimizer = torch.optim.SGD([*bags.parameters(), *model.parameters()], lr=0.02)
    draw, batch, losses, began = torch.Generator().manual_seed(1 + rank), ranks * sizes.batch, [], 0.0
    offsets = torch.arange(0, sizes.tables * batch * POOLING + 1, POOLING, device=device)
    for step in range(sizes.steps):
        if step == 1:
            torch.cuda.synchronize() if gpu else None
            began = time.perf_counter()
        indices = torch.randint(sizes.rows, (sizes.tables * batch * POOLING,), generator=draw).to(device)
        dense = torch.randn(sizes.batch, DENSE, generator=draw).to(device)
        clicks = (dense.sum(dim=1) > 0).float()
        loss = functional.binary_cross_entropy_with_logits(model(dense, bags(indices, offsets)), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.cuda.synchronize() if gpu else None
    return (sizes.steps - 1) * batch / (time.perf_counter() - began), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, on_gpu, on_cpu in (
        *(("tables", 32, 2), ("rows", 100_000, 50), ("dim", 128, 8)),
        *(("batch", 1024, 4), ("steps", 50, 3)),  # samples of a rank
    ):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    sizes = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10 + rank)
    tables = [torch.randn(sizes.rows, sizes.dim, device=device) / 4 for _ in range(sizes.tables)]
    plain, losses = train(Unfused([table.clone() for table in tables]), sizes, device)
    with Communicator(device=device) as comm:
        bags = ops.EmbeddingBagAllToAll(comm, [sizes.rows] * sizes.tables, sizes.dim)
        bags.tables = nn.ParameterList(tables)
        fused, same = train(bags, sizes, device)
        comm.synchronize()
    torch.testing.assert_close(same, losses, rtol=1e-3, atol=1e-4)
    print(f"rank {rank} of {world_size} on {device}: loss {same[0]:.3f} to {same[-1]:.3f}, the same both ways")
    if rank == 0:
        print(f"samples a second: {plain:.0f} without Sidelane, {fused:.0f} with")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a recommender in the style of DLRM, whose tables are spread over ranks: by bags and an all-to-all, and fused.

Tables lie whole on one rank each, or in shards of rows on all ranks. Bags have random numbers of rows, as those of
DLRM's data generator. On GPUs the shape is the fused operators paper's: 2,048 samples of two ranks, 256 tables each.

torchrun --nproc-per-node 2 examples/dlrm.py    (--tables, --rows, --dim, --pooling, --batch; on CPUs by an interpreter)
"""

import argparse
import os
import time
from collections.abc import Iterator

import torch

gpu = torch.cuda.is_available()
if not gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
from parts.rates import INTERPRETED
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sidelane import Communicator, ops

DENSE = 4  # numbers of a sample
Lookups = tuple[torch.Tensor, torch.Tensor]  # rows of all bags, table by table over all samples, and where each begins


class Unfused(nn.Module):
    """One ``embedding_bag`` for all tables of a rank, an all-to-all, and a copy into the layout."""

    def __init__(self, tables: list[torch.Tensor]) -> None:
        super().__init__()
        self.count, self.whole = len(tables), nn.Parameter(torch.cat(tables))

    def own(self, lookups: Lookups) -> Lookups:
        """Rows of this rank's tables, as if they were one."""
        indices, offsets = of_own_tables(lookups)
        sizes = offsets[:: (len(offsets) - 1) // self.count].diff()
        first_rows = torch.arange(0, len(self.whole), len(self.whole) // self.count, device=offsets.device)
        return indices + first_rows.repeat_interleave(sizes), offsets

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        pooled = functional.embedding_bag(indices, self.whole, offsets, mode="sum", include_last_offset=True)
        sent = pooled.view(self.count, ranks, -1, pooled.shape[-1]).transpose(0, 1).contiguous()
        came = all_to_all_single_autograd(sent, [1] * ranks, [1] * ranks, dist.group.WORLD)
        return came.view(ranks * self.count, -1, pooled.shape[-1]).transpose(0, 1).flatten(1)


class Tables(nn.Module):
    """Tables that are whole on their rank: bags are pooled by the kernel that sends them."""

    def __init__(self, comm: Communicator, tables: list[torch.Tensor]) -> None:
        super().__init__()
        self.bags = ops.EmbeddingBagAllToAll(comm, [1] * len(tables), tables[0].shape[1])
        self.bags.tables = nn.ParameterList(tables)

    def own(self, lookups: Lookups) -> Lookups:
        return of_own_tables(lookups)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(indices, offsets)


class ShardsOfRows(Tables):
    """Rows of all tables that this rank has: partial bags of all samples are exchanged, and added up there."""

    def own(self, lookups: Lookups) -> Lookups:
        (indices, offsets), rows = lookups, len(self.bags.tables[0])
        is_own = indices // rows == dist.get_rank()
        return indices[is_own] % rows, functional.pad(is_own.cumsum(0), (1, 0))[offsets]

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(indices, offsets).unflatten(1, (dist.get_world_size(), -1)).sum(1)


class Dlrm(nn.Module):
    """What all ranks have: layers for the numbers and for products of all pairs of features."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(DENSE, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.above = nn.Sequential(
            nn.Linear(dim + tables * (tables + 1) // 2, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, 1)
        )
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1], persistent=False)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        x = self.below(dense)
        features = torch.cat((x[:, None], pooled.unflatten(1, (-1, x.shape[1]))), dim=1)
        products = (features @ features.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.above(torch.cat((x, products), dim=1))[:, 0]


def of_own_tables(lookups: Lookups) -> Lookups:
    """The lookups in this rank's tables; each rank has as many."""
    (indices, offsets), rank = lookups, dist.get_rank()
    bags = (len(offsets) - 1) // dist.get_world_size()
    begins = offsets[rank * bags : (rank + 1) * bags + 1]
    return indices[int(begins[0]) : int(begins[-1])], begins - begins[0]


def batches(sizes: argparse.Namespace, device: torch.device) -> Iterator[tuple[Lookups, torch.Tensor]]:
    """Lookups of all samples in all tables, alike on all ranks, and this rank's numbers."""
    ranks = dist.get_world_size()
    alike, own = (torch.Generator(device).manual_seed(seed) for seed in (1, 2 + dist.get_rank()))
    for _ in range(sizes.steps):
        uniform = torch.rand(ranks * sizes.tables * ranks * sizes.batch, generator=alike, device=device)
        lengths = (2 * sizes.pooling * uniform).round().clamp(min=1).long()
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        indices = torch.randint(sizes.rows, (int(offsets[-1]),), generator=alike, device=device)
        yield (indices, offsets), torch.randn(sizes.batch, DENSE, generator=own, device=device)


def train(bags: nn.Module, sizes: argparse.Namespace, device: torch.device) -> tuple[list[float], list[float]]:
    """Samples a second of all ranks in training and inference, and this rank's loss of each step."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Dlrm(ranks * sizes.tables, sizes.dim).to(device))
    optimizer = torch.optim.SGD([*bags.parameters(), *model.parameters()], lr=0.02 / sizes.pooling)
    losses, took = [], [0.0, 0.0]
    for number, (of_all, dense) in enumerate(batches(sizes, device)):
        lookups = bags.own(of_all)  # who has which rows is not what is timed
        clicks = (dense.sum(dim=1) > 0).float()
        for infers in (False, True):
            torch.cuda.synchronize() if gpu else None
            began = time.perf_counter()
            with torch.inference_mode(infers):
                scores = (model.module if infers else model)(dense, bags(*lookups))
            if not infers:
                loss = functional.binary_cross_entropy_with_logits(scores, clicks)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            torch.cuda.synchronize() if gpu else None
            took[infers] += (time.perf_counter() - began) * (number > 0)  # the first one makes what it needs
    return [(sizes.steps - 1) * ranks * sizes.batch / seconds for seconds in took], losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, on_gpu, on_cpu in (
        *(("tables", 256, 2), ("rows", 8192, 48), ("dim", 256, 8), ("pooling", 70, 3)),  # tables of a rank
        *(("batch", 1024, 4), ("steps", 10, 3)),  # samples of a rank
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
    if sizes.rows % ranks:
        raise SystemExit(f"--rows (value={sizes.rows}, allowed=multiples of {ranks}, the ranks)")
    draw, owned, shards = torch.Generator(device).manual_seed(10), [], []
    rows = slice(rank * (sizes.rows // ranks), (rank + 1) * (sizes.rows // ranks))
    for number in range(ranks * sizes.tables):  # of all ranks, which agree on them
        table = torch.randn(sizes.rows, sizes.dim, generator=draw, device=device) / 4
        owned += [table] if number // sizes.tables == rank else []
        shards.append(table[rows].clone())
    rates, losses = {}, {}
    rates["without Sidelane"], losses["without Sidelane"] = train(Unfused(owned), sizes, device)
    with Communicator(device=device) as comm:
        for name, fused in (
            ("with whole tables on each rank", Tables(comm, owned)),
            ("with tables split by rows", ShardsOfRows(comm, shards)),
        ):
            rates[name], losses[name] = train(fused, sizes, device)
        comm.synchronize()
    wanted = losses.pop("without Sidelane")
    for same in losses.values():
        torch.testing.assert_close(same, wanted, rtol=1e-3, atol=1e-4)
    print(f"rank {rank} of {ranks} on {device}: loss {wanted[0]:.3f} to {wanted[-1]:.3f}, the same in all ways")
    if rank == 0:
        if not gpu:
            print(INTERPRETED)
        for name, (training, inference) in rates.items():
            print(f"samples a second, {name}: {training:.0f} in training, {inference:.0f} in inference")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

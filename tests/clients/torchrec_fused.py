"""TorchRec with a plug-in: bags are pooled by the kernel that sends them, in place of a lookup and its exchange.

A sharded collection asks a lookup for bags, and an output dist for their exchange; both are replaced where tables are
sharded by tables or by rows. Gradients go to the optimizer that TorchRec fuses with its backward: plain SGD here.

torchrun --nproc-per-node 2 tests/clients/torchrec_fused.py sidelane
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
from client import BACKEND, DEVICE, RANKS, finish
from torchrec.distributed import comm_ops
from torchrec.distributed import sharding_plan as by
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import NoWait, ShardingPlan
from torchrec_parts import NAMES, Net, batch

from sidelane import Communicator, ops

RATE = 0.1


class Pooled(torch.autograd.Function):
    """Bags of this rank's samples; the backward updates the tables."""

    @staticmethod
    def forward(ctx, anchor, comm, tables, features):
        ctx.comm, ctx.tables, ctx.bags = comm, tables, (features.values(), features.offsets())
        return ops.embedding_all_to_all(comm, tables, *ctx.bags).clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad / ctx.comm.world_size if comm_ops.get_gradient_division() else grad
        found, _ = ops.embedding_all_to_all_backward(ctx.comm, grad.contiguous(), ctx.tables, *ctx.bags)
        torch._foreach_add_(ctx.tables, found, alpha=-RATE)
        return None, None, None, None


class Arrived(torch.nn.Module):
    """In place of an exchange: the bags are here."""

    def forward(self, bags, context=None):
        return NoWait(bags)


def fuse(bags: ShardedEmbeddingBagCollection, comm) -> None:
    """Pool and exchange bags in one kernel, where shards are tables or rows of them."""
    anchor = torch.zeros((), requires_grad=True)
    for number, (lookup, kind) in enumerate(zip(bags._lookups, bags._sharding_types, strict=True)):
        if kind not in ("table_wise", "row_wise"):
            continue
        tables = [
            weight
            for group in lookup._emb_modules
            for table, weight in zip(group.config.embedding_tables, group.split_embedding_weights(), strict=True)
            for _ in range(table.num_features())
        ]

        def pool(features, tables=tables, by_rows=kind == "row_wise"):
            pooled = Pooled.apply(anchor, comm, tables, features)
            return pooled.unflatten(1, (comm.world_size, -1)).sum(1) if by_rows else pooled

        lookup.forward, bags._output_dists[number] = pool, Arrived()


dist.init_process_group(BACKEND)
comm = Communicator(device=DEVICE)  # of its own, as the group's makes the calls of DDP, in a thread of theirs
values = []
for kinds in (
    {name: by.table_wise(rank=index % RANKS, compute_kernel="fused") for index, name in enumerate(NAMES)},
    dict.fromkeys(NAMES, by.row_wise(compute_kernel="fused")),
):
    torch.manual_seed(0)
    net, sharder = Net(), EmbeddingBagCollectionSharder(fused_params={"learning_rate": RATE})
    plan = by.construct_module_sharding_plan(net.bags, kinds, sharder, RANKS, RANKS, DEVICE.type)
    net = DistributedModelParallel(net, device=DEVICE, plan=ShardingPlan({"bags": plan}), sharders=[sharder])
    if BACKEND == "sidelane":
        fuse(net.module.bags, comm)
    optimizer = torch.optim.SGD([p for n, p in net.named_parameters() if "over" in n], lr=RATE)
    for step in range(4):
        loss = net(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(round(loss.item(), 5))  # sums of a bag's rows are rounded in another order
comm.synchronize()
comm.close()
finish(values)

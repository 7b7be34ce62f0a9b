"""Two GPUs as two nodes, under torchrun: NCCL between them over sockets, Sidelane within.

With two ranks there is one on each node, so that all is far. With four, two share a GPU, and a rail has one of each.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from unittest import mock

import nodes_cases as cases
import torch
import torch.distributed as dist
from fsdp_models import mesh_of, on_nodes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sidelane
from sidelane import config, fsdp
from sidelane.integrations.nodes import topology
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.groups import NodeRanks, find_nodes
from sidelane.integrations.nodes.topology import Nodes


def against_alone(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """Gradients are the mean of what each rank would have alone: for ranks that share GPUs, where NCCL refuses all."""
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), torch.get_default_device()
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(96, 255, bias=False), nn.GELU(), nn.Linear(255, 96))
    model = copy.deepcopy(alone)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(group))
    given = [torch.randn(5, 96, generator=torch.Generator(device).manual_seed(other)) for other in range(size)]
    with (
        mock.patch.multiple(topology, LEAST_BYTES=1, PIECE_BYTES=40 << 10),
        fsdp.enable(model, config=on_nodes(group, layout)) as enabled,
    ):
        for _ in range(3):
            model.zero_grad()
            model(given[rank]).square().sum().backward()
        assert not enabled.elsewhere and enabled.calls >= 12
        for each in given:
            alone(each).square().sum().div(size).backward()
        for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(sharded.grad, DTensor) and whole.grad is not None
            wanted = whole.grad.split(-(-len(whole) // size))
            local = sharded.grad.to_local()
            torch.testing.assert_close(local, wanted[rank] if rank < len(wanted) else wanted[0][:0])


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
nodes = Nodes(tuple(other * 2 // size for other in range(size)))
device = torch.device("cuda", nodes.of[rank])
torch.cuda.set_device(device)
torch.set_default_device(device)
sidelane.register()
dist.init_process_group("nccl")  # which makes no call of its own here: it would refuse ranks that share a GPU
world = dist.group.WORLD
assert world is not None
if size > 2:
    cases.moves(world, nodes.of)
    cases.reduces(world, nodes.of)
    cases.in_pieces(world, nodes.of)
    cases.listed(world, nodes.of)
    against_alone(world, nodes.of)
else:
    store = dist.PrefixStore("two", dist.distributed_c10d._get_default_store())
    liveness = find_nodes(store, rank, (0, 1), None).liveness
    comm = NodesCommunicator(NodeRanks(store, rank, nodes, liveness, config.current(), "two"), device)
    for number in range(4):
        topology.PIECE_BYTES = 800_000 // (1 + number)  # so many pieces, or half as many of the smaller calls
        given = [cases.random(200_002, torch.bfloat16, 10 * number + other) for other in range(2)]
        gathered = torch.zeros(400_004, dtype=torch.bfloat16)
        comm.all_gather(gathered, given[rank])
        cases.same(gathered, torch.cat(given), "all_gather")
        part = torch.zeros(100_001, dtype=torch.bfloat16)
        comm.reduce_scatter(part, given[rank])
        torch.testing.assert_close(part, sum(tensor.split(100_001)[rank] for tensor in given))
        comm.all_to_all(gathered[:200_002], given[rank])
        cases.same(gathered[:200_002], torch.cat([tensor.split(100_001)[rank] for tensor in given]), "all_to_all")
        summed = given[rank].clone()
        comm.all_reduce(summed, op="max")
        cases.same(summed, torch.maximum(*given), "all_reduce")
        comm.broadcast(summed.copy_(given[rank]), root=1)
        cases.same(summed, given[1], "broadcast")
    torch.cuda.synchronize()
    comm.close()
print("right", flush=True)
dist.destroy_process_group()

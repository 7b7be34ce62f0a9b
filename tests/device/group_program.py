"""A program that trains by DDP under torchrun; its argument is what it asks torch for."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import sidelane

sidelane.register()
local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(local)
device = torch.device("cuda", local)
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
generator = torch.Generator("cpu").manual_seed(dist.get_rank())
for _ in range(30):
    x = torch.randn(32, 64, generator=generator).to(device)
    loss = (model(x) - x[:, :8]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told = loss.detach().clone()
    dist.all_reduce(told, dist.ReduceOp.AVG)
    losses.append(told.item())
everyone: list[float] = [0.0] * dist.get_world_size()
dist.all_gather_object(everyone, losses[-1])
assert losses[-1] < losses[0] and len(set(everyone)) == 1, (losses, everyone)
rows = [row for row in sidelane.report().rows if row.where != "sidelane" and row.device == "cuda"]
assert not rows, rows
dist.barrier()
dist.destroy_process_group()
print("trained", flush=True)

"""torch: ZeroRedundancyOptimizer next to DDP, with its state gathered on one rank.

torchrun --nproc-per-node 2 tests/clients/torch_zero.py sidelane
"""

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANK, batches, finish, model, sums
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(BACKEND)  # the line
values = []
for as_views in (False, True):
    net = DistributedDataParallel(model().to(DEVICE), gradient_as_bucket_view=as_views)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_views, lr=1e-2
    )
    for x in batches(8):
        loss = (net(x.to(DEVICE)) - x.to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    optimizer.consolidate_state_dict(to=0)
    if RANK == 0:
        moments = optimizer.state_dict()["state"].values()
        values += [one["exp_avg"].double().sum().item() for one in moments]
    values += sums(net.parameters())
finish(values)

"""torch: FSDP2, a distributed checkpoint saved by ``async_save`` while training goes on, and loaded again.

torchrun --nproc-per-node 2 tests/clients/torch_dcp.py sidelane
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from client import BACKEND, DEVICE, GPUS, RANKS, batches, enable, finish, model, sums
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group(f"cuda:{BACKEND},cpu:gloo" if GPUS else BACKEND)  # the line; async_save asks for CPU tensors
mesh = init_device_mesh(DEVICE.type, (RANKS,))
net = model().to(DEVICE)
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
enable(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(steps: int) -> list[float]:
    """Return the losses of some steps."""
    losses = []
    for x in batches(steps):
        loss = (net(x.to(DEVICE)) - x.to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state() -> dict[str, object]:
    """Return what is saved."""
    parameters, moments = get_state_dict(net, optimizer)
    return {"net": parameters, "optimizer": moments}


saves = dist.new_group()  # a group of its own, since a thread calls it while training goes on
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
before = train(4)
saving = dcp.async_save(state(), checkpoint_id=folder[0], process_group=saves)
after = train(4)
saving.result()
loaded = state()
dcp.load(loaded, checkpoint_id=folder[0])
set_state_dict(net, optimizer, model_state_dict=loaded["net"], optim_state_dict=loaded["optimizer"])
assert train(4) == after
finish([*before, *after, *sums(net.parameters())])

"""A PyTorch program with one line changed: train a small model with FSDP2 on a Sidelane group, and see what ran where.

torchrun --nproc-per-node 2 examples/process_group.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sidelane


def train(steps: int, device: torch.device) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(32, 64, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    told = loss.detach()
    dist.all_reduce(told, dist.ReduceOp.AVG)
    return told.item()


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    sidelane.register()  # an installed package needs no such line
    dist.init_process_group("sidelane")  # was: "nccl", or "gloo"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss = train(30, device)
    assert loss < 0.8, loss
    print(f"rank {rank} of {world_size} on {device}: loss {loss:.4f} after 30 steps")
    if rank == 0:
        print(sidelane.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

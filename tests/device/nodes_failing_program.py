"""A rank of four on two GPUs as two nodes, NCCL between them, of which the second dies or does not come."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import nodes_cases as cases
import pytest
import torch
import torch.distributed as dist

import sidelane
from sidelane.errors import CommunicatorClosedError, PeerError

MODE = sys.argv[1]  # dies, or stays_away
rank = int(os.environ["RANK"])
layout = (0, 0, 1, 1)
device = torch.device("cuda", layout[rank])
torch.cuda.set_device(device)
torch.set_default_device(device)
sidelane.register()
dist.init_process_group("nccl")  # which makes no call of its own: it would refuse ranks that share a GPU
world = dist.group.WORLD
assert world is not None
with cases.on_nodes(world, layout) as group:
    group.set_timeout(timedelta(seconds=10))  # type: ignore[attr-defined]  # of torch 2.13
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1 << 20)
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    assert tensor.eq(64).all()
    if layout[rank] == 1:
        if MODE == "dies":
            os._exit(7)
        store.wait(["named by 0", "named by 1"], timedelta(seconds=120))
        store.set(f"heard by {rank}", "")
        os._exit(0)
    with pytest.raises(PeerError, match=r"rank 2 .*node 1.* rank 3 .*did not answer") as caught:
        for _ in range(100):
            dist.all_reduce(tensor, group=group)
            torch.cuda.synchronize()
    assert caught.value.ranks == (2, 3), str(caught.value)
    with pytest.raises(CommunicatorClosedError):
        dist.all_reduce(tensor, group=group)
    assert torch.ones(5).sum().item() == 5, "the device works on"
    store.set(f"named by {rank}", "")
    print("named", flush=True)
    if rank == 0:  # it leaves last, for nobody to miss it
        others = (1, 2, 3) if MODE == "stays_away" else (1,)
        store.wait([f"heard by {other}" for other in others], timedelta(seconds=60))
    store.set(f"heard by {rank}", "")
    os._exit(0)  # groups with the dead cannot be taken down

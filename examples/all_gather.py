"""Gather shards in place on copy engines (or between CPU processes), and check them.

torchrun --nproc-per-node 4 examples/all_gather.py
"""

import os

import torch
import torch.distributed as dist

from sidelane import Communicator


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    with Communicator(device=device) as comm:
        weights = comm.empty(comm.world_size, 1 << 20, dtype=torch.bfloat16)  # symmetric memory: no staging copy
        weights[comm.rank].fill_(comm.rank)
        comm.all_gather(weights, weights[comm.rank])  # in place: the input is this rank's part of the output
        comm.synchronize()
        expected = torch.arange(comm.world_size, device=device, dtype=torch.bfloat16)
        assert torch.equal(weights, expected[:, None].expand_as(weights))
        print(f"rank {comm.rank} of {comm.world_size} on {device}: every shard is here")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""An all-gather of one's own: a Triton kernel pushes tiles into the outputs of all peers, with flags of its own.

torchrun --nproc-per-node 2 examples/own_kernel.py        (on CPU processes by Triton's interpreter)
"""

import os

import torch

gpu = torch.cuda.is_available()
if not gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
import triton
import triton.language as tl

from sidelane import Communicator
from sidelane.device.context import barrier_acq_rel, begin, end, put_weak, rank_of, world_size_of

TILE, PROGRAMS = 1024, 4


@triton.jit
def push_tiles(context, outputs, shard, count, TILE: tl.constexpr):
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    barrier_acq_rel(context, program, generation)  # the outputs of all peers are free
    for tile in range(program, tl.cdiv(count, TILE), programs):
        offsets = tile * TILE + tl.arange(0, TILE)
        values = tl.load(shard + offsets, mask=offsets < count)
        for turn in range(ranks):
            put_weak(outputs, (rank + turn) % ranks, rank * count + offsets, values, offsets < count)
    barrier_acq_rel(context, programs + program, generation)  # all tiles of my number are here
    end(context, generation)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    with Communicator(device=device) as comm:
        count = 10_000
        output = comm.empty(comm.world_size, count)  # peers write it: symmetric memory
        with comm.load_kernel(push_tiles, flags=2 * PROGRAMS) as push:
            for step in range(3):
                shard = torch.full((count,), 10.0 * step + comm.rank, device=device)
                push.launch((PROGRAMS,), comm.peers(output), shard, count, TILE=TILE)
                comm.synchronize()
                expected = 10.0 * step + torch.arange(comm.world_size, device=device)
                assert output.eq(expected[:, None]).all()
                comm.barrier()  # nobody begins the next step before all have looked
        print(f"rank {comm.rank} of {comm.world_size} on {device}: the shards of all ranks are here, three times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

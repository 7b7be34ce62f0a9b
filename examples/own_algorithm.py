"""Gather around a ring, an algorithm of one's own: registered, proved and run as ``variant="ring"``.

Every rank passes on to the next one what it got from the one before, so that every link carries one copy. Rank r of n;
``s`` is its own shard, ``s-1`` that of the rank before, and so on::

    dma:0    entry for r-1 | entry of r+1 | s > r+1, exit | s-1? s-1 > r+1, exit | ... | s+1?

That suits nodes whose links join neighbours only; behind a switch it gains nothing.

torchrun --nproc-per-node 4 examples/own_algorithm.py        (CPU processes where there are no GPUs)
"""

import os

import torch
import torch.distributed as dist

from sidelane import Communicator
from sidelane.program.builders import Algorithm, Transport, build, register
from sidelane.program.builders.registry import FlagPlan
from sidelane.program.collective import Chunk, Collective, Kind, all_gather
from sidelane.program.ir import Command, Copy, Engine, EngineKind, Program, Queue
from sidelane.program.verify import verify


def ring(collective: Collective, transport: Transport) -> Program:
    """Build an all_gather whose ranks write into each other's outputs."""
    if transport is not Transport.PUSH:
        raise ValueError(f"ring: transport (value={transport}, allowed=push: ranks write into each other's outputs)")
    n = collective.world_size
    flags = FlagPlan(n, phases=max(1, n - 1))
    chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}
    queues = []
    for rank in range(n):
        before, behind = (rank - 1) % n, (rank + 1) % n
        commands: list[Command] = [flags.signal_entry(partner=rank, mover=before), flags.wait_entry(behind, rank)]
        for step in range(n - 1):
            if step:
                commands.append(flags.wait_exit(partner=rank, mover=before, phase=step - 1))
            chunk = chunks.get(((rank - step) % n, behind))
            if chunk is not None:
                commands.append(pass_on(collective, rank, chunk))
            commands.append(flags.signal_exit(partner=behind, mover=rank, phase=step))
        if n > 1:
            commands.append(flags.wait_exit(partner=rank, mover=before, phase=n - 2))
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
        own = chunks.get((rank, rank))
        if own is not None and not collective.in_place:
            queues.append(Queue(rank, Engine(EngineKind.LOCAL), (pass_on(collective, rank, own),)))
    return Program(collective, "ring", tuple(queues), (0,) * n, flags.handshakes)


def pass_on(collective: Collective, rank: int, chunk: Chunk) -> Copy:
    """Copy a shard from where it lies at ``rank``, which has its own in its input."""
    target = collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)
    if chunk.src_rank == rank:
        return Copy(target, collective.input_span(rank, chunk.src_offset, chunk.nbytes))
    return Copy(target, collective.output_span(rank, chunk.dst_offset, chunk.nbytes))


register(
    Algorithm(
        name="ring",
        kinds=(Kind.ALL_GATHER,),
        preference=50,
        assemble=ring,
        into_outputs=True,
        merges=False,
        objection=lambda shape: "has no third rank to pass anything on to" if shape.world_size <= 2 else "",
    )
)


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    with Communicator(device=device) as comm:
        if comm.rank == 0:
            print(verify(build(all_gather([4096] * comm.world_size), "ring")))
        shard = torch.full((1024,), float(comm.rank), device=device)
        gathered = comm.empty(comm.world_size * 1024)  # peers write it: symmetric memory
        comm.all_gather(gathered, shard, variant="ring")
        comm.synchronize()
        assert gathered.view(-1, 1024).eq(torch.arange(comm.world_size, device=device)[:, None]).all()
        print(f"rank {comm.rank} of {comm.world_size} on {device}: all shards came around the ring")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

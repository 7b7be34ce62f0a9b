"""Hand a part of each rank's cache to the next rank, by a program of one's own: proved, predicted, run and checked.

torchrun --nproc-per-node 2 examples/own_program.py        (CPU processes where there are no GPUs)
"""

import os

import torch
import torch.distributed as dist

from sidelane import Communicator
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named
from sidelane_lab.sim.simulate import simulate

MIB = 1 << 20


def handover(ranks: int, nbytes: int) -> Program:
    """Rank r pushes the first bytes of its cache into the inbox of rank r+1, once that is free."""
    queues, results = [], []
    for rank in range(ranks):
        peer, before = (rank + 1) % ranks, (rank - 1) % ranks
        src, dst = Span(rank, "cache", 0, nbytes), Span(peer, "inbox", 0, nbytes)
        commands = (
            Signal(Flag(before, 0), EPOCH),  # "my inbox is free", to the rank that writes it
            Wait(Flag(rank, 0), EPOCH),
            Copy(dst, src),
            Signal(Flag(peer, 1), EPOCH),  # "your bytes are there"
            Wait(Flag(rank, 1), EPOCH),
        )
        queues.append(Queue(rank, Engine(EngineKind.DMA), commands))
        results.append(Result(dst, (src,)))
    sizes = {"cache": [4 * nbytes] * ranks, "inbox": [nbytes] * ranks}
    contract = Contract.of("handover", sizes, results)  # everything else must stay as it is
    return Program(contract, "push", tuple(queues), staging_bytes=(0,) * ranks, flag_count=2)


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    with Communicator(device=device) as comm:
        program = handover(comm.world_size, MIB)
        if comm.rank == 0:
            print(verify(program))
            print(f"predicted on H200s: {simulate(program, named('h200x4')).time_us:.1f} us")
        cache = torch.full((4 * MIB,), comm.rank, dtype=torch.uint8, device=device)
        inbox = comm.empty(MIB, dtype=torch.uint8)  # peers write it: symmetric memory
        with comm.load(program, {"cache": cache, "inbox": inbox}) as run:
            run()
            comm.synchronize()
        assert inbox.eq((comm.rank - 1) % comm.world_size).all()
        print(f"rank {comm.rank} of {comm.world_size} on {device}: the bytes of the rank before it are here")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

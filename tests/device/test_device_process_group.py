"""Process groups on GPUs whose memory is registered, whose ranks leave, and as programs under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device_context import Context
from device_pool import Ranks

import sidelane

PROGRAM = Path(__file__).with_name("group_program.py")


def registers_pools(context: Context, allocator: str) -> list[list[str]]:
    """Calls on memory of torch's or NCCL's allocator that the group has registered, eager and in a graph, and again
    behind its registration: how peers reach the tensors."""
    sidelane.register()
    device, said = context.device, []
    ours = dist.new_group(backend="sidelane")
    try:
        backend = ours._get_backend(device)
        size, rank, count = ours.size(), ours.rank(), 3 << 18
        try:
            pool = torch.cuda.MemPool(backend.mem_allocator if allocator == "nccl" else None)
        except RuntimeError as error:  # NCCL has none where a GPU has no multicast
            return [[str(error)]]
        with torch.cuda.use_mem_pool(pool):
            gathered, part = torch.empty(size, count, device=device), torch.empty(count, device=device)
            total = torch.empty(7 << 20, dtype=torch.bfloat16, device=device)
        backend.register_mem_pool(pool, symm=True)
        tensors = gathered, part, total
        comm = ours.communicator(device)

        def calls(step: float) -> None:
            part.fill_(step + rank), total.fill_(step + rank), gathered.fill_(-1)
            dist.all_gather_into_tensor(gathered, part, group=ours)
            dist.all_reduce(total, group=ours)

        def check(step: float) -> None:
            assert torch.equal(gathered[:, 5], torch.arange(step, step + size, device=device)), step
            assert torch.equal(gathered.amin(1), gathered.amax(1)), step
            assert (total == sum(step + peer for peer in range(size))).all(), step

        def several() -> None:
            for step in range(8):
                calls(step)
                check(step)
            said.append([str(comm.reach(tensor)) for tensor in tensors])

        several()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls(3.0)
        for _ in range(5):
            gathered.zero_()
            graph.replay()
            check(3.0)
        torch.cuda.synchronize()
        dist.barrier(group=ours)
        del graph
        backend.deregister_mem_pool(pool)
        several()
        return said
    finally:
        dist.destroy_process_group(ours)


@pytest.mark.parametrize("allocator", ["torch", "nccl"])
def test_registered_pools_need_no_staging(ranks: Ranks, allocator: str) -> None:
    for said in ranks.run(registers_pools, allocator, timeout_s=120):
        if len(said) == 1 and allocator == "nccl":
            pytest.skip(said[0][0])
        registered, behind = said
        assert registered == ["symmetric"] * 3
        assert [how.partition(":")[0] for how in behind] == ["staged"] * 3


LEAVES = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
import sidelane
rank, folder, how = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
sidelane.register()
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("sidelane", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
if rank == 0:
    (folder / "there").touch()
while not (folder / "there").exists():
    time.sleep(0.01)
if rank == 1 and how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    dist.destroy_process_group()
    while not (folder / "named").exists():
        time.sleep(0.01)
    sys.exit()
try:
    dist.all_reduce(torch.ones(4, device="cuda"))
except sidelane.PeerError as error:
    print(type(error).__name__, error.ranks, error, flush=True)
(folder / "named").touch()
os._exit(0)
"""


@pytest.mark.parametrize("how", ["is killed", "destroys"])
def test_a_rank_that_leaves_before_its_first_collective_is_named(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", LEAVES]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path), how], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said, _ = processes[0].communicate(timeout=150)  # the time-out of the group is 600 s
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert said.startswith("PeerError (1,) "), said


@pytest.mark.parametrize("backend", ["sidelane", "cuda:sidelane,cpu:gloo"])
def test_a_program_that_changed_a_line(backend: str) -> None:
    """Under torchrun, two ranks on a GPU where there is but one: nothing may need NCCL."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    ran = subprocess.run([*command, backend], capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("trained") == 2, ran.stdout

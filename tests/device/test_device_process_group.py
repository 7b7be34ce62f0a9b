"""The process group on GPUs: what CPU ranks do in tests/integrations/test_process_group.py, streams and graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_pool import Ranks

PROGRAM = Path(__file__).with_name("group_program.py")


def test_every_collective_is_as_gloos(ranks: Ranks) -> None:
    ranks.run("group_device_cases.of", "like_gloo", timeout_s=120)


@pytest.mark.parametrize(
    "name",
    [
        *("alike", "averages", "more_dtypes", "many_back_to_back", "coalesced", "functional_collectives", "compiled"),
        *("distributed_tensors", "trains_ddp", "joins_ddp", "hooks_of_ddp", "refused_in_graphs", "trains_fsdp"),
        "memory_for_fsdp",
        "memory_without_a_line",
        "lends_its_communicator",
    ],
)
def test_it_works_as_torch_expects(ranks: Ranks, name: str) -> None:
    ranks.run("group_device_cases.of", name, timeout_s=120)


@pytest.mark.parametrize("allocator", ["torch", "nccl"])
def test_registered_pools_need_no_staging(ranks: Ranks, allocator: str) -> None:
    for said in ranks.run("group_device_cases.registers_pools", allocator, timeout_s=120):
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


def test_streams(ranks: Ranks) -> None:
    ranks.run("group_device_cases.streams", timeout_s=120)


def test_memory_of_asynchronous_calls(ranks: Ranks) -> None:
    ranks.run("group_device_cases.memory_of_asynchronous_calls", timeout_s=60)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
def test_batches_of_sends_and_receives(ranks: Ranks) -> None:
    ranks.run("group_device_cases.batches_by_nccl", timeout_s=60)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
def test_ranks_of_two_worlds(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("group_device_cases.joins_worlds", str(tmp_path), timeout_s=60)


def test_in_a_graph(ranks: Ranks) -> None:
    ranks.run("group_device_cases.in_a_graph", timeout_s=60)


@pytest.mark.parametrize("backend", ["sidelane", "cuda:sidelane,cpu:gloo"])
def test_a_program_that_changed_a_line(backend: str) -> None:
    """Under torchrun, two ranks on a GPU where there is but one: nothing may need NCCL."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    ran = subprocess.run([*command, backend], capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("trained") == 2, ran.stdout

"""Two GPUs as two nodes: NCCL over sockets between them, as it would be between machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from as_torchrun import address

from sidelane_lab.harness.launch import store_on_loopback

PROGRAM = Path(__file__).with_name("nodes_program.py")
FAILING = PROGRAM.with_name("nodes_failing_program.py")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def environment(**more: str) -> dict[str, str]:
    """Of a program: no GPU reaches another but over sockets."""
    paths = [str(PROGRAM.parents[1] / "common"), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **settings, **more}


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_gpus_as_two_nodes(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=220, env=environment())
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("right") == ranks, ran.stdout


@pytest.mark.parametrize("mode", ["dies", "stays_away"])
def test_a_node_that_is_gone_is_named_before_nccl_gives_up(mode: str) -> None:
    """Not under torchrun, which ends all ranks with the first that dies."""
    store = store_on_loopback()  # lives until the ranks have ended
    where = {**address(store), "WORLD_SIZE": "4"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FAILING), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**where, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(4)
    ]
    try:
        told = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == ([0, 0, 7, 7] if mode == "dies" else [0] * 4), told
    assert [out.count("named") for out, _ in told] == [1, 1, 0, 0], told

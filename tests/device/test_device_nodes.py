"""Two GPUs as two nodes: NCCL over sockets between them, as it would be between machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("nodes_program.py")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_gpus_as_two_nodes(ranks: int) -> None:
    common = str(PROGRAM.parents[1] / "common")
    settings = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    settings["PYTHONPATH"] = os.pathsep.join([common, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=220, env={**os.environ, **settings})
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("right") == ranks, ran.stdout

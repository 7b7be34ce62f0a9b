"""Kernels for more ranks than there are GPUs, compiled and run on one (``kernel_crowd``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CROWD = Path(__file__).with_name("kernel_crowd.py")


@pytest.mark.parametrize(("scenario", "ranks"), [("broadcasting", 4), ("moving", 8)])
def test_ranks_that_share_a_gpu(scenario: str, ranks: int) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, str(CROWD), scenario, str(ranks), "6"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

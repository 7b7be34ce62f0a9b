"""The examples run as their first lines say, on two CPU processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from as_torchrun import run_program

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_an_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES[0])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} of 2 on cpu" in done.stdout for rank in range(2))


@pytest.mark.parametrize("example", EXAMPLES[1:], ids=lambda example: example.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    assert "torchrun --nproc-per-node" in example.read_text().split('"""')[1]
    said = run_program(example, tmp_path)
    assert all(f"rank {rank} of 2 on cpu" in said for rank in range(2))

"""Code blocks of README and guide on two GPUs, as printed, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from guide_blocks import programs

CONTRIB = Path(__file__).parents[2] / "contrib" / "fusion"
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "example.py"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("blocks", [pytest.param(blocks, id=name) for name, blocks in programs()])
def test_code_blocks_run(blocks: list[str], tmp_path: Path) -> None:
    program = "\n".join(blocks)
    if "from transformers" in program:
        pytest.importorskip("transformers")
    (tmp_path / "example.py").write_text(program)
    paths = os.pathsep.join(filter(None, (str(CONTRIB), os.environ.get("PYTHONPATH"))))  # as a block of README says
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run(
        COMMAND, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]

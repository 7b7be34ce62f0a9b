"""torchrun starts a program again after a rank was killed while it trained: ``make test-restart``, a minute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "trained.py"


@pytest.mark.parametrize("what", ["group", "fsdp"])
def test_training_goes_on_after_a_rank_was_killed(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", "1", str(PROGRAM), what, str(tmp_path)]
    # Or else torch 2.13 gives the new ranks a store with the addresses of the old ones; with Gloo alone, too.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    said = {path.name: path.read_text() for path in tmp_path.glob("life *")}
    assert done.returncode == 0, (said, done.stderr[-4000:])
    assert said.keys() == {f"life {life} of {rank}" for life in (0, 1) for rank in range(3)} - {"life 0 of 1"}
    for rank in (0, 2):
        assert re.search(r"PeerError: .*rank 1", said[f"life 0 of {rank}"]), (
            said
        )  # DDP makes a RuntimeError of a hook's
    assert {said[f"life 1 of {rank}"] for rank in range(3)} == {"from step 4, True"}

"""Many steps of random sizes neither leak nor slow down: ``make test-steps``, 10,000 of them in minutes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("stepping.py")
STEPS = int(os.environ.get("STEPS") or "10000")
RANKS = {"machine": 2, "nodes": 4}

# The median of the last half of ten looks over that of the first. Calls are those of Python functions in a step, which
# vary with where torch's allocator puts tensors.
GROWTH = {"calls": 1.2, "objects": 1.02, "resident": 1.05, "descriptors": 1, "threads": 1, "reserved": 1, "used": 1}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("where", RANKS)
def test_steps_of_random_sizes_neither_leak_nor_slow_down(where: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if where == "nodes":
        environment |= {"SIDELANE_VIRTUAL_NODES": "0,1,1,0", "SIDELANE_BESIDE": "compute"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[where]}"]
    command += [str(PROGRAM), where, str(STEPS), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2900, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    for rank in range(RANKS[where]):
        seen = json.loads((tmp_path / f"rank {rank}").read_text())
        print(where, rank, *(json.dumps(look) for look in seen), sep="\n")
        for name, most in GROWTH.items():
            before, behind = (statistics.median_low(look[name] for look in half) for half in (seen[:5], seen[5:]))
            assert behind <= before * most, (where, rank, name, [look[name] for look in seen])

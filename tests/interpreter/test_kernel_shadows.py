"""Kernels do what their shadows say, block by block: written down by Triton's interpreter, in several processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
RANKS = Path(__file__).with_name("shadow_ranks.py")


def run(world_size: int, mistake: str) -> subprocess.CompletedProcess[str]:
    modules = os.pathsep.join([str(RANKS.parent), *sys.path])
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=modules)
    command = [sys.executable, str(RANKS), str(world_size), mistake]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


@needs_triton
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_block_does_what_its_shadow_says(world_size: int) -> None:
    done = run(world_size, "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" steps") == world_size


@needs_triton
@pytest.mark.parametrize("mistake", ["copy", "order", "flag"])
def test_a_shadow_that_says_something_else_is_noticed(mistake: str) -> None:
    done = run(2, mistake)
    assert done.returncode == 1
    assert "AssertionError: rank" in done.stderr or "AssertionError: (" in done.stderr, done.stderr

"""Kernels that talk to each other, in several processes under Triton's CPU interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
RANKS = Path(__file__).with_name("kernel_ranks.py")


def run(scenario: str, world_size: int) -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, str(RANKS), scenario, str(world_size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
@pytest.mark.parametrize("world_size", [1, 3])
def test_moving(world_size: int) -> None:
    run("moving", world_size)


@needs_triton
@pytest.mark.parametrize(
    ("dtypes", "world_size"), [("float32", 3), ("bfloat16:float16", 2), ("int32:int64", 2), ("float32", 1)]
)
def test_reducing(dtypes: str, world_size: int) -> None:
    run(f"reducing:{dtypes}", world_size)


@needs_triton
@pytest.mark.parametrize("world_size", [1, 3])
def test_lists(world_size: int) -> None:
    run("lists", world_size)


@needs_triton
@pytest.mark.parametrize("world_size", [2, 4])
def test_broadcasting(world_size: int) -> None:
    run("broadcasting", world_size)


@needs_triton
def test_a_dead_peer_is_named_and_kernels_give_up() -> None:
    run("dead_peer", 3)


@needs_triton
def test_generations_wrap() -> None:
    run("generations_wrap", 2)

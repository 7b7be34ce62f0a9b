"""Kernels that talk to each other, in several processes under Triton's CPU interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from marks import long, needs_triton

RANKS = Path(__file__).with_name("kernel_ranks.py")
Run = Callable[[str, int], object]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a scenario among so many ranks."""
    return lambda scenario, ranks: forked.run(RANKS, (scenario, str(ranks)), tmp_path, {"TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.parametrize("world_size", [long(1), 3])
def test_moving(run: Run, world_size: int) -> None:
    run("moving", world_size)


@needs_triton
@pytest.mark.parametrize(
    ("dtypes", "world_size"), [("float32", 3), long("bfloat16:float16", 2), long("int32:int64", 2), long("float32", 1)]
)
def test_reducing(run: Run, dtypes: str, world_size: int) -> None:
    run(f"reducing:{dtypes}", world_size)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "world_size"), [("float32", 3), long("bfloat16", 2), long("int32", 2), long("float32", 1)]
)
def test_reducing_in_chunks(run: Run, dtype: str, world_size: int) -> None:
    run(f"reducing_in_chunks:{dtype}", world_size)


@needs_triton
@pytest.mark.parametrize(("world_size", "calls"), [long(1, "4"), (3, "1"), (3, "2:1"), long(3, "4")])
def test_lists(run: Run, world_size: int, calls: str) -> None:
    run(f"lists:{calls}", world_size)


@needs_triton
@pytest.mark.parametrize("world_size", [long(2), 4])
def test_broadcasting(run: Run, world_size: int) -> None:
    run("broadcasting", world_size)


@needs_triton
def test_a_dead_peer_is_named_and_kernels_give_up(run: Run) -> None:
    run("dead_peer", 3)


@needs_triton
def test_generations_wrap(run: Run) -> None:
    run("generations_wrap", 2)

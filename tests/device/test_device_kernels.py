"""Collectives in kernels on GPUs: right bytes by every protocol, eager and captured, and peers that do not come."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from device_pool import Pool, Ranks
from kernel_cases import NARROW

CASES = "kernel_cases."


@pytest.mark.parametrize("sizes", [(1, 7, 4096), (65_548, 200_000), (1 << 20, 1_048_592, 3_000_001)])
def test_moving(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    assert min(ranks.run(CASES + "moving", sizes, timeout_s=120)) == 24 * len(sizes)


@pytest.mark.parametrize("sizes", [(1, 7, 4096, 70_001), (393_216, 524_288, 524_289, 1_572_864, 3_000_001, 40 << 20)])
def test_broadcasting(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    ranks_of = ranks.run(CASES + "broadcasting", sizes, timeout_s=120)
    assert min(ranks_of) == len(sizes) * len(ranks_of) * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64])
def test_reducing(ranks: Ranks, dtype: torch.dtype) -> None:
    assert min(ranks.run(CASES + "reducing", (dtype,), (1, 333, 70_001, 300_000), timeout_s=150)) > 0


def test_reducing_on_a_tenth_of_the_gpu(ranks: Ranks) -> None:
    dtypes, sizes = (torch.bfloat16, torch.int32), (333, 70_001, 300_000, 1 << 20)
    assert min(ranks.run(CASES + "reducing", dtypes, sizes, NARROW, timeout_s=150)) == 2 * 4 * 4 * 3 * 2


def test_reducing_in_chunks(ranks: Ranks) -> None:
    ranks.run(CASES + "reducing_in_chunks", 20, timeout_s=120)


def test_graphs_replay_between_eager_calls(ranks: Ranks) -> None:
    ranks.run(CASES + "captured", 20, timeout_s=120)


def test_a_thousand_back_to_back_with_delays(ranks: Ranks) -> None:
    ranks.run(CASES + "thousand", 1000, timeout_s=120)


def test_an_absent_peer(fresh_pool: type[Pool]) -> None:
    results = fresh_pool().run(CASES + "absent", timeout_s=60)
    for rank, (text, at_fault) in enumerate(results):
        if rank != 1:
            assert at_fault == (1,), text
            assert "rank 1" in text and "a kernel" in text


def test_a_dead_peer(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool()
    victim = len(pool.processes) - 1
    pool.begin(CASES + "wait_for_a_dead_peer", victim)
    time.sleep(6.0)  # until the others hang in their call
    os.kill(pool.processes[victim].pid, signal.SIGKILL)
    answers = pool.finish(30.0, but=(victim,))
    assert len(answers) == victim
    assert all(f"({victim},)" in message and f"rank {victim} died" in message for message in answers)

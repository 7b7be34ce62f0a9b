"""Pools: any operation's results as symmetric memory, between real processes."""

from __future__ import annotations

import pool_cases
import pytest
from marks import long
from ranks import RankPool

NEW = "staged: its place in the pool has not been compared with the peers' yet"


@pytest.mark.parametrize("n", [2, 4])
def test_results_of_operations_are_symmetric(pool: RankPool, n: int) -> None:
    assert pool.run(pool_cases.results_of_operations, n) == [[NEW, "symmetric", 0, "symmetric"]] * n


def test_symmetric_memory_is_made_inside_of_a_pool_as_outside(pool: RankPool) -> None:
    assert pool.run(pool_cases.symmetric_memory_inside, 2) == [("symmetric", [0.0, 1.0])] * 2


def test_what_lies_in_a_pool(pool: RankPool) -> None:
    for found in pool.run(pool_cases.covered, 2):
        assert {name for name, inside in found.items() if not inside} == {"given", "in place", "after"}


@pytest.mark.parametrize("n", [2, long(3)])
def test_ranks_that_allocate_alike(pool: RankPool, n: int) -> None:
    for symmetric, staged, staging in pool.run(pool_cases.storm, n, n, 80, 0, pool_cases.MOVING):
        assert (symmetric, staged, staging) == (80, 0, 0)
    for symmetric, staged, _ in pool.run(pool_cases.storm, n, n, 40, 0, pool_cases.REDUCING):
        assert (symmetric, staged) == (40, 0)


@pytest.mark.parametrize("n", [2, long(4)])
def test_ranks_that_do_not(pool: RankPool, n: int) -> None:
    for symmetric, staged, _ in pool.run(pool_cases.storm, n, n, 80, 9, pool_cases.MOVING):
        assert symmetric + staged == 80 and staged > 20
    for symmetric, staged, _ in pool.run(pool_cases.storm, n, n, 40, 9, pool_cases.REDUCING):
        assert symmetric + staged == 40 and staged > 10


def test_lists_batches_and_exchanges(pool: RankPool) -> None:
    pool.run(pool_cases.lists, 3, 1, 12)


def test_a_tensor_that_some_ranks_have_in_no_pool(pool: RankPool) -> None:
    said = pool.run(pool_cases.not_in_the_pool_everywhere, 3)
    assert [first for first, _ in said] == ["staged", "staged", "staged"]
    assert said[0][1] == "MismatchError" and {second for _, second in said} <= {"MismatchError", "PeerError"}


def test_memory_comes_and_goes(pool: RankPool) -> None:
    for during, names in pool.run(pool_cases.comes_and_goes, 2):
        assert during == pool_cases.room() and "pool 4 of lane 0" in names and "pool 3" not in names


def test_a_pool_that_is_full(pool: RankPool) -> None:
    for said, total in pool.run(pool_cases.full, 2):
        assert "33554432 bytes do not fit" in said and "of 25165824" in said and total == 2


def test_calls_on_compared_tensors_wait_for_nobody(pool: RankPool) -> None:
    assert pool.run(pool_cases.compared_ones_wait_for_nobody, 3) == ["symmetric"] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_calls_that_come_again_are_prepared_once(pool: RankPool, n: int) -> None:
    for counts in pool.run(pool_cases.prepared, n, 6):
        assert counts[0] <= 2 and counts[1:] == [1, 1, 1]

"""Pools on GPUs: what any operation allocates inside is what collectives take."""

from __future__ import annotations

import pool_cases
from device_pool import Ranks

NEW = "staged: its place in the pool has not been compared with the peers' yet"


def test_any_operation(ranks: Ranks) -> None:
    for said in ranks.run("pool_device_cases.any_operation"):
        assert said == ["symmetric", "symmetric", "symmetric", "staged"]


def test_results_of_operations_are_symmetric(ranks: Ranks) -> None:
    for said in ranks.run("pool_device_cases.of", "results_of_operations"):
        assert [said[0], said[1], said[3]] == [NEW, "symmetric", "symmetric"]


def test_ranks_that_allocate_alike(ranks: Ranks) -> None:
    for kinds in (pool_cases.MOVING, pool_cases.REDUCING):
        for symmetric, staged, _ in ranks.run("pool_device_cases.of", "storm", 3, 200, 0, kinds, timeout_s=120):
            assert (symmetric, staged) == (200, 0)


def test_ranks_that_do_not(ranks: Ranks) -> None:
    for kinds in (pool_cases.MOVING, pool_cases.REDUCING):
        for symmetric, staged, _ in ranks.run("pool_device_cases.of", "storm", 4, 200, 9, kinds, timeout_s=120):
            assert symmetric + staged == 200 and staged > 0


def test_streams_and_memory_that_is_given_back(ranks: Ranks) -> None:
    for symmetric, staged in ranks.run("pool_device_cases.streams", 5, 200, timeout_s=120):
        assert symmetric + staged == 200 and symmetric > 0


def test_lists_batches_and_exchanges(ranks: Ranks) -> None:
    ranks.run("pool_device_cases.of", "lists", 1, 12)


def test_memory_comes_and_goes(ranks: Ranks) -> None:
    ranks.run("pool_device_cases.of", "comes_and_goes")


def test_a_pool_that_is_full(ranks: Ranks) -> None:
    n = len(results := ranks.run("pool_device_cases.of", "full"))
    for said, total in results:
        assert "asked for 33554432 bytes, which do not fit" in said and total == n


def test_calls_on_compared_tensors_wait_for_nobody(ranks: Ranks) -> None:
    assert set(ranks.run("pool_device_cases.of", "compared_ones_wait_for_nobody")) == {"symmetric"}


def test_graphs(ranks: Ranks) -> None:
    ranks.run("pool_device_cases.in_graphs", 12)

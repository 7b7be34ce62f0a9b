"""Calls with lists of tensors on GPUs: the bytes of CPU ranks' cases, graphs, streams, and what is submitted."""

from __future__ import annotations

import pytest
from device_pool import Ranks
from list_cases import MOVING, REDUCING

CASES = "list_device_cases."


@pytest.mark.parametrize("case", ["run", "run_on_stream"])
@pytest.mark.parametrize("seed", range(2))
def test_lists_of_tensors_that_only_move(ranks: Ranks, case: str, seed: int) -> None:
    ranks.run(CASES + case, "lists", MOVING, seed, 5, timeout_s=120)


def test_lists_of_tensors_to_reduce(ranks: Ranks) -> None:
    ranks.run(CASES + "run_on_stream", "lists", REDUCING, 1, 4, timeout_s=150)


@pytest.mark.parametrize("seed", range(3))
def test_lists_by_kernels(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "by_kernels", seed, timeout_s=150)


@pytest.mark.parametrize("name", ["edges", "planned_once", "refused", "refused_batches"])
def test_what_cpu_ranks_do(ranks: Ranks, name: str) -> None:
    ranks.run(CASES + "run", name, timeout_s=120)


@pytest.mark.parametrize("debug", [False, True])
def test_different_lists(ranks: Ranks, debug: bool) -> None:
    ranks.run(CASES + "run", "different", debug, timeout_s=120)


@pytest.mark.parametrize("case", ["run", "run_on_stream"])
def test_lists_and_single_tensors_in_turn(ranks: Ranks, case: str) -> None:
    ranks.run(CASES + case, "streams_of_calls", 3, 300, timeout_s=150)


@pytest.mark.parametrize("seed", range(2))
def test_graphs_of_lists(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "captured", seed, 20, timeout_s=150)


@pytest.mark.parametrize("count", [2, 100])
def test_a_list_has_the_handshake_of_one_tensor(ranks: Ranks, count: int) -> None:
    for one, many in ranks.run(CASES + "submitted", count):
        assert (many.writes, many.waits, many.calls) == (one.writes, one.waits, one.calls)
        assert many.peer_copies == count * one.peer_copies
        assert many.kernels == one.kernels == 0


def test_tensors_dropped_during_asynchronous_calls(ranks: Ranks) -> None:
    ranks.run(CASES + "dropped")


@pytest.mark.parametrize("case", ["run", "run_on_stream"])
def test_batches_of_several_kinds(ranks: Ranks, case: str) -> None:
    ranks.run(CASES + case, "batches", 5, 20, timeout_s=150)

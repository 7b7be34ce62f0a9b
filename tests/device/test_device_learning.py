"""Ordinary memory of GPUs, whose addresses come again while no host waits for another one."""

from __future__ import annotations

import pytest
from device_pool import Pool, Ranks

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "1"}


def test_a_model_goes_ahead_once_its_addresses_have_come_again(ranks: Ranks) -> None:
    found = ranks.run("learn_device_cases.of", "what_comes_again", 3, 40, timeout_s=120)
    assert all(said == found[0] for said in found), "all ranks do alike"
    assert found[0]["hits"] > 100 and "misses" not in found[0]


def test_large_calls_go_ahead_and_small_ones_do_not(ranks: Ranks) -> None:
    for said, reason, wrong in ranks.run("learn_device_cases.large_ones", 300, timeout_s=120):
        print(said)
        assert wrong == 0
        assert said["hits"] > 100 and said["hits"] + said["staged"] == 301
        assert "no host waits" in reason


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_tensors_that_are_replaced(ranks: Ranks, seed: int) -> None:
    found = ranks.run("learn_device_cases.of", "storm", seed, 200, timeout_s=120)
    print([said for said, _ in found])
    assert sum(said["hits"] for said, _ in found) > 100
    assert [left for _, left in found] == [0] * len(found), "what is mapped goes with the communicator"


def test_freed_memory_is_given_back_without_a_call(ranks: Ranks) -> None:
    found = ranks.run("learn_device_cases.of", "gives_back", 3 << 20, timeout_s=120)
    for rank, (seconds, before, missed, again) in enumerate(found):
        print(rank, seconds, before, missed, again)
        assert seconds < 2 and before["hits"] > 50
        key = "misses" if rank == 0 else "hits"
        assert missed.get(key, 0) - before.get(key, 0) == 5, "the owner misses, and its peers leave out what was freed"
        assert again["hits"] > missed["hits"] + 20, "it is learnt anew"


def test_a_group_learns_by_default_and_gives_back(ranks: Ranks) -> None:
    for why, seconds in ranks.run("learn_device_cases.in_a_group", 200, timeout_s=120):
        print(why, seconds)
        assert any(each.startswith("b2b, mapped: ") for each in why)
        assert seconds < 2


def test_hosts_that_run_ahead_are_not_in_step(ranks: Ranks) -> None:
    for said, wrong in ranks.run("learn_device_cases.of", "hosts_run_ahead", 60, timeout_s=120):
        print(said)
        assert wrong == 0


def test_lanes_in_different_orders_do_not_wait_for_each_other(ranks: Ranks) -> None:
    print(ranks.run("learn_device_cases.of", "two_orders", 60, timeout_s=90))


def test_what_one_rank_cannot_map_is_staged_by_all(ranks: Ranks) -> None:
    for _, said in ranks.run("learn_device_cases.of", "one_cannot_map", timeout_s=90):
        assert "hits" not in said and "misses" not in said


def test_graphs_keep_their_addresses(ranks: Ranks) -> None:
    assert all(ranks.run("learn_device_cases.in_graphs", timeout_s=90))


def test_a_storm_with_expandable_segments(fresh_pool: type[Pool]) -> None:
    ranks = fresh_pool(environment=EXPANDABLE)
    found = ranks.run("learn_device_cases.of", "storm", 3, 200, timeout_s=120)
    assert sum(said["hits"] for said, _ in found) > 100


def test_what_calls_cost_the_host(ranks: Ranks) -> None:
    """Prints times; run it with ``-s``."""
    for nbytes in (1 << 20, 16 << 20):
        times = ranks.run("learn_device_cases.host_times", nbytes, 200, timeout_s=200)[0]
        for name, took in times.items():
            print(f"{nbytes >> 20:3} MiB {name:40} {took:8.1f} us")
        assert {"staged", "learns", "hit"} <= set(times)

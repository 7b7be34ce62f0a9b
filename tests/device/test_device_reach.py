"""Ordinary memory of GPUs that peers reach without staging: offered in each call, as CPU ranks do and captures, so that
every call maps."""

from __future__ import annotations

import pytest
from device_pool import Pool, Ranks

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "1"}


def test_every_kind_at_odd_sizes_and_offsets(ranks: Ranks) -> None:
    for staging in ranks.run("reach_device_cases.of", "every_kind", 7, (1, 67, 4096, 3 << 20)):
        assert staging["some"] > 0, "what one rank cannot offer is staged"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_tensors_that_come_and_go(ranks: Ranks, seed: int) -> None:
    for left, mapped in ranks.run("reach_device_cases.of", "storm", seed, 300, timeout_s=120):
        assert mapped > 20
        assert left <= 40, "peers let go of what its owner has freed"


def test_lists_batches_and_uneven_exchanges(ranks: Ranks) -> None:
    assert min(ranks.run("reach_device_cases.of", "lists", 3, 40)) > 20


def test_nothing_is_left_mapped(ranks: Ranks) -> None:
    for during, then, after in ranks.run("reach_device_cases.of", "nothing_is_left"):
        assert during > 0 and then <= during and after == 0


def test_a_rank_that_cannot_map(ranks: Ranks) -> None:
    for rank, (how, refused) in enumerate(ranks.run("reach_device_cases.of", "one_cannot_map")):
        assert how == ("mapped" if rank == 1 else "staged: rank 1 cannot map it: planted") and refused > 0


def test_what_a_communicator_says_of_tensors(ranks: Ranks) -> None:
    for symmetric, mapped, staged, empty, off in ranks.run("reach_device_cases.of", "answers"):
        assert [symmetric, mapped, empty] == ["symmetric", "mapped", "mapped: it has no bytes"]
        assert "does not export" in staged and off == "staged: Config.map_memory is not on"


def test_asynchronous_calls_wait_for_nobody(ranks: Ranks) -> None:
    ranks.run("reach_device_cases.of", "asynchronous_ones_wait_for_nobody")


def test_graphs_keep_their_addresses(ranks: Ranks) -> None:
    ranks.run("reach_device_cases.in_graphs", 20)


def test_equal_calls_on_memory_that_came_again(ranks: Ranks) -> None:
    assert all(ranks.run("reach_device_cases.same_again", 12))


def test_expandable_segments_are_mapped_piece_by_piece(fresh_pool: type[Pool]) -> None:
    ranks = fresh_pool(environment=EXPANDABLE)
    for rounds in ranks.run("reach_device_cases.pieces_come_and_go", 12):
        assert min(nbytes for nbytes, _, _ in rounds) >= 2 * (3 << 20) * 4
        assert max(mapped for _, _, mapped in rounds) <= 12, "what is gone is unmapped"
    assert all(ranks.run("reach_device_cases.same_again", 12))
    assert max(ranks.run("reach_device_cases.all_is_given_back")) < 20 << 20, "less than a piece"


def test_every_case_with_expandable_segments(fresh_pool: type[Pool]) -> None:
    ranks = fresh_pool(environment=EXPANDABLE)
    for staging in ranks.run("reach_device_cases.of", "every_kind", 7, (1, 67, 4096, 3 << 20)):
        # Among GPUs of their own an all-reduce may be `two_shot_push`, which has staging for whatever memory.
        assert staging["all"] <= 4 * (3 << 20) < staging["some"]
    for left, mapped in ranks.run("reach_device_cases.of", "storm", 5, 300, timeout_s=120):
        assert mapped > 20 and left <= 60
    for during, then, after in ranks.run("reach_device_cases.of", "nothing_is_left"):
        assert during > 0 and then <= during and after == 0
    ranks.run("reach_device_cases.in_graphs", 5)


def test_expandable_segments_without_descriptors_are_staged(fresh_pool: type[Pool]) -> None:
    ranks = fresh_pool(environment={**EXPANDABLE, "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0"})
    for why, right in ranks.run("reach_device_cases.reasons"):
        assert right and why.startswith("staged: ") and "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1" in why


def test_pools_of_torch(ranks: Ranks) -> None:
    for said in ranks.run("foreign_device_cases.in_pools_of_torch", 8, timeout_s=120):
        assert set(said) == {"mapped"}


def test_memory_of_graphs(ranks: Ranks) -> None:
    for said in ranks.run("foreign_device_cases.in_memory_of_graphs", 4, timeout_s=120):
        assert set(said) == {"mapped"}


@pytest.mark.parametrize("mode", ["always", "learn"])
def test_memory_of_other_libraries(ranks: Ranks, mode: str) -> None:
    for rounds in ranks.run("foreign_device_cases.of_other_libraries", mode, 4, timeout_s=120):
        for *raw, pooled in rounds:
            assert all(said.startswith("mapped") for said in raw), raw
            assert pooled.startswith("staged: the driver does not export its memory")


@pytest.mark.parametrize("where", ["pool", "graph", "another library"])
def test_addresses_in_such_memory_are_learnt(ranks: Ranks, where: str) -> None:
    for said in ranks.run("foreign_device_cases.learnt", where, 120, timeout_s=120):
        print(where, said)
        assert said["hits"] > 60 and "misses" not in said


def test_such_memory_with_expandable_segments(fresh_pool: type[Pool]) -> None:
    ranks = fresh_pool(environment=EXPANDABLE)
    for case in ("in_pools_of_torch", "in_memory_of_graphs"):
        for said in ranks.run(f"foreign_device_cases.{case}", 4, timeout_s=120):
            assert set(said) == {"mapped"}, case

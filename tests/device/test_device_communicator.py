"""The communicator on GPUs: every collective, dtype, place and launch; order with streams; failures."""

from __future__ import annotations

import pytest
import torch
from device_pool import Pool, Ranks
from expected import MOVING_DTYPES, REDUCING_DTYPES

CASES = "communicator_cases."


@pytest.mark.parametrize("case", ["sweep", "sweep_on_stream"])
def test_moving_collectives(ranks: Ranks, case: str) -> None:
    ranks.run(CASES + case, "moving_sweep", (torch.bfloat16,), (1, 1023), timeout_s=120)


def test_every_dtype_moves(ranks: Ranks) -> None:
    ranks.run(CASES + "sweep_on_stream", "moving_sweep", MOVING_DTYPES, (37,), ("auto", "b2b"), timeout_s=150)


def test_reducing_collectives(ranks: Ranks) -> None:
    ranks.run(CASES + "sweep_on_stream", "reducing_sweep", REDUCING_DTYPES, (333, 70_001), timeout_s=150)


@pytest.mark.parametrize(
    "name",
    ["nothing_and_alone", "large_messages", "uneven", "places", "growing_staging", "versions", "asynchronous", "works"],
)
def test_what_cpu_ranks_do(ranks: Ranks, name: str) -> None:
    ranks.run(CASES + "sweep", name, timeout_s=120)


@pytest.mark.parametrize("case", ["loaded", "loaded_on_stream"])
@pytest.mark.parametrize("seed", range(2))
def test_programs_of_ones_own_next_to_collectives(ranks: Ranks, case: str, seed: int) -> None:
    ranks.run(CASES + case, "builders", seed, 200, timeout_s=150)


@pytest.mark.parametrize("slope", [1, 7])
def test_a_program_that_no_collective_is(ranks: Ranks, slope: int) -> None:
    ranks.run(CASES + "loaded", "handed_over", 100, slope)


def test_gathers_in_a_ring_with_and_without_entries(ranks: Ranks) -> None:
    ranks.run(CASES + "loaded", "gathers_in_a_ring", (1 << 20) + 3)


def test_a_program_of_ones_own_in_a_graph(ranks: Ranks) -> None:
    ranks.run(CASES + "loaded_in_a_graph", 100)


@pytest.mark.parametrize("seed", range(2))
def test_memory_that_comes_and_goes(ranks: Ranks, seed: int) -> None:
    found = ranks.run(CASES + "pooled_memory", "comes_and_goes", seed, 200, timeout_s=120)
    places, total, reserved = found[0]
    assert all(other == found[0] for other in found) and len(set(places)) < len(places) and reserved < total / 2


@pytest.mark.parametrize(("name", "steps"), [("a_loop_that_allocates", (50,)), ("bounded", ())])
def test_what_a_pool_gives_out(ranks: Ranks, name: str, steps: tuple[int, ...]) -> None:
    ranks.run(CASES + "pooled_memory", name, *steps)


def test_captured_memory_stays(ranks: Ranks) -> None:
    ranks.run(CASES + "captured_memory_stays")


@pytest.mark.parametrize("seed", range(3))
def test_slices_go_as_they_come(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "in_slices", "gathered", seed, 200, timeout_s=120)


@pytest.mark.parametrize("seed", range(4))
def test_slices_in_graphs(ranks: Ranks, seed: int) -> None:
    for told in ranks.run(CASES + "in_slices", "in_graphs", seed, 60, timeout_s=120):
        assert len(told) == 3
        assert "trigger_from_host" in told[0] and "trigger_by_kernel" in told[1]
        assert "not fired in this capture" in told[2]


def test_parts_are_read_as_they_come(ranks: Ranks) -> None:
    for told in ranks.run(CASES + "in_slices", "read_as_it_comes", 60, timeout_s=120):
        assert len(told) == 2 and "not under way" in told[0] and "allowed=[0" in told[1], told


def test_triggers_that_are_fired_in_the_wrong_way(ranks: Ranks) -> None:
    for told in ranks.run(CASES + "in_slices", "misused"):
        assert len(told) == 6 and "nothing" not in told, told


@pytest.mark.parametrize("how", ["raises", "sleeps"])
def test_a_rank_that_does_not_fire(ranks: Ranks, how: str) -> None:
    for kind, text, culprits in ranks.run(CASES + "in_slices", "left", how)[1:]:
        assert kind in ("PeerError", "PeerTimeoutError") and culprits == (0,), text


@pytest.mark.parametrize("seed", range(2))
def test_kernels_of_ones_own_next_to_collectives(ranks: Ranks, seed: int) -> None:
    launches = ranks.run(CASES + "own_kernel", "everything", seed, 300, timeout_s=150)
    assert len(set(launches)) == 1 and launches[0] > 150


def test_kernels_of_ones_own_that_are_refused(ranks: Ranks) -> None:
    for told in ranks.run(CASES + "own_kernel", "refused"):
        assert len(told) == 9 and "each program must call end" in told[8], told


@pytest.mark.parametrize("flag", [1, -1])
def test_a_signal_that_nobody_sends(ranks: Ranks, flag: int) -> None:
    for kind, text, culprits in ranks.run(CASES + "own_kernel", "waits_in_vain", flag, None):
        assert kind == "PeerTimeoutError" and "waits_for" in text and culprits, text


def test_a_kernel_of_ones_own_in_a_graph(ranks: Ranks) -> None:
    print(ranks.run(CASES + "own_kernel_in_a_graph", 100))


@pytest.mark.parametrize("seed", range(2))
def test_lanes_of_one_thread(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "in_lanes", "in_turn", seed, 200, timeout_s=120)


def test_memory_dropped_at_bad_moments(ranks: Ranks) -> None:
    ranks.run(CASES + "memory_dropped_at_bad_moments")


def test_two_communicators_interleaved(ranks: Ranks) -> None:
    ranks.run(CASES + "sweep", "interleaved", ())


@pytest.mark.parametrize("case", ["sweep", "sweep_on_stream"])
def test_a_thousand_calls_with_random_delays(ranks: Ranks, case: str) -> None:
    ranks.run(CASES + case, "many", 1000, timeout_s=120)


@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_back_to_back(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "random_sizes", seed, 200, timeout_s=120)


def test_graphs_replay_between_eager_calls(ranks: Ranks) -> None:
    ranks.run(CASES + "captured", 20, timeout_s=120)


@pytest.mark.parametrize("case", ["sweep", "sweep_on_stream"])
@pytest.mark.parametrize("seed", range(2))
def test_calls_of_every_kind_in_turn(ranks: Ranks, case: str, seed: int) -> None:
    ranks.run(CASES + case, "of_every_kind", seed, 500, timeout_s=150)


def test_staging_cannot_grow_in_a_capture(ranks: Ranks) -> None:
    assert all("make the call once before the capture" in text for text in ranks.run(CASES + "staging_in_a_capture"))


def test_calls_on_changing_streams(ranks: Ranks) -> None:
    ranks.run(CASES + "streams_in_turn")


def test_tensors_dropped_during_asynchronous_calls(ranks: Ranks) -> None:
    ranks.run(CASES + "async_memory")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
def test_nccl_as_the_control_plane(ranks: Ranks) -> None:
    ranks.run(CASES + "nccl_control_plane", timeout_s=120)


def test_an_absent_peer(fresh_pool: type[Pool]) -> None:
    results = fresh_pool().run(CASES + "absent", timeout_s=60)
    for rank, (text, at_fault) in enumerate(results):
        if rank != 1:
            assert at_fault == (1,), text
            assert "rank 1" in text
            assert "all_gather" in text

"""Programs on GPUs: right bytes, eager and captured, in order with the caller's stream."""

from __future__ import annotations

import pytest
from device_pool import Pool, Ranks
from vendors import ONE_CHANNEL


def test_features_are_found_and_equal_on_all_ranks(ranks: Ranks) -> None:
    found = ranks.run("report_features")
    print("\n".join(found[0]))
    assert all(lines == found[0] for lines in found)


@pytest.mark.parametrize(
    ("kind", "scale", "misalign"),
    [
        ("all_gather", 7, 1),
        ("all_gather", 1_048_579, 3),
        ("all_gather", 5_000_011, 1),  # more than what shares the caller's stream
        ("all_to_all", 7, 1),
        ("all_to_all", 1_048_579, 3),
        ("broadcast", 300_007, 1),
        ("broadcast", 20_000_003, 1),  # several rounds of a relay
        ("scatter", 300_007, 1),
        ("gather", 300_007, 1),
    ],
)
def test_moving(ranks: Ranks, kind: str, scale: int, misalign: int) -> None:
    assert min(ranks.run("eager_and_graph", kind, scale, misalign)) > 0


@pytest.mark.parametrize(("scale", "misalign"), [(8, 4), (2_097_152, 0)])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_reducing(ranks: Ranks, kind: str, scale: int, misalign: int) -> None:
    assert min(ranks.run("eager_and_graph", kind, scale, misalign, timeout_s=100)) > 0


def test_every_reduction(ranks: Ranks) -> None:
    ranks.run("reductions", timeout_s=150)


def test_nan_spreads_through_every_reduction(ranks: Ranks) -> None:
    ranks.run("nan_spreads")


def test_prelaunched(ranks: Ranks) -> None:
    ranks.run("prelaunched")


def test_default_stream(ranks: Ranks) -> None:
    ranks.run("default_stream")


def test_a_thousand_back_to_back_with_random_delays(ranks: Ranks) -> None:
    ranks.run("thousand_with_delays", 1000)


def test_two_executors_interleaved(ranks: Ranks) -> None:
    ranks.run("two_parties")


def test_signals_as_copies(ranks: Ranks) -> None:
    ranks.run("signals_as_copies")


def test_sub_groups(ranks: Ranks) -> None:
    ranks.run("sub_groups")


def test_moving_collectives_launch_no_kernel(ranks: Ranks) -> None:
    assert ranks.run("kernels_of_moving_collectives") == [[]] * ranks.world_size


def test_one_hardware_channel_is_enough(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool(environment=ONE_CHANNEL)
    pool.run("eager_and_graph", "all_gather", 1_048_579, 0)
    pool.run("eager_and_graph", "all_to_all", 1_048_579, 0)

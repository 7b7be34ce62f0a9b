"""Symmetric memory that comes and goes, between CPU processes."""

from __future__ import annotations

import pooled
import pytest
from marks import long
from ranks import RankPool


@pytest.mark.parametrize(("world_size", "seed"), [(1, 1), long(2, 2), (3, 4), long(4, 5)])
def test_places_are_the_same_on_all_ranks_and_used_again(pool: RankPool, world_size: int, seed: int) -> None:
    found = pool.run(pooled.comes_and_goes, world_size, seed, 100)
    places, total, reserved = found[0]
    assert all(other == found[0] for other in found)
    assert len(set(places)) < len(places)
    assert reserved < total / 2


def test_a_loop_that_allocates_grows_nothing(pool: RankPool) -> None:
    pool.run(pooled.a_loop_that_allocates, 2, 30)


def test_no_more_than_is_allowed(pool: RankPool) -> None:
    for told in pool.run(pooled.bounded, 3):
        assert len(told) == 4, told
        assert all("allowed=8388608, Config.memory_bytes" in text for text in told[:2]), told
        assert told[2] == "8388608 of 8388608" and "different calls" in told[3], told

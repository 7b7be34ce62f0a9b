"""All-to-alls with a layout on GPUs: pitched copies of two and three dimensions among GPUs, eager and in graphs."""

from __future__ import annotations

import pytest
from device_pool import Ranks

CASES = "reshard_device_cases."


@pytest.mark.parametrize("seed", range(2))
def test_random_shapes(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "of", "shapes", seed, 40, timeout_s=150)


def test_three_tensors_in_one_call(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "lists", 3, 10, timeout_s=120)


def test_own_parts_stay(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "own_parts_stay")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_is_the_way_back(ranks: Ranks, compiled: bool) -> None:
    ranks.run(CASES + "of", "gradients", compiled, timeout_s=150)


def test_there_and_back_in_graphs(ranks: Ranks) -> None:
    assert set(ranks.run(CASES + "large", 6, timeout_s=150)) == {6 * 3 * 2 * 3}

"""All-to-alls that leave every rank's own part where it is, on GPUs: copies among GPUs, and none inside of one."""

from __future__ import annotations

import pytest
import torch
from device_pool import Ranks

CASES = "own_part_device_cases."
DTYPES = (torch.bfloat16, torch.uint8, torch.float64)


def test_own_parts_stay(ranks: Ranks) -> None:
    sizes = (1, 4099, 1 << 20)
    first, *others = ranks.run(CASES + "of", "equal_parts", DTYPES, sizes, timeout_s=150)
    assert first >= 4 * 2 * 3 * len(sizes) * len(DTYPES) and others == [first] * len(others)


@pytest.mark.parametrize("seed", range(2))
def test_in_every_form(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "of", "every_form", seed, 60, timeout_s=120)


def test_in_graphs(ranks: Ranks) -> None:
    ranks.run(CASES + "in_graphs", 6)


def test_what_is_refused(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "refused")


def test_large_ones_are_copied_in_rows(ranks: Ranks) -> None:
    ranks.run(CASES + "large_parts", timeout_s=120)

"""All-to-alls that leave every rank's own part where it is, on GPUs: copies among GPUs, and none inside of one."""

from __future__ import annotations

import pytest
import torch
from device_pool import Ranks

CASES = "own_part_device_cases."
DTYPES = (torch.bfloat16, torch.uint8, torch.float64)


@pytest.mark.parametrize("mapped", [False, True, "learn"])
def test_own_parts_stay(ranks: Ranks, mapped: bool | str) -> None:
    sizes = (1, 4099, 1 << 20) if not mapped else (1 << 20,)
    dtypes = DTYPES if not mapped else DTYPES[:1]
    first, *others = ranks.run(CASES + "of", "equal_parts", dtypes, sizes, mapped, timeout_s=150)
    assert first >= 5 * 2 * 3 * len(sizes) * len(dtypes) and others == [first] * len(others)


@pytest.mark.parametrize("seed", range(2))
def test_in_every_form(ranks: Ranks, seed: int) -> None:
    ranks.run(CASES + "of", "every_form", seed, 60, timeout_s=120)


def test_in_graphs(ranks: Ranks) -> None:
    ranks.run(CASES + "in_graphs", 6)


def test_what_is_refused(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "refused")


def test_large_ones_are_copied_in_rows(ranks: Ranks) -> None:
    ranks.run(CASES + "large_parts", timeout_s=120)


def test_large_ones_that_are_read_ahead(ranks: Ranks) -> None:
    for went_ahead in ranks.run(CASES + "large_parts_learnt", 160, timeout_s=120):
        assert went_ahead > 50

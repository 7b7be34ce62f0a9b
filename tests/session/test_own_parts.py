"""All-to-alls that leave every rank's own part where it is, between real processes."""

from __future__ import annotations

import own_part_cases
import pytest
import torch
from expected import MOVING_DTYPES
from marks import long
from ranks import RankPool


@pytest.mark.parametrize("n", [1, long(2), 3, long(8)])
def test_own_parts_stay(pool: RankPool, n: int) -> None:
    dtypes = tuple(MOVING_DTYPES) if n == 2 else (torch.bfloat16,)
    sizes = (1, 1023) if n == 3 else (37,)
    checked = pool.run(own_part_cases.equal_parts, n, dtypes, sizes)
    assert checked == [4 * 2 * 3 * len(dtypes) * len(sizes)] * n


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (5, 2)])
def test_in_every_form(pool: RankPool, n: int, seed: int) -> None:
    pool.run(own_part_cases.every_form, n, seed, 20)


def test_what_is_refused(pool: RankPool) -> None:
    pool.run(own_part_cases.refused, 2)


def test_ranks_that_differ(pool: RankPool) -> None:
    assert all("own parts stay" in text for text in pool.run(own_part_cases.ranks_that_differ, 3))

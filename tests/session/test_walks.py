"""The way of a call through the library: how many of its files and functions a call enters.

The bounds only fall: a change that makes a way longer says in tools/house.toml what it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import walk_cases
from ranks import RankPool

WAYS: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
    "all_gather on the path of GPUs": (walk_cases.all_gather, (60, 388), (2, 3)),
    "dist.all_reduce on the path of GPUs": (walk_cases.all_reduce_on_gpus, (86, 600), (6, 8)),
    "dist.all_reduce between CPU ranks": (walk_cases.all_reduce, (74, 512), (25, 72)),
}
"""Most files and functions of a first call, which vary by a few with the waits in it, and of one that comes again."""


@pytest.mark.parametrize("way", WAYS)
def test_a_call_enters_no_more_than_it_did(pool: RankPool, way: str) -> None:
    case, first, again = WAYS[way]
    for found in pool.run(case, 2, 5):
        assert found[0][0] <= first[0] and found[0][1] <= first[1], found
        assert min(each[0] for each in found) <= again[0] and min(each[1] for each in found) <= again[1], found

"""Pools: any operation's results as symmetric memory, between real processes."""

from __future__ import annotations

import pool_cases
from ranks import RankPool

NEW = "mapped: its place in the pool has not been compared with the peers' yet"


def test_results_of_operations_are_symmetric(pool: RankPool) -> None:
    for said in pool.run(pool_cases.results_of_operations, 3):
        assert said[:3] == [NEW, "symmetric", "symmetric"]

"""Calls at new addresses between ranks: CPU ranks that take the path of GPUs, on tensors that are new each time."""

from __future__ import annotations

import collections

import new_address_cases
import pytest
from new_address_cases import KINDS, LOADED, WORKED_OUT
from ranks import RankPool


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_a_storm_of_new_tensors(pool: RankPool, n: int, seed: int) -> None:
    found = sum(
        (collections.Counter(said) for said in pool.run(new_address_cases.storm, n, seed, 250)),
        start=collections.Counter(),
    )
    assert found["at"] > 50 * n, "most are moved"
    assert found["prepare"] < 200 * n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
def test_a_shape_is_worked_out_and_loaded_once(pool: RankPool, kind: str, variant: str) -> None:
    for said, events, remembered in pool.run(new_address_cases.same_shape, 2, kind, variant, 30):
        assert not said.keys() & (WORKED_OUT | LOADED), said
        assert said["at"] >= 20, "some addresses may come again"
        assert events == 0 and remembered <= 1, "and little is kept of it"


def test_programs_in_turn_are_loaded_once(pool: RankPool) -> None:
    for said, events, _ in pool.run(new_address_cases.same_shape, 2, "all_gather", "alternating", 30):
        assert not said.keys() & (WORKED_OUT | LOADED), said
        assert 20 <= said["at"] <= 30, "that of the turn alone"
        assert events == 0

"""Calls at new addresses between ranks: CPU ranks that take the path of GPUs, on tensors that are new each time."""

from __future__ import annotations

import collections

import new_address_cases
import pytest
from marks import long
from new_address_cases import KINDS, LOADED, WORKED_OUT
from ranks import RankPool


@pytest.mark.parametrize("native", [False, True], ids=["Python", "C"])
@pytest.mark.parametrize(("n", "seed"), [(2, 1), long(3, 2), long(4, 3)])
def test_a_storm_of_new_tensors(pool: RankPool, n: int, seed: int, native: bool) -> None:
    found: collections.Counter[str] = collections.Counter()
    for said in pool.run(new_address_cases.storm, n, seed, 400, native):
        found.update(said)
    assert found["at"] + found["by C"] > 100 * n, "many are moved"
    assert found["prepare"] < 300 * n
    assert (found["by C"] > 20 * n) == native, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
def test_a_shape_is_worked_out_and_loaded_once(pool: RankPool, kind: str, variant: str) -> None:
    for said, events, remembered in pool.run(new_address_cases.same_shape, 2, kind, variant, 30, False):
        assert not said.keys() & (WORKED_OUT | LOADED), said
        assert said["at"] >= 20, "some addresses may come again"
        assert events == 0 and remembered <= 3, "and little is kept of it"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gather", "scatter")])
@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
def test_a_known_shape_is_made_in_c(pool: RankPool, kind: str, variant: str) -> None:
    for said, _, _ in pool.run(new_address_cases.same_shape, 2, kind, variant, 30, True):
        assert said["by C"] >= 20, said


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_known_shape_in_place_is_made_in_c(pool: RankPool, kind: str) -> None:
    for said, _, _ in pool.run(new_address_cases.same_shape, 2, kind, "b2b", 30, True, True):
        assert said["by C"] >= 20, said


MIXED = [
    *((kind, "b2b") for kind in ("all_gather", "all_to_all", "broadcast", "scatter")),
    *((kind, "striped") for kind in ("all_gather", "all_to_all")),
]


@pytest.mark.parametrize(("kind", "variant"), MIXED)
def test_symmetric_memory_is_another_shape(pool: RankPool, kind: str, variant: str) -> None:
    assert all(pool.run(new_address_cases.memories_in_turn, 2, kind, variant, 60)), "compiled code made some"


def test_what_is_closed_is_in_no_circle(pool: RankPool) -> None:
    assert all(pool.run(new_address_cases.released_at_once, 2))

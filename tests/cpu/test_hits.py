"""Calls that go ahead, made by compiled code: between CPU ranks that take the path of GPUs."""

from __future__ import annotations

import collections
import sys

import hit_cases
import pytest
from ranks import RankPool

from sidelane.collectives.ahead import INPUT_ELSEWHERE, OUTPUT_UNKNOWN
from sidelane.collectives.pattern import LEAST_ALIKE
from sidelane.collectives.repeat import LOOK_EVERY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


def test_a_model_waits_while_it_is_learnt(pool: RankPool) -> None:
    layers, kinds, steps = 2, 3, 8
    learnt = (layers + max(layers, LEAST_ALIKE)) * kinds
    found = pool.run(hit_cases.of, 2, "what_comes_again", layers)
    assert found == [(learnt, layers * kinds * steps - learnt, 0)] * 2


@pytest.mark.parametrize(("n", "steps"), [(2, 60), (3, 40)])
def test_a_storm_of_tensors_that_are_replaced(pool: RankPool, n: int, steps: int) -> None:
    found = pool.run(hit_cases.of, n, "storm", n, steps)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert total["hits"] > n * steps and total["waits"] > 0
    assert total["by C"] > 0
    assert total[INPUT_ELSEWHERE] > 0 and total[OUTPUT_UNKNOWN] > 0, total
    assert [left for _, left in found] == [0] * n, "what is mapped goes with the communicator"


@pytest.mark.parametrize("period", [1, 3])
def test_most_hits_are_made_by_compiled_code(pool: RankPool, period: int) -> None:
    for native, numbers in pool.run(hit_cases.made_by, 2, period, 200):
        learnt = period + max(period, LEAST_ALIKE)
        assert native == [False] * (learnt + period) + [True] * (200 - learnt - period)
        assert 200 <= numbers <= 203, "and such that map"


BEHIND = {
    # The rank that has missed, and all others, make the next calls in C until they hear of it and wait once.
    "another address": [[True] * 3 + [False] * 2 + [True] * 2] * 2,
    "another stream": [[False, True, True] * 2] * 2,
    "a capture": [[True] * 6] * 2,
    "memory": [[True] * 3] * 2,
    "closed": [[], []],
}


@pytest.mark.parametrize("what", [*BEHIND, "freed"])
def test_what_is_not_as_it_was_goes_back_to_python(pool: RankPool, what: str) -> None:
    for rank, (before, during, behind) in enumerate(pool.run(hit_cases.goes_back, 2, what)):
        assert before[-4:] == [True] * 4
        assert during == [what in ("another address", "freed") and rank == 1]
        if what == "freed":
            assert behind[-1], "it is learnt anew"
        else:
            assert behind == BEHIND[what][rank]


def test_nobody_runs_further_ahead_than_the_lag(pool: RankPool) -> None:
    found = pool.run(hit_cases.one_is_late, 2, 300)
    assert 2 < found[0][0] <= 9
    assert min(made for _, made in found) > 100


@pytest.mark.parametrize("n", [2, 3])
def test_what_hosts_that_run_ahead_have_read_is_right(pool: RankPool, n: int) -> None:
    for said, wrong in pool.run(hit_cases.hosts_run_ahead, n, n, 600):
        assert wrong == 0
        assert (
            said["by C"] > 50 and said["waits"] > 0 and said.get(INPUT_ELSEWHERE, 0) + said.get(OUTPUT_UNKNOWN, 0) > 0
        )


def test_compiled_code_has_python_look_for_freed_memory(pool: RankPool) -> None:
    for calls, made in pool.run(hit_cases.lets_go, 2):
        assert 4 < calls <= 3 * LOOK_EVERY + 4, "a look or three, and the lag"
        assert made >= calls - 4

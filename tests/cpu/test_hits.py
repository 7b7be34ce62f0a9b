"""Calls that go ahead, made by compiled code: between CPU ranks that take the path of GPUs."""

from __future__ import annotations

import collections
import sys

import hit_cases
import pytest
from ranks import RankPool

from sidelane.collectives.ahead import INPUT_ELSEWHERE, OUTPUT_UNKNOWN
from sidelane.collectives.pattern import LEAST_ALIKE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


def test_a_model_waits_while_it_is_learnt(pool: RankPool) -> None:
    layers, kinds, steps = 2, 3, 8
    learnt = (layers + max(layers, LEAST_ALIKE)) * kinds
    found = pool.run(hit_cases.of, 2, "what_comes_again", layers)
    assert found == [(learnt, layers * kinds * steps - learnt, 0)] * 2


@pytest.mark.parametrize(("n", "steps"), [(2, 60), (3, 40)])
def test_a_storm_of_tensors_that_are_replaced(pool: RankPool, n: int, steps: int) -> None:
    found = pool.run(hit_cases.of, n, "storm", n, steps)
    print(found)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert total["hits"] > n * steps and total["waits"] > 0
    assert total["by C"] > 0
    assert total[INPUT_ELSEWHERE] > 0 and total[OUTPUT_UNKNOWN] > 0, total
    assert [left for _, left in found] == [0] * n, "what is mapped goes with the communicator"

"""Ordinary tensors whose addresses come again: ranks that wait for no peer's host, between real processes."""

from __future__ import annotations

import collections
import sys

import ahead_cases
import pytest
from ranks import RankPool

from sidelane.collectives.ahead import INPUT_ELSEWHERE, OUTPUT_UNKNOWN
from sidelane.collectives.pattern import LEAST_ALIKE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


def test_a_model_waits_while_it_is_learnt(pool: RankPool) -> None:
    layers, kinds, steps = 2, 3, 8
    learnt = (layers + max(layers, LEAST_ALIKE)) * kinds
    assert pool.run(ahead_cases.what_comes_again, 2, layers) == [(learnt, layers * kinds * steps - learnt, 0)] * 2


@pytest.mark.parametrize("n", [4, 8])
def test_many_ranks_go_ahead_and_some_miss(pool: RankPool, n: int) -> None:
    found = pool.run(ahead_cases.storm, n, n, 12)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert total["hits"] > n and total[INPUT_ELSEWHERE] > 0, total
    assert [left for _, left in found] == [0] * n, "what is mapped goes with the communicator"


@pytest.mark.parametrize(("n", "steps"), [(2, 60), (3, 40)])
def test_a_storm_of_tensors_that_are_replaced(pool: RankPool, n: int, steps: int) -> None:
    found = pool.run(ahead_cases.storm, n, n, steps)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert total["hits"] > n * steps and total["waits"] > 0
    assert total[INPUT_ELSEWHERE] > 0 and total[OUTPUT_UNKNOWN] > 0, total
    assert [left for _, left in found] == [0] * n, "what is mapped goes with the communicator"


def test_a_storm_in_memory_of_several_pieces(pool: RankPool) -> None:
    found = pool.run(ahead_cases.storm_of_pieces, 2, 5, 40)
    assert sum(said["hits"] for said in found) > 50 and sum(said.get(INPUT_ELSEWHERE, 0) for said in found) > 0


def test_what_is_written_right_behind_a_call(pool: RankPool) -> None:
    for said, wrong in pool.run(ahead_cases.hosts_run_ahead, 2, 80):
        assert wrong == 0 and said["hits"] > 20


@pytest.mark.parametrize(
    ("how", "debug"),
    [("stays away", False), ("refuses", False), ("refuses", True), ("makes another", False), ("makes another", True)],
)
def test_a_rank_that_does_not_make_the_call_is_named(pool: RankPool, how: str, debug: bool) -> None:
    found = pool.run(ahead_cases.goes_wrong, 3, how, debug)
    for rank in (0, 2):
        name, ranks, then = found[rank]
        if name == "MismatchError":  # who compares has both calls
            assert how == "makes another"
        else:
            assert (name, ranks) == ("PeerTimeoutError" if how == "stays away" else "PeerError", (1,))
        assert then == "CommunicatorClosedError", "what the ranks expect is not the same any more"
    assert found[1][2] == (
        "" if how == "stays away" else "PeerError" if how == "refuses" else "CommunicatorClosedError"
    )


@pytest.mark.parametrize("who", ["one", "all"])
def test_calls_that_were_refused_hold_nobody_up(pool: RankPool, who: str) -> None:
    # A rank that refuses begins nothing: more refusals in a row than a rank may be behind are no rank that is behind.
    found = pool.run(ahead_cases.goes_on_behind_refusals, 3, who, 40)
    for rank, (seconds, refused, before, behind) in enumerate(found):
        assert seconds < 20, "the time-out is 30 s"
        assert refused == ["ValueError" if who == "all" or rank == 1 else "PeerError"]
        assert before > 50 and behind == 100

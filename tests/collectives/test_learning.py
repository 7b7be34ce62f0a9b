"""Ordinary tensors whose addresses come again, found out by ranks of which no host waits, between real processes."""

from __future__ import annotations

import collections
import sys
from collections import Counter
from datetime import timedelta
from typing import Any

import learn_cases
import pytest
from marks import long
from ranks import RankPool

from sidelane import Config
from sidelane.config import override
from sidelane.integrations.dispatch import settings_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


def check_given_back(rank: int, found: learn_cases.GivenBack) -> None:
    """Freed memory is back soon; its owner misses, and its peers go ahead without it."""
    seconds, before, missed, again = found
    assert seconds < 10, "it takes half a second where there is a processor"
    counts = [Counter(each) for each in (before, missed, again)]
    assert before["hits"] > 50 and "misses" not in before
    key = "misses" if rank == 0 else "hits"
    assert counts[1][key] - counts[0][key] == 5 and counts[1]["staged"] == counts[0]["staged"]
    assert counts[2]["hits"] > counts[1]["hits"] + 20, "it is learnt anew"


def test_a_model_goes_ahead_once_its_addresses_have_come_again(pool: RankPool) -> None:
    layers, kinds, steps = 2, 3, 40
    found = pool.run(learn_cases.what_comes_again, 2, layers, steps)
    assert found[0] == found[1], "all ranks do alike, and nobody misses"
    assert found[0]["hits"] > layers * kinds * steps / 2 and "misses" not in found[0]


def test_lists_go_ahead_and_miss_if_one_of_their_tensors_lies_elsewhere(pool: RankPool) -> None:
    for rank, (said, ahead) in enumerate(pool.run(learn_cases.lists_come_again, 2, "all_gather", 100)):
        assert said["hits"] > 20 and said.get("misses", 0) == rank
        assert ahead == [True, rank == 0, True]


def test_sizes_that_never_come_again_are_forgotten_on_all_ranks_alike(pool: RankPool) -> None:
    first, *others = pool.run(learn_cases.sizes_between, 3, 60, 200)
    said, known = first
    assert others == [first] * 2 and known <= 60, "beside the two that come again there were 200"
    assert said["hits"] > 100 and "misses" not in said


@pytest.mark.parametrize("n", [4, long(8)])
def test_many_ranks_go_ahead_alike(pool: RankPool, n: int) -> None:
    found = pool.run(learn_cases.what_comes_again, n, 1, 50)
    assert found == found[:1] * n and found[0]["hits"] > 0 and "misses" not in found[0]


@pytest.mark.parametrize(("n", "steps"), [long(2, 120), long(3, 80), (3, 40)])
def test_a_storm_of_tensors_that_are_replaced(pool: RankPool, n: int, steps: int) -> None:
    found = pool.run(learn_cases.storm, n, n, steps)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert total["hits"] > n * steps / 2 and total["misses"] > 0, total
    assert [left for _, left in found] == [0] * n, "what is mapped goes with the communicator"


def test_a_storm_in_memory_of_several_pieces(pool: RankPool) -> None:
    found = pool.run(learn_cases.storm_of_pieces, 2, 5, 60)
    assert sum(said["hits"] for said in found) > 50 and sum(said.get("misses", 0) for said in found) > 0


@pytest.mark.parametrize("n", [2, long(3)])
def test_freed_memory_is_given_back_without_a_call(pool: RankPool, n: int) -> None:
    found = pool.run(learn_cases.gives_back, n, 700)
    for rank, given_back in enumerate(found):
        check_given_back(rank, given_back)


def test_peers_map_no_more_than_the_limit(pool: RankPool) -> None:
    for first, second in pool.run(learn_cases.is_limited, 2, 4096):
        assert "no host waits" in first and "no host waits" not in second


def test_a_group_learns_and_says_so(pool: RankPool) -> None:
    for why in pool.run(learn_cases.in_a_group, 2, 120):
        assert any(each.startswith("b2b, mapped: ") for each in why) and len(why) > 1, why


SETTINGS = [(None, "cuda", False, "learn"), (None, "cpu", False, None), (None, "cuda", True, None)]


@pytest.mark.parametrize(("asked", "device", "spans", "found"), [*SETTINGS, (False, "cuda", False, False)])
def test_groups_on_gpus_learn_unless_told_otherwise(asked: Any, device: str, spans: bool, found: Any) -> None:
    with override(Config(map_memory=asked)):
        assert settings_for(device, timedelta(seconds=5), spans=spans) == Config(timeout_s=5, map_memory=found)


def test_hosts_that_run_ahead_are_not_in_step(pool: RankPool) -> None:
    for said, wrong in pool.run(learn_cases.hosts_run_ahead, 2, 30):
        assert wrong == 0 and said["hits"] > 50 and said["staged"] > 0


def test_lanes_in_different_orders_do_not_wait_for_each_other(pool: RankPool) -> None:
    for said in pool.run(learn_cases.two_orders, 3, 100):
        assert said["hits"] > 0


def test_what_one_rank_cannot_map_is_staged_by_all(pool: RankPool) -> None:
    for rank, (how, said) in enumerate(pool.run(learn_cases.one_cannot_map, 3)):
        assert "hits" not in said and "misses" not in said
        assert how == "staged: rank 1 cannot map it: planted" if rank != 1 else how.startswith("mapped")


@pytest.mark.parametrize("how", ["stays away", "refuses", "makes another"])
def test_a_rank_that_does_not_make_the_call_is_named(pool: RankPool, how: str) -> None:
    found = pool.run(learn_cases.goes_wrong, 3, how)
    for rank in (0, 2):
        name, ranks = found[rank]
        if name == "MismatchError":
            assert how == "makes another"
        else:
            assert (name, ranks) == ("PeerTimeoutError" if how == "stays away" else "PeerError", (1,))


@pytest.mark.parametrize("who", ["one", "all"])
def test_calls_that_were_refused_hold_nobody_up(pool: RankPool, who: str) -> None:
    # They are no lessons, on any rank.
    found = pool.run(learn_cases.goes_on_behind_refusals, 3, who, 40)
    for rank, (seconds, refused, before, behind) in enumerate(found):
        assert seconds < 20, "the time-out is 30 s"
        assert refused == ["ValueError" if who == "all" or rank == 1 else "PeerError"]
        assert before > 50 and behind > 50

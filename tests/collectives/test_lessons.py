"""Lessons, made by compiled code: between CPU ranks that take the path of GPUs."""

from __future__ import annotations

import collections
import sys

import lesson_cases
import pytest
from learn_cases import LEARNING
from marks import long
from ranks import RankPool
from reach_cases import MAPPING
from test_learning import check_given_back

from sidelane.collectives.learning.board import LAG, RING, WINDOW
from sidelane.config import COMPUTE, NOTHING, Config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


@pytest.mark.parametrize("period", [1, long(5), 25])
def test_what_comes_again_is_made_by_compiled_code(pool: RankPool, period: int) -> None:
    for native, ahead, numbers in pool.run(lesson_cases.made_by, 2, period, 200):
        assert all(native[-100:]) and all(ahead[-100:])
        assert numbers == 200 + 10 + lesson_cases.SETTLED


@pytest.mark.parametrize("python_calls", [(3, 300), (250, 20), long((100, 101))])
def test_ranks_need_not_have_compiled_code_at_the_same_time(pool: RankPool, python_calls: tuple[int, int]) -> None:
    for native, ahead, numbers in pool.run(lesson_cases.compiled_late, 2, python_calls, 400):
        assert all(native[-50:]) and all(ahead[-300:])
        assert numbers == 400 + 10 + lesson_cases.SETTLED


def test_a_model_goes_ahead_once_its_addresses_have_come_again(pool: RankPool) -> None:
    found = pool.run(lesson_cases.of, 2, "what_comes_again", 2, 40)
    assert found[0]["hits"] == found[1]["hits"] > 120 and "misses" not in found[0]
    assert found[0]["by C"] > 120


def test_lists_that_come_again_are_made_by_compiled_code(pool: RankPool) -> None:
    for said, ahead in pool.run(lesson_cases.of, 2, "lists_come_again", "all_to_all", 150):
        assert said["by C"] > 100 and said["hits"] > 50 and ahead[0]


@pytest.mark.parametrize(("n", "steps"), [long(2, 120), long(3, 80), (3, 40)])
def test_a_storm_of_tensors_that_are_replaced(pool: RankPool, n: int, steps: int) -> None:
    found = pool.run(lesson_cases.of, n, "storm", n, steps)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert total["hits"] > n * steps / 2 and total["misses"] > 0 and total["by C"] > n * steps, total
    assert [left for _, left in found] == [0] * n, "what is mapped goes with the communicator"


BEHIND = {
    "another stream": [False, True, True] * 2,
    "a capture": [True] * 6,
    "memory": [True] * 3,
    "closed": [],
}


@pytest.mark.parametrize("what", [*BEHIND, "another address", "freed"])
def test_what_is_not_as_it_was_goes_back_to_python(pool: RankPool, what: str) -> None:
    found = pool.run(lesson_cases.goes_back, 2, what)
    for rank, (before, during, behind, said) in enumerate(found):
        assert before == [True] * 4
        replaced = what in ("another address", "freed") and rank == 0
        assert during == ([] if what == "a capture" else [what in ("another address", "freed") and not replaced])
        misses = said.get("misses", 0)
        assert misses > 0 if what == "freed" and rank == 0 else misses == replaced, "new memory until it is heard of"
        if what in BEHIND:
            assert behind == BEHIND[what]
        else:
            assert all(behind[-WINDOW:]), "it is learnt anew"
    assert found[0][3]["hits"] + found[0][3].get("misses", 0) == found[1][3]["hits"]


def test_hosts_that_are_far_apart_are_not_in_step(pool: RankPool) -> None:
    found = pool.run(lesson_cases.one_is_late, 2, 800)
    assert found[0][0] > RING > LAG, "who has no room for a post goes on"
    for _, said in found:
        assert said["by C"] > 400 and said["staged"] > lesson_cases.SETTLED / 2 and said["hits"] > 100
        assert "misses" not in said


def test_nothing_goes_ahead_before_all_ranks_have_mapped_it(pool: RankPool) -> None:
    for before, said in pool.run(lesson_cases.slow_to_map, 2, 150):
        assert not any(before)
        assert said["hits"] > 0 and "misses" not in said


def test_freed_memory_is_given_back_without_a_call(pool: RankPool) -> None:
    for rank, given_back in enumerate(pool.run(lesson_cases.of, 2, "gives_back", 700)):
        check_given_back(rank, given_back)
        assert given_back[1]["by C"] > 100


def test_memory_that_is_freed_is_let_go_of(pool: RankPool) -> None:
    for rank, (calls, by_c) in enumerate(pool.run(lesson_cases.lets_go, 2)):
        assert 0 < calls < 12 * WINDOW
        assert rank == 0 or by_c > calls / 2, "who has news says them in Python"


@pytest.mark.parametrize("n", [2, long(3)])
def test_what_hosts_that_run_ahead_have_read_is_right(pool: RankPool, n: int) -> None:
    found = pool.run(lesson_cases.hosts_run_ahead, n, n, 600)
    total = sum((collections.Counter(said) for said, _ in found), collections.Counter[str]())
    assert [wrong for _, wrong in found] == [0] * n
    assert total["by C"] > 200 and total["hits"] > 200 and total["misses"] > 0, total


def test_what_never_comes_again_costs_nothing_soon(pool: RankPool) -> None:
    patience = 30
    for staged, by_c, made in pool.run(lesson_cases.gives_up, 2, patience, patience + LAG + 3 * WINDOW):
        assert patience < staged <= patience + LAG + WINDOW and by_c == 0
        assert made == [False, True, True, True, True], "as with map_memory=False"


def test_what_is_given_up_as_a_window_begins_is_no_lesson_any_more(pool: RankPool) -> None:
    """Seen on two H200s: one rank counted a lesson less, and staged a call in which the other one went ahead."""
    for by_c, ahead in pool.run(lesson_cases.gives_up_as_a_window_begins, 2, 30):
        assert all(by_c), "the test would prove nothing"
        assert ahead[-7 * WINDOW - 1] and not ahead[-1]


@pytest.mark.parametrize("config", [LEARNING, MAPPING], ids=["learnt", "mapped"])
def test_calls_that_go_ahead_know_what_runs_next_to_them(pool: RankPool, config: Config) -> None:
    for beside in (NOTHING, COMPUTE):
        assert pool.run(lesson_cases.alone_or_not, 2, config, beside) == [{beside == NOTHING}] * 2

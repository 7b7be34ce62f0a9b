"""Calls with lists of tensors between real processes: bytes against a reference, caching, refusals, mismatches."""

from __future__ import annotations

import list_cases
import pytest
from list_cases import MOVING, REDUCING
from marks import long
from ranks import RankPool


@pytest.mark.parametrize("n", [1, 2, 3, long(4)])
def test_lists_of_tensors_that_only_move(pool: RankPool, n: int) -> None:
    ran = pool.run(list_cases.lists, n, MOVING, n, 5)
    assert ran == [{"bcst", "swap"}] * n


@pytest.mark.parametrize("n", [2, 3])
def test_lists_of_tensors_to_reduce(pool: RankPool, n: int) -> None:
    first, *others = pool.run(list_cases.lists, n, REDUCING, n, 4)
    assert first <= {"b2b", "pcpy"}
    assert others == [first] * (n - 1), "auto chooses alike on all ranks"


def test_eight_ranks(pool: RankPool) -> None:
    pool.run(list_cases.lists, 8, MOVING[:1], 1, 2)


def test_the_same_as_torch_distributed(pool: RankPool) -> None:
    pool.run(list_cases.against_torch, 3)


def test_edges(pool: RankPool) -> None:
    pool.run(list_cases.edges, 3)


def test_a_repeated_call_plans_nothing(pool: RankPool) -> None:
    assert pool.run(list_cases.planned_once, 2) == [[1, 1, 2, 2]] * 2


@pytest.mark.parametrize("seed", range(2))
def test_lists_and_single_tensors_in_turn(pool: RankPool, seed: int) -> None:
    pool.run(list_cases.streams_of_calls, 3, seed, 60)


def test_what_is_refused(pool: RankPool) -> None:
    words = (
        "lists of tensors, but not both (value=Tensor next to a list; the parts of one collective are one tensor here)",
        "lists of tensors, but not both (value=Tensor next to a list; the parts of one collective are one tensor here)",
        "(number 1 in the lists)",
        "one length (value=2, 1)",
        "(number 0 in the lists)",
        "variant for lists (value='relay'",
        "variant for lists (value='one_shot_narrow'",
        "writes into the peers' outputs",
        "numbers 0 and 1 in the lists overlap",
        "numbers 0 and 1 in the lists overlap",
        "numbers 0 and 1 in the lists overlap",
        "dtype (value=bool",
        "tensors expected (value=list, allowed=torch.Tensor)",
        "tensors expected (value=list, allowed=torch.Tensor)",
        "tensors expected (value=list, allowed=torch.Tensor)",
        "tensors expected (value=list, allowed=torch.Tensor)",
    )
    for texts in pool.run(list_cases.refused, 2):
        assert len(texts) == len(words)
        for text, word in zip(texts, words, strict=True):
            assert word in text


@pytest.mark.parametrize("debug", [False, True])
def test_different_lists(pool: RankPool, debug: bool) -> None:
    for texts in pool.run(list_cases.different, 3, debug):
        assert "3 tensors" in texts[1] and "2 tensors" in texts[1]
        assert "int32" in texts[2] and "float32" in texts[2]


@pytest.mark.parametrize("n", [long(2), 3])
def test_batches_of_several_kinds(pool: RankPool, n: int) -> None:
    first, *others = pool.run(list_cases.batches, n, n, 12)
    assert first == {"b2b", "pcpy"}
    assert others == [first] * (n - 1)


def test_batches_that_are_refused(pool: RankPool) -> None:
    words = (
        "numbers 0 and 1 in the batch overlap",
        "numbers 0 and 1 in the batch overlap",
        "variant for lists (value='swap'",
        "(number 0 in the batch)",
        "tensors expected (value=int, allowed=torch.Tensor) (number 0 in the batch)",
        "by zero",
        "ranks made different calls",
    )
    for texts in pool.run(list_cases.refused_batches, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text

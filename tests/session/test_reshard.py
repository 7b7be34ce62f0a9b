"""All-to-alls with a layout between real processes: bytes against permute, all-to-all, permute; caching, refusals."""

from __future__ import annotations

import pytest
import reshard_cases
from marks import long
from ranks import RankPool


@pytest.mark.parametrize("n", [1, 2, 3, long(5), long(8)])
def test_random_shapes(pool: RankPool, n: int) -> None:
    pool.run(reshard_cases.shapes, n, n, 12)


def test_every_dtype(pool: RankPool) -> None:
    pool.run(reshard_cases.shapes, 2, 9, 17, True)


@pytest.mark.parametrize("n", [2, long(4)])
def test_three_tensors_in_one_call(pool: RankPool, n: int) -> None:
    pool.run(reshard_cases.lists, n, n, 8)


@pytest.mark.parametrize(("n", "heads", "positions"), [(2, 4, 6), (3, 8, 10), (4, 8, 16)])
def test_sequence_parallelism_there_and_back(pool: RankPool, n: int, heads: int, positions: int) -> None:
    pool.run(reshard_cases.there_and_back, n, heads, positions)


def test_own_parts_stay(pool: RankPool) -> None:
    pool.run(reshard_cases.own_parts_stay, 3)


def test_a_repeated_call_prepares_nothing(pool: RankPool) -> None:
    assert pool.run(reshard_cases.prepared_once, 2) == [[1, 1, 1, 2, 3]] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_is_the_way_back(pool: RankPool, compiled: bool) -> None:
    pool.run(reshard_cases.gradients, 2, compiled)


def test_what_is_refused(pool: RankPool) -> None:
    words = (
        "gather_dim (value=None, allowed=a whole number): scatter_dim and gather_dim go together",
        "gather_dim (value=1.5, allowed=a whole number",
        "scatter_dim (value=3, allowed=-3..2)",
        "scatter_dim and gather_dim must be two dimensions (value=1, -2)",
        "the same number of dimensions, 2 or more (input=[4, 6], output=[2, 8, 3])",
        "shape of input (value=[2, 4, 6] on rank 1 of 2, allowed=[2, 3, 6]); scatter_dim=2 by [3, 3]",
        "shape of input (value=[2, 4, 6] on rank",
        "input_split_sizes must be 2 sizes that add up to scatter_dim 2 (value=[6, 6], allowed sum=6)",
        "output_split_sizes (value='ab', allowed=2 whole numbers)",
        "one dtype",
        "must be contiguous",
        "must not overlap",
        "variant with scatter_dim and gather_dim (value='swap', allowed=auto, ",
        "(number 1 in the lists)",
        "lists of tensors, but not both",
        "ranks made different calls",
    )
    for texts in pool.run(reshard_cases.refused, 2):
        assert len(texts) == len(words)
        for text, word in zip(texts, words, strict=True):
            assert word in text


def test_what_the_function_refuses_on_one_rank_is_told_to_the_other(pool: RankPool) -> None:
    words = (
        "scatter_dim (value=3, allowed=-3..2)",
        "the same number of dimensions",
        "gather_length (value=-1, allowed=0",
    )
    for texts in pool.run(reshard_cases.functional_refused, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text


def test_tensors_that_are_conjugated_later(pool: RankPool) -> None:
    pool.run(reshard_cases.conjugated, 2)

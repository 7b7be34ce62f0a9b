"""Attention over sequences whose positions lie on several ranks, between real processes, against one rank's."""

from __future__ import annotations

import importlib.util
import itertools

import attention_cases
import pytest
from marks import long
from ranks import RankPool

from sidelane.ops import sequence_positions
from sidelane.ops.attention import repeats_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.mark.parametrize("n", [1, long(2), long(3), 4])
def test_ulysses(pool: RankPool, n: int) -> None:
    pool.run(attention_cases.ulysses, n, False)


@pytest.mark.long
def test_ulysses_compiled(pool: RankPool) -> None:
    pool.run(attention_cases.ulysses, 2, True)


def test_compiled_code_takes_any_length(pool: RankPool) -> None:
    pool.run(attention_cases.lengths_that_change, 2, 3)


def test_parts_of_one_length(pool: RankPool) -> None:
    pool.run(attention_cases.even_parts, 3)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("n", "length"), [(2, 9), long(3, 10)])
def test_a_model_of_transformers(pool: RankPool, n: int, length: int) -> None:
    pool.run(attention_cases.in_a_model, n, length)


REFUSALS = (
    "dimensions of q (value=3, allowed=4",
    "dtype of k (value=torch.float64, allowed=torch.float32",
    "shapes of k and v (value=[1, 2, 2, 8], [1, 3, 2, 8], allowed=[1, 3, K, 8]",
    "heads of k and v (value=3, allowed=a divisor of q's 4)",
)


def test_what_is_refused_on_one_rank_is_told_to_the_others(pool: RankPool) -> None:
    words = (
        *(*REFUSALS, "positions of rank 1 (value=3, allowed=5 of sequence_length=10)", "scale (value='half'"),
        "heads of q (value=1, allowed=2 and more)",
    )
    for texts in pool.run(attention_cases.refused, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text


def test_every_position_belongs_to_one_rank() -> None:
    for length, n in ((0, 2), (13, 4), (3, 4), (64, 8)):
        parts = [sequence_positions(length, n, rank).tolist() for rank in range(n)]
        assert list(itertools.chain(*parts)) == list(range(length))


@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(40, 40, 3), (32, 8, 3), (8, 2, 5), (12, 1, 8), (40, 10, 4)])
def test_the_busiest_rank_has_the_fewest_heads(heads: int, kv_heads: int, n: int) -> None:
    most = {
        repeats: -(-kv_heads * repeats // n) * (heads // kv_heads // repeats)
        for repeats in range(1, heads // kv_heads + 1)
        if heads // kv_heads % repeats == 0 and kv_heads * repeats >= n
    }
    assert repeats_of(heads, kv_heads, n) == min(most, key=lambda repeats: (most[repeats], repeats))

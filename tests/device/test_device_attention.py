"""Attention over sequences in parts on GPUs: the cases of CPU ranks, and flash attention in graphs with gradients."""

from __future__ import annotations

import importlib.util

import pytest
from device_pool import Ranks

CASES = "attention_device_cases."


@pytest.mark.parametrize("compiled", [False, True])
def test_against_one_rank(ranks: Ranks, compiled: bool) -> None:
    ranks.run(CASES + "of", "ulysses", compiled, timeout_s=170)


def test_parts_of_one_length(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "even_parts")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_of_transformers(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "in_a_model", 13, timeout_s=120)


def test_what_one_rank_refuses_is_told_to_the_others(ranks: Ranks) -> None:
    for texts in ranks.run(CASES + "of", "refused"):
        assert len(texts) == 7


def test_forward_and_backward_in_graphs(ranks: Ranks) -> None:
    assert set(ranks.run(CASES + "captured", 4, timeout_s=170)) == {3 * 4}

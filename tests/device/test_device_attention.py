"""Attention over sequences in parts on GPUs: the cases of CPU ranks, and flash attention in graphs with gradients."""

from __future__ import annotations

import importlib.util

import pytest
from device_pool import Ranks

CASES = "attention_device_cases."


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_against_one_rank(ranks: Ranks, way: str, compiled: bool) -> None:
    ranks.run(CASES + "of", way, compiled, timeout_s=170)


def test_parts_of_one_length(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "even_parts")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("ring_order", [None, "zigzag"])
def test_a_model_of_transformers(ranks: Ranks, ring_order: str | None) -> None:
    ranks.run(CASES + "of", "in_a_model", 13, ring_order, timeout_s=120)


@pytest.mark.parametrize("attend", ["sequence_parallel_attention", "ring_attention"])
def test_what_one_rank_refuses_is_told_to_the_others(ranks: Ranks, attend: str) -> None:
    for texts in ranks.run(CASES + "of", "refused", attend):
        assert len(texts) == 7


@pytest.mark.parametrize("both_change", [False, True])
def test_different_known_shapes_are_told(ranks: Ranks, both_change: bool) -> None:
    texts = ranks.run(CASES + "of", "shapes_that_differ", both_change)
    assert all("ranks made different calls" in text for text in texts), texts


def test_rings_of_many_shapes_hold_memory_of_a_few(ranks: Ranks) -> None:
    ranks.run(CASES + "of", "many_shapes", 20, timeout_s=120)


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_forward_and_backward_in_graphs(ranks: Ranks, way: str) -> None:
    assert set(ranks.run(CASES + "captured", (way,), 4, timeout_s=170)) == {3 * 4}

"""Communicators on GPUs behind billions of calls, in several threads, and in forked copies."""

from __future__ import annotations

import pytest
from device_pool import Pool, Ranks

CASES = "renewal_cases."
AROUND = [2**26 - 100, 2**31 - 50, 2**31 + 1000, 2**32 - 50, 2**32 + 1000]


def test_flags_that_nobody_set_for_billions_of_calls(ranks: Ranks) -> None:
    for found in ranks.run(CASES + "behind_billions", AROUND, timeout_s=120):
        assert all(asked <= made < asked + 2**27 for made, asked in zip(found, AROUND, strict=True)), found


@pytest.mark.parametrize("in_turn", [True, False])
def test_two_communicators_of_one_group_have_a_thread_each(fresh_pool: type[Pool], in_turn: bool) -> None:
    """In no order at all, they need more hardware channels than CUDA gives unless asked (docs/internals/failure.md)."""
    pool = fresh_pool(environment={} if in_turn else {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    made = pool.run(CASES + "a_communicator_for_each_thread", 20, in_turn, timeout_s=120)
    assert set(made) == {40 if in_turn else 80}


def test_a_forked_copy_is_told_at_once(ranks: Ranks) -> None:
    for text in ranks.run(CASES + "forked", timeout_s=60):
        assert text.count("CommunicatorClosedError") == 3 and "it was made in another process" in text

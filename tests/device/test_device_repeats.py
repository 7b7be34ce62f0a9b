"""Repeated calls on GPUs, made by compiled code and launched as graphs, with the bytes of every one compared."""

from __future__ import annotations

import pytest
from device_pool import Ranks


@pytest.mark.parametrize("place", ["ordinary", "symmetric"])
def test_repeated_calls_of_every_kind(ranks: Ranks, place: str) -> None:
    for made, native, graphs in ranks.run("repeat_cases.repeated", place, 48, timeout_s=150):
        # Not the first two of each after a change, nor the first from another stream.
        assert made // 4 < native < made
        assert made // 20 < graphs < native, "kernels, where the stream is not an urgent one"


def test_sizes_that_never_come_again_take_no_more_memory(ranks: Ranks) -> None:
    for kept, host, taken in ranks.run("repeat_cases.other_sizes", 3000, timeout_s=300):
        assert kept <= 64 + 8 and host < 48 << 20 and taken < 64 << 20

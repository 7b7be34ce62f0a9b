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

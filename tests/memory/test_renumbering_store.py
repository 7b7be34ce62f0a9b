"""The store that keeps torch's rendezvous apart between groups, driven from C++ as torch drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from sidelane.errors import PeerTimeoutError
from sidelane.memory.torch_symm import RenumberingStore


def wait_for(missing: Callable[[], Sequence[int]]) -> None:
    """As ``Exchange.wait_for``, for 50 ms."""
    until = time.monotonic() + 0.05
    while ranks := missing():
        if time.monotonic() > until:
            raise PeerTimeoutError("late", ranks)


def test_ranks_that_count_differently_meet() -> None:
    shared = dist.HashStore()
    stores = [RenumberingStore(dist.PrefixStore("group", shared), wait_for) for _ in range(2)]
    # A PrefixStore around a Python store calls it by way of C++; its prefix is what torch puts in front of the number.
    seen_by_torch = [dist.PrefixStore("CUDASymmetricMemory", store) for store in stores]
    counters = [7, 2]
    for _ in range(2):
        for store in stores:
            store.begin_round()
        for exchange in range(3):
            for rank, store in enumerate(seen_by_torch):
                store.set(f"{counters[rank] + exchange}/{rank}", f"{exchange}{rank}")
            for rank, store in enumerate(seen_by_torch):
                key = f"{counters[rank] + exchange}/{1 - rank}"
                store.wait([key])
                assert store.get(key) == f"{exchange}{1 - rank}".encode()
        counters = [counters[0] + 10, counters[1] + 3]


@pytest.mark.parametrize("method", ["wait", "get"])
def test_a_rank_that_does_not_come_is_named(method: str) -> None:
    """What is raised in Python comes through torch's C++ as it is."""
    store = RenumberingStore(dist.HashStore(), wait_for)
    store.begin_round()
    seen_by_torch = dist.PrefixStore("CUDASymmetricMemory", store)
    seen_by_torch.set("0/0", "here")
    with pytest.raises(PeerTimeoutError) as caught:
        seen_by_torch.wait(["0/0", "0/3"]) if method == "wait" else seen_by_torch.get("0/3")
    assert caught.value.ranks == (3,)

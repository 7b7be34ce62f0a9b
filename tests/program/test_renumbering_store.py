"""The store that keeps torch's rendezvous apart between groups, driven from C++ as torch drives it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from sidelane.memory.torch_symm import RenumberingStore


def test_ranks_that_count_differently_meet() -> None:
    shared = dist.HashStore()
    stores = [RenumberingStore(dist.PrefixStore("group", shared), timedelta(seconds=5)) for _ in range(2)]
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


def test_a_rank_that_does_not_come_is_a_time_out() -> None:
    store = RenumberingStore(dist.HashStore(), timedelta(milliseconds=50))
    store.begin_round()
    with pytest.raises(dist.DistStoreError):
        dist.PrefixStore("CUDASymmetricMemory", store).wait(["0/1"])

"""Whose the memory is that a storm leaves; the device is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sidelane.memory import release
from sidelane.memory.release import Kept
from sidelane.session import pool_cuda
from soak.account import OURS, POOLS, SYMMETRIC, TORCH, Account, account

GPU = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 1000 bytes, of which some are taken; and what was asked of it."""
    found = SimpleNamespace(taken=400, asked=[])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.asked.append("empty_cache"))
    monkeypatch.setattr(dist, "barrier", lambda group: found.asked.append("barrier"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - found.taken, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    return found


def test_all_let_go_before_anybody_looks(device: SimpleNamespace) -> None:
    class Lane:
        """Open, so that what is dropped waits."""

    lane = Lane()
    release.lanes.add(lane)
    kept = Kept(torch.empty(100, dtype=torch.uint8), GPU)
    before = account(GPU)
    assert before.taken == 400 and before.held[SYMMETRIC] >= 100
    del kept
    device.asked.clear()
    after = account(GPU)
    release.lanes.discard(lane)
    assert after.held[SYMMETRIC] == before.held[SYMMETRIC] - 100, "given back by account itself"
    last = len(device.asked) - 1 - device.asked[::-1].index("empty_cache")
    assert device.asked[last + 1 :].count("barrier") == 2, "peers have let go when this rank looks, and wait for it"
    assert after.ours_since(before) == {}
    assert before.ours_since(after) == {SYMMETRIC: 100}


def test_pools_that_wait_are_seen(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = account(GPU)
    monkeypatch.setattr(pool_cuda, "_closed", [SimpleNamespace(end=lambda: False, nbytes=64)])
    assert account(GPU).ours_since(before) == {POOLS: 64}


def test_what_is_nobodys_is_the_rest() -> None:
    before = Account(1000, {TORCH: 200, SYMMETRIC: 0, POOLS: 0})
    after = Account(1900, {TORCH: 300, SYMMETRIC: 500, POOLS: 500})
    words = after.since(before)
    assert "nobody's +300" in words and f"{TORCH} +100" in words
    assert after.ours_since(before) == {SYMMETRIC: 500, POOLS: 500} and set(OURS) > {SYMMETRIC, POOLS}

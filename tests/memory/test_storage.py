"""Storages that exchange their memory: by torch's call, and as torch 2.11 does without it."""

from __future__ import annotations

import pytest
import torch

from sidelane.memory import storage
from sidelane.memory.storage import exchange_memory, exchange_objection, storage_of


@pytest.fixture(params=["torch's call", "words"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "words":
        monkeypatch.setattr(storage, "EXCHANGE", "no such call")
    exchange_objection.cache_clear()


@pytest.mark.usefixtures("way")
def test_views_see_the_other_memory() -> None:
    assert exchange_objection() is None
    gone: list[str] = []
    whole = torch.arange(100, dtype=torch.uint8)
    tensor = torch.empty(20, dtype=torch.uint8)
    view, own = tensor.view(4, 5)[1:], tensor.untyped_storage()
    own.resize_(0)
    for start in (30, 60):
        part = storage_of(whole, start, 20, lambda start=start: gone.append(f"part at {start}"))  # type: ignore[misc]
        exchange_memory(own, part.untyped_storage())
        assert part.untyped_storage().nbytes() == 0
        assert view.flatten().tolist() == list(range(start + 5, start + 20))
        tensor.add_(100)
        assert whole[start : start + 20].tolist() == list(range(start + 100, start + 120))
        exchange_memory(own, part.untyped_storage())
        assert own.nbytes() == 0 and gone == [f"part at {before}" for before in (30, 60) if before < start]
        del part
    assert gone == ["part at 30", "part at 60"]
    own.resize_(20)  # torch's own memory again
    assert tensor.fill_(3).sum() == 60


def test_another_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "EXCHANGE", "no such call")
    monkeypatch.setattr(storage, "SIZE", 3)
    exchange_objection.cache_clear()
    assert "cannot exchange" in (exchange_objection() or "")
    exchange_objection.cache_clear()

"""What operators keep, made on another thread; by fakes of torch's streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sidelane.memory import storage as made_apart
from sidelane.memory.storage import persistent
from sidelane.ops import operands

GPU = torch.device("cuda")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was done to GPUs and streams."""
    done: list[Any] = []

    @contextlib.contextmanager
    def entered(what: Any) -> Iterator[None]:
        done.append(what)
        yield

    stream = mock.Mock()
    stream.synchronize.side_effect = lambda: done.append("synchronize")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: int(threading.current_thread() is threading.main_thread())
    )
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: done.append(f"stream of {index}") or stream)
    made_apart.stream_of.cache_clear()
    yield done
    made_apart.stream_of.cache_clear()


def test_another_thread_makes_it_on_a_stream_of_its_own(streams: list[Any]) -> None:
    def make() -> tuple[int, torch.Tensor]:
        streams.append("made")
        return threading.get_ident(), torch.zeros(3, device="cpu")

    with torch.device("meta"), torch.inference_mode():
        (thread, tensor), _ = persistent(GPU, make), persistent(torch.device("cuda", 1), make)
    assert thread != threading.get_ident() and not tensor.is_inference()
    names = [each if isinstance(each, str) else "stream" if isinstance(each, mock.Mock) else each for each in streams]
    assert names == ["stream of 1", *[1, "stream", "made", "synchronize"] * 2], "the device of the caller's thread"


def test_what_cannot_be_made_is_told_to_the_caller(streams: list[Any]) -> None:
    def make() -> None:
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        persistent(GPU, make)


def test_captures_and_cpus_make_it_where_they_are(streams: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert persistent(torch.device("cpu"), threading.get_ident) == threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert persistent(GPU, threading.get_ident) == threading.get_ident()
    assert not streams


def test_what_cpus_keep_can_be_written_in_every_mode() -> None:
    with torch.inference_mode():
        made = persistent(torch.device("cpu"), lambda: torch.zeros(3))
        assert torch.is_inference_mode_enabled()
    made.add_(1)


def test_counts_of_the_host_are_kept_out_of_reach_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(operands, "persistent", lambda device, make: made.append(make()) or made[-1])
    comm: Any = SimpleNamespace(cache={}, device=torch.device("cpu"))
    for _ in range(2):
        found = operands.from_host("a test", comm, [[1, 2], [3, 4]])
        assert len(made) == 1 and found.copy is made[0] and found.sent == [3, 7]

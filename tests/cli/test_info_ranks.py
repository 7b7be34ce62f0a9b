"""The processes by which ``sidelane info`` tries the driver: what they find, and what is said of those that fail."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch.distributed as dist
import torch.multiprocessing

from sidelane.cli.info import from_ranks


def meet(store: dist.Store, rank: int, ranks: int, greeting: str) -> list[str]:
    store.set(str(rank), f"{greeting} of {rank}")
    return [store.get(str(each)).decode() for each in range(ranks)]


def end(store: dist.Store, rank: int, ranks: int, how: str) -> list[str]:
    if rank and how == "raises":
        raise ValueError("no driver here")
    if rank and how == "dies":
        os._exit(3)
    time.sleep(100)
    return []


def test_ranks_meet_and_the_first_says_what_they_found() -> None:
    assert from_ranks(meet, 2, "word") == ["word of 0", "word of 1"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked: those of a user are spawned, and import torch for seconds."""
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(
        torch.multiprocessing, "start_processes", lambda *given, start_method, **how: start(*given, **how)
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("how", "said"),
    [("raises", "ValueError: no driver here"), ("dies", "exit code 3"), ("hangs", "not finished within")],
)
def test_a_rank_that_fails_ends_the_others(how: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        from_ranks(end, 2, how, timeout_s=8.0 if how == "hangs" else 80.0)
    assert said in str(caught.value).rstrip().splitlines()[-1]
    assert time.monotonic() - began < 70

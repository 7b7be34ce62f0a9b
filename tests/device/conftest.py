"""These tests run each rank in a process of its own, on a GPU of its own.

On a machine with one GPU two ranks share it: what they do is the same, but for the way that the bytes take, and for
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_pool import Pool, Ranks
from vendors import reason_to_skip

from sidelane.native import load_replays

HERE = Path(__file__).parent


def gpus() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def world_size() -> int:
    """Of the ranks in these tests: nothing in them depends on more than four."""
    return max(2, min(4, gpus()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.device)
            if item.config.pluginmanager.hasplugin("timeout"):
                item.add_marker(pytest.mark.timeout(180))
            # On a machine without one, such as that of CI; `make test-device` is for one that has them.
            if reason := reason_to_skip(item.path.stem, getattr(item, "originalname", item.name), gpus()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled_code() -> None:
    """Compile it ahead: ranks would do so beside their first calls, and tests count what it makes."""
    if gpus():
        load_replays()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    made = Ranks(world_size())
    yield made
    made.close()


@pytest.fixture
def fresh_pool() -> Iterator[type[Pool]]:
    """Makes pools of their own for tests that kill ranks or change the environment; ends them all."""
    made: list[Pool] = []

    class OwnPool(Pool):
        def __init__(self, **options: object) -> None:
            super().__init__(world_size(), **options)  # type: ignore[arg-type]
            made.append(self)

    yield OwnPool
    for pool in made:
        pool.close()

"""These tests need at least two GPUs and run each rank in a process of its own; a crowd of ranks needs one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_pool import Pool, Ranks

HERE = Path(__file__).parent


def gpus() -> int:
    """GPUs of this machine, at most four: nothing in these tests depends on more."""
    return min(4, torch.cuda.device_count()) if torch.version.cuda and torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = gpus()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.device)
            if item.config.pluginmanager.hasplugin("timeout"):
                item.add_marker(pytest.mark.timeout(180))
            # On a machine without them, such as that of CI; `make test-device` is for one that has them.
            if found < (1 if item.path.stem == "test_device_crowd" else 2):
                item.add_marker(pytest.mark.skip(reason=f"needs more GPUs (found {found})"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    made = Ranks(gpus())
    yield made
    made.close()


@pytest.fixture
def fresh_pool() -> Iterator[type[Pool]]:
    """Makes pools of their own for tests that kill ranks or change the environment; ends them all."""
    made: list[Pool] = []

    class OwnPool(Pool):
        def __init__(self, **options: object) -> None:
            super().__init__(gpus(), **options)  # type: ignore[arg-type]
            made.append(self)

    yield OwnPool
    for pool in made:
        pool.close()

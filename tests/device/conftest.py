"""All tests of this folder need GPUs; those that CPU ranks run, too, are elsewhere (``@on_ranks(gpu=True)``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_ranks import ON_GPUS

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("device") is None:
            for mark in ON_GPUS:
                item.add_marker(mark)

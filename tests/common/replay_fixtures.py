"""Fixtures of the tests of repeated calls in C."""

from __future__ import annotations

from types import ModuleType

import pytest
from replay_host import Host

from sidelane.native import load_replays


@pytest.fixture(scope="module")
def module() -> ModuleType:
    found = load_replays()
    assert found.module is not None, f"this machine compiles no C: {found.words}"
    return found.module


@pytest.fixture
def host(module: ModuleType) -> Host:
    return Host(module)

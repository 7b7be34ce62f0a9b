"""The worked examples in docstrings are right."""

from __future__ import annotations

import doctest
import importlib

import pytest

from test_imports import MODULES, needs_vendor

WITH_EXAMPLES = [
    name for name, path in MODULES.items() if ">>> " in path.read_text(encoding="utf-8") and not needs_vendor(path)
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name: str):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0

"""Marks of tests and of single parameters."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def long(*values: Any) -> Any:
    """Mark a set of parameters that takes long for what it adds: ``make test`` leaves it out."""
    return pytest.param(*values, marks=pytest.mark.long)

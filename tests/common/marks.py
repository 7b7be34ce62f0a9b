"""Marks of single parameters."""

from __future__ import annotations

from typing import Any

import pytest


def long(*values: Any) -> Any:
    """Mark a set of parameters that takes long for what it adds: ``make test`` leaves it out."""
    return pytest.param(*values, marks=pytest.mark.long)

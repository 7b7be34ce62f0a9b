from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_line_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without line numbers, a fifth of the time; the instructions and registers are the same."""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")

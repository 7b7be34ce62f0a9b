"""The environment of the Makefile: which torch it takes over."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_venv(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("make_venv")


@pytest.mark.parametrize(
    ("cuda", "hip", "has_gpus", "driver"),
    [
        ("13.0", None, True, "cuda"),
        (None, "7.1.52802", True, "hip"),
        ("13.0", None, False, ""),
        (None, "7.1.52802", False, ""),
        (None, None, False, ""),
    ],
)
def test_a_torch_that_drives_gpus_is_taken_over(
    make_venv: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    has_gpus: bool,
    driver: str,
) -> None:
    lines = ["class version:", f"    cuda, hip = {cuda!r}, {hip!r}", "class cuda:", "    @staticmethod"]
    lines += ["    def is_available():", f"        return {has_gpus}"]
    (tmp_path / "torch.py").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert make_venv.gpu_driver(sys.executable) == driver


def test_a_python_that_fails_has_no_gpus(make_venv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert make_venv.gpu_driver(sys.executable) == ""
    assert "cuda.bindings" not in make_venv.NEEDED_ON_GPUS["hip"], "packages of CUDA are of no use on AMD GPUs"

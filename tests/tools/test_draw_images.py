"""Pictures of docs/images/ can be drawn again: each has its result file, and each that a page shows is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def draw_images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("draw_images")


def test_pictures_and_their_files_are_there(draw_images: ModuleType) -> None:
    assert [file for file, _ in draw_images.IMAGES.values() if not (ROOT / "results" / file).exists()] == []
    images = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    assert draw_images.IMAGES.keys() <= images


def test_no_picture_is_left_over() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results" / "notes").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+)\.png", page.read_text(encoding="utf-8"))}
    assert {path.stem for path in (ROOT / "docs" / "images").glob("*.png")} == shown

"""Pictures of docs/images/ can be drawn again: each has its result file, and each that a page shows is there."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from sidelane.execute.timeline import Interval

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def draw_images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("draw_images")


def test_pictures_and_their_files_are_there(draw_images: ModuleType) -> None:
    assert [file for file, _ in draw_images.IMAGES.values() if not (ROOT / "results" / file).exists()] == []
    images = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    assert {*draw_images.IMAGES, *draw_images.DEMO} <= images


def test_no_picture_is_left_over() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results" / "notes").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+)\.png", page.read_text(encoding="utf-8"))}
    assert {path.stem for path in (ROOT / "docs" / "images").glob("*.png")} == shown


def test_a_trace_becomes_a_picture(draw_images: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "sidelane:all_gather", "tid": 1, "ts": 10.0, "dur": 5.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 12.0, "dur": 50.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "tid": 9, "ts": 14.0, "dur": 30.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "tid": 1, "ts": 90.0, "dur": 5.0},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found: list[Interval] = []
    monkeypatch.setattr(draw_images, "draw_timeline", lambda intervals, *rest: found.extend(intervals))
    draw_images.draw_trace([tmp_path / "trace.json"], "", tmp_path, "picture")
    drawn = [(one.lane, one.label, one.start_us, one.end_us) for one in found]
    assert drawn == [
        ("host", "sidelane:all_gather", 0.0, 5.0),
        ("stream 7", "kernel", 2.0, 52.0),
        ("stream 9", "Memcpy", 4.0, 34.0),
    ]

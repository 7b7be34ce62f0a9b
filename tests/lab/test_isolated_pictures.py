"""Isolated times as pictures: a panel for each question, of a file that was measured, and none of too little."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sidelane_lab.harness.report import draw
from sidelane_lab.harness.study import read

MEASURED = Path(__file__).parents[2] / "results" / "h200x2" / "isolated.json"


@pytest.mark.long
def test_figures_5_to_7_of_a_file(tmp_path: Path) -> None:
    results = read(MEASURED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a legend that has no room warns
        pictures = draw(results, tmp_path)
    assert [picture.name for picture in pictures] == ["isolated-gemms", "isolated-units", "isolated-sizes"]
    assert all("NVIDIA H200" in picture.title and (tmp_path / f"{picture.name}.svg").exists() for picture in pictures)

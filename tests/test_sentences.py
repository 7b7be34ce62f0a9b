"""Figures in sentences of README and guide come out of results/ by the rules of docs/lab/how-we-compare.md."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FIGURES: list[dict[str, Any]] = tomllib.loads((ROOT / "tests/sentences.toml").read_text(encoding="utf-8"))["figure"]
OF_ROW = "step_ms", "ms_per_token", "time_us"


def is_in(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    return all(row.get(key) in (value if isinstance(value, list) else [value]) for key, value in where.items())


def figure(line: Mapping[str, Any]) -> str:
    """The figure, or the least and the most of several."""
    rows = json.loads((ROOT / "results" / line["file"]).read_text(encoding="utf-8"))["rows"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if is_in(row, line.get("where", {})):
            groups.setdefault(tuple(row[key] for key in line.get("over", [])), []).append(row)
    found = []
    for group, column in itertools.product(groups.values(), line.get("columns", [None])):
        times = [
            [row[column or next(key for key in OF_ROW if key in row)] for row in group if is_in(row, line[side])]
            for side in ("theirs", "ours")
        ]
        if all(times):
            theirs, ours = (min(filter(None, side)) for side in times)
            kinds = {"less": 100 * (1 - ours / theirs), "longer": 100 * (ours / theirs - 1), "times": theirs / ours}
            found.append((kinds | {"theirs": theirs, "ours": ours})[line["is"]])
    digits = line.get("digits", 0)
    ends = [f"{end:.{digits}f}" for end in (min(found), max(found))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


@pytest.mark.parametrize("line", FIGURES, ids=lambda line: f"{line['page']} {line['text'][:40]}")
def test_sentences_have_the_figures_of_their_files(line: Mapping[str, Any]) -> None:
    page = " ".join((ROOT / line["page"]).read_text(encoding="utf-8").split())
    assert line["text"].replace("{}", figure(line)) in page


def test_the_first_paragraph_has_no_figure_of_its_own() -> None:
    """All that are followed by a percent sign stand in the list."""
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast")[0].split())
    listed = [line["text"].replace("{}", figure(line)) for line in FIGURES if line["page"] == "README.md"]
    assert len(re.findall(r"\d%", page)) == sum(text.count("%") for text in listed)

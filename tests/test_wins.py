"""Every variant, method, order, schedule and strategy wins a row of ``results``, and every setting has a reason.

``wins.toml`` has the lines and says how they are read. What wins nothing is printed, and there may only be less of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import sidelane.ops.library  # noqa: F401  (its operators are declared when it is imported)
from sidelane.c3.strategies import named, strategies
from sidelane.choice.candidate import DMA, SM, everything
from sidelane.choice.fused import FUSED, ORDERS, SPLIT, UNFUSED
from sidelane.config import Config
from sidelane.ops.operator import OPERATORS
from sidelane.ops.rms_norm import SCHEDULES
from sidelane.program.collective import Kind
from sidelane.program.shape import Variant
from sidelane_lab.sim.prelaunch import PRELAUNCH

ROOT = Path(__file__).parents[1]
LINES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads((ROOT / "tests/wins.toml").read_text(encoding="utf-8"))
DECLARED: dict[str, set[str]] = {
    "variants": {found.variant for kind in Kind for found in everything(kind)} | {PRELAUNCH},
    "methods": {f"{name} {found}" for name, operator in OPERATORS.items() for found in operator.methods},
    "orders": {f"embedding_all_to_all {found}" for found in ORDERS}
    | {f"all_reduce_rms_norm {found}" for found in SCHEDULES[1:]},
    "strategies": {found.code for found in strategies()},
    "settings": {field.name for field in dataclasses.fields(Config)},
}
NOTHING = "nothing"
LEAST, MOST_WITHOUT = 1.02, 1
"""Smallest win: rounds of one launch differ by less. Largest number of lines that win nothing."""


@functools.cache
def rows_of(file: str) -> tuple[Mapping[str, Any], ...]:
    rows = json.loads((ROOT / "results" / file).read_text(encoding="utf-8"))["rows"]
    return tuple(row for row in rows if row["correct"] and row["time_us"])


def own_name(section: str, row: Mapping[str, Any], beside: bool) -> str:
    """Return the name, in a section, of what ran in a row; empty for what is not the library's, or not legal there."""
    kind, of_operator = row.get("implementation", ""), f"{row.get('op')} "
    match section:
        case "variants" if kind in (DMA, SM) and not row.get("prelaunch"):
            legal = not (beside and kind == SM) or Variant.of(row["variant"]).narrow
            found = PRELAUNCH if row.get("trigger", "call") != "call" else row["variant"] * legal
        case "methods":
            by_fused = SPLIT if row["schedule"].startswith("mm in parts") else FUSED
            found = of_operator + {"unfused_sidelane": UNFUSED, "fused": by_fused}.get(kind, "")
        case "orders" if kind == "fused":
            found = of_operator + row["schedule"]
        case "strategies":
            found = row["strategy"]
        case _:
            found = ""
    return found if found in DECLARED[section] else ""


def ahead(section: str, name: str, line: Mapping[str, Any]) -> float:
    """Return by how much the best of the library's other ways is slower than this one in the row of its line."""
    wanted = line["row"] | ({"op": name.split()[0]} if section in ("methods", "orders") else {})
    times: dict[bool, list[float]] = {True: [], False: []}
    for row in (row for row in rows_of(line["file"]) if wanted.items() <= row.items()):
        found = own_name(section, row, line.get("beside", False))
        # A strategy that makes another call than was asked for takes part in its own line only.
        if found == name or (found and (section != "strategies" or named(found).mover.makes_whole_call)):
            times[found == name].append(row["time_us"])
    assert all(times.values()), f"{name}: {line['file']} has no such row, or nothing to win against"
    return min(times[False]) / min(times[True])


def test_everything_has_a_line_and_nothing_else_does() -> None:
    assert {section: set(lines) for section, lines in LINES.items()} == DECLARED


@pytest.mark.parametrize(("section", "name"), [(section, name) for section, lines in LINES.items() for name in lines])
def test_a_row_is_won_or_another_reason_shown(section: str, name: str) -> None:
    line = LINES[section][name]
    if "row" in line:
        found = ahead(section, name, line)
        assert found >= line["by"] >= LEAST, f"{name} is ahead by {found:.3f} only"
    elif line["reason"] == "papers":
        claims = json.loads((ROOT / "src/sidelane_lab/papers/data/claims.json").read_text(encoding="utf-8"))
        assert line["see"] in {claim["id"] for claim in claims}
    elif line["reason"] != NOTHING:
        assert line["reason"] in ("bits", "machines", "ability")
        file, _, test = line["see"].partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_what_wins_nothing_becomes_less(capsys: pytest.CaptureFixture[str]) -> None:
    found = [f"{name} ({of})" for of, lines in LINES.items() for name in lines if lines[name].get("reason") == NOTHING]
    with capsys.disabled():
        print(f"\n{len(found)} win nothing: {', '.join(found)}")
    assert len(found) <= MOST_WITHOUT, "name the row that it wins, or take it out"

"""The tool that judges tests: its mutants are of one line each, and are found again where the line has moved."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''"""Text."""

class Room:
    def least(self, sizes: list[int], most: int = 3) -> int:
        """Return 1 of 2."""
        if not sizes and most > 1:
            raise ValueError(f"least: {most + 1}")
        return min(sizes) + 2
'''


@pytest.fixture(scope="module")
def yardstick() -> ModuleType:
    sys.path.insert(0, "tools")
    try:
        return importlib.import_module("yardstick")
    finally:
        sys.path.remove("tools")


def test_mutants_change_one_line_that_computes(yardstick: ModuleType) -> None:
    found = yardstick.mutants("src/room.py", SOURCE, 50)
    assert {mutant.line for mutant in found} <= {line.strip() for line in SOURCE.splitlines()[5:]}
    assert len(found) == 3
    for mutant in found:
        assert ast.dump(ast.parse(SOURCE)) != ast.dump(ast.parse(SOURCE.replace(mutant.line, mutant.mutated)))
    assert found == yardstick.mutants("src/room.py", SOURCE, 50)


def test_it_is_a_plugin_where_nothing_else_of_the_tools_is(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).resolve().parents[2] / "tools" / "yardstick.py", tmp_path)
    subprocess.run([sys.executable, "-c", "import yardstick"], cwd=tmp_path, check=True, timeout=60)


def test_a_mutant_is_found_where_its_function_has_moved(yardstick: ModuleType, tmp_path: Path) -> None:
    (mutant,) = (each for each in yardstick.mutants("src/room.py", SOURCE, 50) if each.line.startswith("return"))
    for name, text, place in (
        ("house.py", "\n" + SOURCE, ("src/house.py", 9)),
        ("house.py", SOURCE.replace("class Room", "class Hall"), None),  # another function may have such a short line
        ("house.py", SOURCE.replace("+ 2", "+ 3"), None),
        ("room.py", SOURCE, ("src/room.py", 8)),
    ):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
        assert yardstick.Sources(tmp_path).place(mutant) == place


def test_the_yardstick_has_mutants_of_many_modules(yardstick: ModuleType) -> None:
    found = yardstick.load()
    assert len(found) == 400
    assert len({mutant.file for mutant in found}) == 50


def test_a_room_that_loses_coverage_is_told(
    yardstick: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(yardstick, "ROOT", tmp_path)
    (tmp_path / yardstick.DATA).mkdir(parents=True)
    (tmp_path / yardstick.DATA / "coverage.json").write_text(json.dumps({"ops": [90.0, 80.0, 100, 50]}))
    assert yardstick.judge_rooms({"ops": [89.8, 79.8, 100, 50]}, False) == 0
    assert yardstick.judge_rooms({"ops": [90.0, 79.6, 100, 50]}, False) == 1
    assert "LESS" in capsys.readouterr().out

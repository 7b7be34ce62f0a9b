"""The tool that measures a machine: parts that fail or take too long, and what is merged."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sidelane.bench.running.launch import LaunchTarget

FILE = Path(__file__).resolve().parent.parent / "tools" / "measure_node.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_node", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(rows: list[int], **others: Any) -> dict[str, Any]:
    common = {"study": "collectives", "machine": "cpu", "ranks": 2, "commit": "abc", "software": {"torch": "2"}}
    return {**common, "command": "sidelane collective --factor 4 --json /tmp/x.json", "rows": rows, **others}


def test_rows_and_commands_are_put_together(tool: ModuleType) -> None:
    merged = tool.merge([result([1, 2], date="1"), result([3], date="2")], "lists")
    assert merged["rows"] == [1, 2, 3]
    assert merged["command"] == "; ".join(["sidelane collective --factor 4 --json lists.json"] * 2)
    assert merged["date"] == "2"


@pytest.mark.parametrize("difference", [{"commit": "d"}, {"machine": "h200x2"}, {"software": {}}, {"ranks": 3}])
def test_different_runs_are_not_put_together(tool: ModuleType, difference: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"merge: {next(iter(difference))} of lists"):
        tool.merge([result([1]), result([2], **difference)], "lists")


def test_what_was_measured_is_kept(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "sidelane"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys, time\n"
        "name, _, file = sys.argv[1:]\n"
        "if name in ('slow', 'half'):\n"
        "    try: print('nearly', flush=True); time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        f"        if name == 'half': open(file, 'w').write(json.dumps({result([5])!r}))\n"
        "        raise\n"
        "if name == 'wrong': print('no such thing'); sys.exit(3)\n"
        f"open(file, 'w').write(json.dumps({result([7])!r}))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(tool, "SIDELANE", str(program))
    monkeypatch.setattr(tool, "ENDING_S", 3.0)
    names = ("fine", "slow", "wrong", "half", "late")
    seconds = {"slow": 5, "half": 5, "late": 1000}
    parts = [tool.Part((name,), seconds.get(name, 30)) for name in names]
    assert not tool.measure("lists", parts, tmp_path, time.monotonic() + 500)
    printed = capsys.readouterr().out
    for words in (
        "1/5] 1 rows",
        "2/5] failed",
        "longer than 5 s\nnearly",
        "exit status 3\nno such thing",
        "4/5] 1 rows",
        "4/5] failed",
        "5/5] left out",
    ):
        assert words in printed
    assert json.loads((tmp_path / "lists.json").read_text())["rows"] == [7, 5]
    assert not list(tmp_path.glob("*part*"))
    assert tool.measure("host", parts[:1], tmp_path)


def test_every_command_of_the_tool_exists(tool: ModuleType) -> None:
    from click.testing import CliRunner

    from sidelane.cli import main

    for part in (part for parts in tool.STUDIES.values() for part in parts):
        shown = CliRunner().invoke(main, [part.arguments[0], "--help"])
        options = [word for word in part.arguments if word.startswith("--")]
        assert shown.exit_code == 0 and all(option.removeprefix("--no") in shown.output for option in options), part


def test_what_has_ended_is_there_while_the_next_part_runs(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def run(command: list[str], timeout_s: float) -> None:
        if rows:
            assert json.loads((tmp_path / "lists.json").read_text())["rows"] == rows
            raise KeyboardInterrupt
        rows.append(7)
        Path(command[-1]).write_text(json.dumps(result(rows)))

    monkeypatch.setattr(tool, "run", run)
    with pytest.raises(KeyboardInterrupt):
        tool.measure("lists", [tool.Part(("fine",), 1.0)] * 2, tmp_path)
    assert json.loads((tmp_path / "lists.json").read_text())["rows"] == rows


def test_without_gpus_it_says_so_at_once(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "choose_target", lambda: LaunchTarget("cpu", 2))
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path / "new")])
    assert "two GPUs are needed" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_unknown_study_is_named(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path), "lists", "list"])
    assert "STUDY (value=list, allowed=collectives, lists, broadcasts, chain" in capsys.readouterr().err

"""The tool that measures a machine: parts that fail or take too long, calls that go on, and what is put together."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sidelane_lab.harness.launch import LaunchTarget

ROOT = Path(__file__).resolve().parents[2]
SOFTWARE = {"torch": "2"}


@pytest.fixture(scope="module", autouse=True)
def tools() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def tool(tools: None) -> ModuleType:
    return importlib.import_module("measure_node")


@pytest.fixture(scope="module")
def parts(tool: ModuleType) -> ModuleType:
    return importlib.import_module("node.parts")


@pytest.fixture(scope="module")
def folders(tool: ModuleType) -> ModuleType:
    return importlib.import_module("node.folder")


def result(rows: list[Any], **others: Any) -> dict[str, Any]:
    common = {"study": "collectives", "machine": "h200x4", "ranks": 4, "commit": "abcdef01", "software": SOFTWARE}
    return {**common, "command": "sidelane collective --factor 4 --json /tmp/x.json", "rows": rows, **others}


def test_rows_and_commands_are_put_together(folders: ModuleType) -> None:
    merged = folders.merge([result([1, 2], date="2"), result([3], date="1")], "lists")
    assert merged["rows"] == [1, 2, 3]
    assert merged["command"] == "; ".join(["sidelane collective --factor 4 --json lists.json"] * 2)
    assert merged["date"] == "2"


@pytest.mark.parametrize("difference", [{"commit": "d"}, {"machine": "h200x2"}, {"software": {}}, {"ranks": 3}])
def test_different_runs_are_not_put_together(folders: ModuleType, difference: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"merge: {next(iter(difference))} of lists"):
        folders.merge([result([1]), result([2], **difference)], "lists")


PROGRAM = """
import json, os, sys, time
from pathlib import Path
name, *options, _, file = sys.argv[1:]
file, calls = Path(file), Path(__file__).with_suffix(".calls")
result = {**json.loads(RESULT), "commit": os.environ["SIDELANE_COMMIT"]}
def write(*rows):
    file.write_text(json.dumps({**result, "rows": list(rows)}))
try:
    print("it is", name, flush=True)
    calls.write_text((calls.read_text() if calls.exists() else "") + " ".join([name, *options]) + "\\n")
    if name in ("slow", "half"):
        time.sleep(60)
except KeyboardInterrupt:
    if name == "half":
        write({"row": "half"})
    raise
if name == "wrong":
    sys.exit(3)
elif name == "grows":
    there = json.loads(file.read_text())["rows"] if file.exists() else []
    if len(there) < 2:
        write(*there, {"row": len(there)})
    if not there:
        time.sleep(float(options[1]) + 0.5)
elif name == "incorrect":
    write({"correct": False}, {"correct": True})
    sys.exit("Error: lists: 1 of 2 rows are WRONG: all_gather")
elif name == "text":
    file.write_text("machine: h200x4\\npassed 1 s a\\n")
elif name != "nothing":
    write({"row": name})
"""


class Clock:
    """That of ``running``: it jumps, or Ctrl-C is typed, as soon as a program is there that sleeps."""

    def __init__(self, calls: Path) -> None:
        self._calls, self._ahead_s = calls, 0.0
        self._seen = 0
        self.jump_s: float | None = 1000.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        if len(calls) != self._seen and calls and calls[-1].split()[0] in ("slow", "half"):
            if self.jump_s is None:
                raise KeyboardInterrupt
            self._ahead_s += self.jump_s
        self._seen = len(calls)


@dataclasses.dataclass
class Bench:
    """A folder, and parts that are a program of this test's, which reports its calls; and what happens at a nap."""

    run: Callable[..., int]
    out: Path
    program: Path
    clock: Clock

    def calls(self) -> list[str]:
        made = self.program.with_suffix(".calls")
        found = made.read_text().split("\n")[:-1] if made.exists() else []
        made.unlink(missing_ok=True)
        return found

    def rows(self, name: str) -> list[Any]:
        return list(json.loads((self.out / name).read_text())["rows"])


@pytest.fixture
def bench(tool: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    running = importlib.import_module("node.running")
    session = importlib.import_module("node.session")
    folders = importlib.import_module("node.folder")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("RESULT", repr(json.dumps(result([])))))
    monkeypatch.setattr(running, "ENDING_S", 3.0)
    monkeypatch.setattr(running, "POLL_S", 0.02)
    clock = Clock(program.with_suffix(".calls"))
    monkeypatch.setattr(running, "time", clock)
    monkeypatch.setattr(session, "LEAST_BUDGET_S", 0.1)
    place = folders.Place("h200x4", "H200", 4, "abcdef01", SOFTWARE)
    monkeypatch.setattr(tool, "place_here", lambda out, *, dry: place)

    def run(*names: str, options: tuple[str, ...] = (), place: Any = place, **changes: Any) -> int:
        made = []
        for text in names:
            name, _, file = text.partition(":")
            usual = {"file": f"{file or name}.json", "seconds": 0.1, "timeout_s": 20.0}
            made.append(
                parts.Part(
                    name=name, command=(sys.executable, str(program), name), **{**usual, **changes.get(name, {})}
                )
            )
        monkeypatch.setattr(tool, "all_parts", lambda: tuple(made))
        monkeypatch.setattr(tool, "place_here", lambda out, *, dry: place)
        return int(tool.main(["--out", str(tmp_path / "new" / "out"), *options]))

    return Bench(run, tmp_path / "new" / "out", program, clock)


def test_what_fails_stops_nothing_and_is_tried_once_more(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("wrong:lists", "slow:lists", "half:lists", "fine:lists", "nothing", "last:lists", "waits", "goes")
    changes = {
        "waits": {"needs": ("wrong",)},
        "goes": {"after": ("wrong",), "needs": ("fine",)},
    }
    assert bench.run(*names, **changes) == 1
    printed = capsys.readouterr().out
    assert bench.calls() == [
        "wrong",
        "slow",
        "half",
        "fine",
        "nothing",
        "last",
        "wrong",
        "slow",
        "half",
        "nothing",
        "goes",
    ]
    for words in (
        "wrong (1 of 8): failed",
        "exit status 3\nit is wrong",
        "it took longer than 20 s\nit is slow",
        "half (3 of 8): failed, 1 rows",
        "it wrote nothing",
        "done: 3 of 8 parts",
        "left, not yet: waits: it waits for wrong",
        *(f"FAILED: {name}: " for name in ("wrong", "slow", "half", "nothing")),
    ):
        assert words in printed
    assert bench.rows("lists.json") == [{"row": "half"}, {"row": "fine"}, {"row": "last"}]
    assert json.loads((bench.out / "lists.json").read_text())["commit"] == "abcdef01"

    assert bench.run(*names, **changes) == 1  # all has been tried twice
    assert bench.calls() == [] and "FAILED: wrong: exit status 3" in capsys.readouterr().out
    assert bench.run(*names, options=("wrong",), **changes) == 1  # but for what is asked for by name
    assert bench.calls() == ["wrong"] and "parts (" not in capsys.readouterr().out


def test_a_call_ends_in_time_and_the_next_one_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("grows", "fine", "long")
    changes = {
        "grows": {"budget": "--budget", "margin_s": 18.5, "timeout_s": 20.0},  # a budget of a second
        "long": {"seconds": 100.0, "timeout_s": 200.0},
    }
    assert bench.run(*names, options=("--seconds", "22.8"), **changes) == 0  # of which three are for an ending
    grows, *others = bench.calls()
    assert grows == "grows --budget 1 --timeout 20" and others == ["fine"]
    printed = capsys.readouterr().out
    assert re.search(r"left, unfinished: grows: it takes about 19 s, and \d+ are left", printed)
    assert re.search(r"left, not yet: long: it takes about 100 s, and \d+ are left", printed)
    assert "done: 1 of 3 parts" in printed and "the same command goes on; about 2 minutes" in printed
    assert bench.rows("grows.json") == [{"row": 0}]

    assert bench.run(*names, options=("--seconds", "200"), **changes) == 0
    assert [call.split()[0] for call in bench.calls()] == ["grows", "long"]
    assert bench.rows("grows.json") == [{"row": 0}, {"row": 1}] and bench.run(*names, **changes) == 0
    assert bench.calls() == [] and capsys.readouterr().out.count("done: 3 of 3 parts") == 2


def test_a_part_that_a_calls_end_cuts_is_given_more_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("half", options=("--seconds", "20")) == 0  # 17, of 20
    assert "half (1 of 1): unfinished, 1 rows" in capsys.readouterr().out
    assert bench.rows("half.json") == [{"row": "half"}]
    bench.calls()
    assert bench.run("half", options=("--seconds", "20")) == 0 and bench.calls() == []
    assert "left, unfinished: half: it takes about 20 s, and 17 are left" in capsys.readouterr().out


def test_one_that_grows_and_hangs_is_given_up(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = {"budget": "--budget", "margin_s": 1.0, "timeout_s": 20.0}
    for tries in (2, 0):
        assert bench.run("slow", "fine", options=("--seconds", "20"), slow=hangs) == 1
        assert [call.split()[0] for call in bench.calls()].count("slow") == tries
    # 17 s of the 20, less what the machine takes to start the programs before.
    assert re.search(r"FAILED: slow: it took longer than 1[3-7] s", capsys.readouterr().out)


def test_wrong_rows_are_an_error_and_texts_are_joined(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"kind": "text", "file": "tests.txt"}
    assert bench.run("incorrect", "text", text=text) == 1
    printed = capsys.readouterr().out
    assert "incorrect (1 of 2): done, 2 rows" in printed and "1 of 2 rows are WRONG" in printed
    assert (bench.out / "tests.txt").read_text() == "machine: h200x4\npassed 1 s a\n"


def test_an_interrupted_call_keeps_what_there_is(bench: Bench) -> None:
    bench.clock.jump_s = None
    assert bench.run("half", "fine") == 130 and bench.rows("half.json") == [{"row": "half"}]
    assert bench.calls() == ["half"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"commit": "1234567"}, "commit: abcdef01, now 1234567"),
        ({"machine": "h200x2", "ranks": 2}, "machine: h200x4, now h200x2"),
        ({"software": {"torch": "3"}}, "software: torch 2, now 3"),
    ],
)
def test_what_was_measured_of_something_else_is_set_aside(
    bench: Bench, folders: ModuleType, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    assert bench.run("fine", "text", text={"kind": "text", "file": "tests.txt"}) == 0
    other = dataclasses.replace(folders.Place("h200x4", "H200", 4, "abcdef01", SOFTWARE), **change)
    bench.calls()
    again = {"text": {"kind": "text", "file": "tests.txt"}, "place": other}
    with pytest.raises(SystemExit):
        bench.run("fine", "text", **again)
    assert f"parts: {said}" in capsys.readouterr().err
    (bench.out / "parts" / "state.json").unlink()  # files alone say it as well
    with pytest.raises(SystemExit):
        bench.run("fine", "text", **again)
    told = capsys.readouterr().err
    assert f"fine.json: {said}" in told and ("machine" not in said or f"tests.txt: {said}" in told)
    assert bench.calls() == [] and bench.run("fine", "text", options=("--list",), **again) == 0
    assert f"not of this: fine.json: {said}" in capsys.readouterr().out
    assert bench.run("fine", "text", options=("--again",), **again) == 0
    assert json.loads((bench.out / "earlier-1" / "fine.json").read_text())["commit"] == "abcdef01"
    assert (bench.out / "earlier-1" / "tests.txt").exists() and (bench.out / "fine.json").exists()
    assert bench.calls() == ["fine", "text"]


def test_a_state_that_cannot_be_read_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("fine") == 0
    (bench.out / "parts" / "state.json").write_text("{")
    with pytest.raises(SystemExit):
        bench.run("fine")
    assert "--again starts anew" in capsys.readouterr().err and bench.run("fine", options=("--again",)) == 0


def test_commits_have_short_names(folders: ModuleType) -> None:
    assert folders.is_same_commit("7876871", "7876871d0a") and folders.is_same_commit("7876871d0a", "7876871")
    assert not folders.is_same_commit("7876871", "7876871d0a-dirty") and not folders.is_same_commit("7876", "7876871")


def test_dirty_trees_and_unknown_commits_are_warned_of(
    bench: Bench, folders: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for commit, words in (("abcdef01-dirty", "files differ from the commit"), ("unknown", "set SIDELANE_COMMIT")):
        place = folders.Place("h200x4", "H200", 4, commit, SOFTWARE)
        assert bench.run("fine", options=("--again",), place=place) == 0
        assert f"WARNING: {words}" in capsys.readouterr().out.replace("no checkout: ", "")


def test_results_alone_make_no_tree_dirty(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    code, measured = tmp_path / "code.py", tmp_path / "results" / "h200x4" / "host.json"
    measured.parent.mkdir(parents=True)
    for path in (code, measured):
        path.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool.provenance, "commit", lambda: "abcdef01-dirty")
    measured.write_text("2")
    assert tool.commit_but_for(measured.parent) == "abcdef01"
    assert tool.commit_but_for(tmp_path / "results" / "h200x2") == "abcdef01-dirty"
    assert tool.commit_but_for(Path("/elsewhere")) == "abcdef01-dirty"
    code.write_text("2")
    assert tool.commit_but_for(measured.parent) == "abcdef01-dirty"


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
    assert "NAME (value=list, allowed=collectives, collectives-1, collectives-2" in capsys.readouterr().err


def test_folders_are_compared_file_by_file(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    for folder in (before, out):
        folder.mkdir()
    for name in ("fused.json", "gemms.json"):
        shutil.copy(ROOT / "results/h100x2/fused.json", before / name)
    shutil.copy(ROOT / "results/h100x2/fused.json", out / "fused.json")
    assert tool.compare_with(before, out) == 0 and "gemms.json" not in capsys.readouterr().out
    slower = json.loads((out / "fused.json").read_text())
    for row in slower["rows"]:
        if row["implementation"] == "auto" and row["time_us"]:
            row |= {name: 1.3 * row[name] for name in ("time_us", "p10_us", "p90_us")}
    (out / "fused.json").write_text(json.dumps(slower))
    shutil.copy(ROOT / "results/h200x1/gemms.json", out / "gemms.json")
    assert tool.compare_with(before, out) == 1
    told = capsys.readouterr().out
    assert "fused.json, next to" in told and "not compared: regress: study" in told
    slower["rows"] = json.loads((before / "fused.json").read_text())["rows"][:20]
    (out / "fused.json").write_text(json.dumps(slower))
    assert tool.compare_with(before, out) == 1, "points are lost"
    assert tool.compare_with(before, out, {"fused.json"}) == 0, "they are not there yet"
    with pytest.raises(SystemExit):
        tool.main(["--out", str(out), "--before", str(tmp_path / "nowhere")])
    assert "nowhere, allowed=a folder of results" in capsys.readouterr().err


def test_the_list_has_every_part(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--out", str(tmp_path / "new"), "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:-1]] == [part.name for part in tool.all_parts()]
    assert re.match(r"left: about \d\d minutes", shown[-1])
    assert not (tmp_path / "new").exists()


def test_all_that_is_asked_of_four_gpus_is_a_part(parts: ModuleType) -> None:
    made = parts.all_parts()
    files = {part.file for part in made}
    wanted = (
        "collectives",
        "ordinary",
        "layouts",
        "c3",
        "occupancy",
        "heuristics",
        "fused",
        "fsdp",
        "isolated",
        "claims",
    )
    assert {f"{name}.json" for name in (*wanted, "fsdp-profile", "process-group")} | {"device-tests.txt"} <= files
    assert len({part.name for part in made}) == len(made)
    seen: set[str] = set()
    for part in made:  # what is needed comes first
        assert {*part.needs, *part.after} <= seen, part
        seen.add(part.name)
        assert part.seconds < part.timeout_s <= 560, part
    from sidelane_lab.model.study import TABLE_II

    pairs = [word for part in made if part.file == "c3.json" for word in part.command if re.match(r"[cm]b\d_", word)]
    assert sorted(pairs) == sorted(TABLE_II)


def test_every_command_can_be_typed(parts: ModuleType) -> None:
    from sidelane.cli import main

    for part in parts.all_parts():
        for command in filter(None, (part.command, part.small)):
            if command[1] != "-m":
                continue
            words = [word.format(out="out", above=".", machine="h200x4") for word in command[3:]]
            told = [part.budget, "30"] if part.budget else []
            line = [*words[1:], *told, part.into, "file.json"]
            for read in {"--from-results", "--results"}.intersection(line[:-2]) if words[0] != "claims" else ():
                line[line.index(read) + 1] = __file__
            main.find(words[0]).make_context(words[0], line)


def test_device_tests_are_all_run_once(parts: ModuleType) -> None:
    asked = [name for part in parts.parts_of_device_tests() for name in part.command[4:]]
    assert len(asked) == len(set(asked))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "device").glob("test_*.py")}
    found = {name.partition("::")[0] for name in asked}
    assert files < found and all("gpu=" in (ROOT / name).read_text(encoding="utf-8") for name in found - files)
    for file in {name.partition("::")[0] for name in asked if "::" in name}:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        tests = {f"{file}::{name}" for name in found if name.startswith("test_")}
        assert {name for name in asked if name.startswith(f"{file}::")} == tests and file not in asked


def test_lanes_put_their_summaries_together(
    tools: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    device_tests = importlib.import_module("device_tests")
    lane = tmp_path / "lane.py"
    lane.write_text(
        "import sys; *tests, _, file = sys.argv[1:]; open(file, 'w').write(f'{tests}\\n'); sys.exit('b' in tests)"
    )
    monkeypatch.setattr(device_tests, "__file__", str(lane))
    assert device_tests.in_lanes([["a"], ["b", "c"]], ["-x"], tmp_path / "sums" / "all.txt") == 1
    assert (tmp_path / "sums" / "all.txt").read_text() == "['a', '-x']\n\n['b', 'c', '-x']\n"
    assert device_tests.in_lanes([["a"]], [], None) == 0


def test_lanes_share_every_test_out_once(tools: None) -> None:
    device_tests = importlib.import_module("device_tests")
    assert doctest.testmod(device_tests).failed == 0
    names = [f"file{file}::test{number}" for file in range(5) for number in range(3 * file + 1)]
    for lanes in (1, 3, 50):
        shared = device_tests.parts(names, lanes, {name: len(name) for name in names[::2]})
        assert len(shared) == lanes and sorted(name for lane in shared for name in lane) == sorted(names)


def test_goals_are_held_against_files(tool: ModuleType, tmp_path: Path) -> None:
    goals = importlib.import_module("node.goals")

    def points(ours: float, launch: str, nbytes: int) -> list[dict[str, Any]]:
        call = {"collective": "all_gather", "bytes": nbytes, "in_place": False, "launch": launch, "tensors": 1}
        return [
            {**call, "implementation": "nccl", "variant": "", "time_us": 9.0},
            {**call, "implementation": "symm_mem", "variant": "", "time_us": 8.0},
            {**call, "implementation": "auto", "variant": "b2b", "time_us": ours},
        ]

    assert list(goals.goals(tmp_path)) == []
    rows = [*points(4.0, "graph", 1), *points(10.0, "graph", 2), *points(4.0, "eager", 2)]
    (tmp_path / "collectives.json").write_text(json.dumps(result(rows)))
    shares = [("auto", 95.0), ("auto", 76.0), ("conccl", 10.0), ("auto", None)]
    c3 = [{"strategy": name, "percent_of_ideal": share} for name, share in shares]
    (tmp_path / "c3.json").write_text(json.dumps(result(c3)))
    steps = [{"implementation": name, "recovered_percent": share} for name, share in (("sidelane", 61), ("nccl", 0))]
    (tmp_path / "fsdp.json").write_text(json.dumps(result(steps)))
    claims = [
        {"id": f"h200x4/c3/{name}", "ok": name == "median", "predicted": 9.0} for name in ("median", "worst", "x")
    ]
    (tmp_path / "claims.json").write_text(json.dumps(result(claims)))
    found = list(goals.goals(tmp_path))
    assert [line.partition(":")[0] for line in found] == ["NOT MET", "met", "NOT MET", "met", "met", "NOT MET"]
    assert "slowest of 2 points: 0.80 (all_gather of 2 bytes out of place; 1 below 1)" in found[0]
    assert "geometric mean of all 3 points: 1.47" in found[1]
    assert "mean of 2 scenarios: 85.5" in found[2] and "at worst: 76.0" in found[3]
    assert "1 of 2 (not: h200x4/c3/worst 9.0)" in found[5]


@pytest.mark.long
def test_autos_table_is_made_of_what_was_measured(
    tool: ModuleType, folders: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "results" / "h200x4" / "collectives.json", tmp_path)
    found = json.loads((tmp_path / "collectives.json").read_text())
    place = folders.Place(*(found[name] for name in ("machine", "device", "ranks", "commit", "software")))
    monkeypatch.setattr(tool, "place_here", lambda out, *, dry: place)
    line = ["--out", str(tmp_path), "auto-table"]
    assert tool.main(line) == 0  # it waits
    assert not (tmp_path / "parts" / "auto-table.json").exists()
    folder = folders.Folder(tmp_path, tool.all_parts(), place)
    for number in range(1, 5):
        folder.note(folder.parts[number - 1], folders.State(folders.DONE))
    assert tool.main(line) == 0
    made = json.loads((tmp_path / "parts" / "auto-table.json").read_text())
    builtin = json.loads((ROOT / "src" / "sidelane" / "choice" / "builtin" / "h200x4.json").read_text())
    assert made["curves"] == builtin["curves"] and made["key"] == builtin["key"]


@pytest.mark.long
def test_a_part_runs_between_cpu_ranks(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--out", str(tmp_path), "--dry-run", "host", "power"]
    assert tool.main(line) == 0
    printed = capsys.readouterr().out
    assert "host (1 of 3): done" in printed and "it needs GPUs: " in printed and "sidelane power" in printed
    content = json.loads((tmp_path / "host.json").read_text())
    assert (content["study"], content["machine"], content["ranks"]) == ("host", "cpu", 2) and content["rows"]
    assert content["command"].startswith("sidelane host --bytes 1K") and content["command"].endswith("--json host.json")
    assert tool.main(line) == 0  # nothing is left that can run here
    assert "host (" not in capsys.readouterr().out

"""The command line: what it accepts, what it makes of it, and how it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from marks import long

from goldens import check_golden, entries
from sidelane import cli
from sidelane.cli import info
from sidelane.errors import UnavailableError
from sidelane.machine import local
from sidelane.program.collective import Kind
from sidelane.version import VERSION
from sidelane_lab.baselines import reference
from sidelane_lab.baselines.roster import check_asked
from sidelane_lab.cli.demo import DEMO_WORKLOADS
from sidelane_lab.harness import launch, running
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.launch import RankFailedError
from sidelane_lab.machines import numbers
from sidelane_lab.machines.load import machine_names
from sidelane_lab.model import plan as sim_plan
from sidelane_lab.papers import command as claims
from sidelane_lab.papers import operator_results as sim_fused
from sidelane_lab.papers import overlap as sim_overlap
from sidelane_lab.papers import predictions as sim_study
from sidelane_lab.studies.power import predict as power_predict

ROOT = Path(__file__).resolve().parents[2]


LABORATORY = [name for name in cli.main.list_commands() if name not in ("info", "recorder")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="sidelane")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for studies and predictions; holds what they were called with. It returns 3, which claims pass on."""
    seen: list[tuple[Any, ...]] = []

    def answer(*given: Any, **named: Any) -> int:
        seen.append(given)
        return 3

    doors = {running: "run", numbers: "predict_study", sim_study: "collective_main"}
    doors |= dict.fromkeys((power_predict, sim_overlap, claims, sim_plan, sim_fused), "main")
    for module, name in (*doors.items(), (sim_study, "c3_main")):
        monkeypatch.setattr(module, name, answer)
    return seen


def said(given: object) -> str:
    """Return options with the fields that are not the defaults of their class."""
    if not dataclasses.is_dataclass(given):
        return str(given)
    fields = ((field, getattr(given, field.name)) for field in dataclasses.fields(given))
    kept = (f"{field.name}={value}" for field, value in fields if value != field.default)
    return f"{type(given).__name__}({', '.join(kept)})"


def test_version() -> None:
    assert run("--version").output == f"sidelane {VERSION}\n"


def test_what_is_asked_for(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``goldens/options.txt`` has command lines, and the options that they make."""
    monkeypatch.chdir(tmp_path)
    found = {}
    for line in entries("options"):
        asked.clear()
        words = shlex.split(line)[1:]
        result = run(*words)
        assert result.exit_code == (3 if words[0] == "claims" else 0), (line, result.output)
        (given,) = asked
        found[line] = "\n".join(map(said, given))
    check_golden("options", found)


def test_all_means_all_that_can_be_measured(asked: list[tuple[Any, ...]]) -> None:
    run("collective", "--collective", "all", "--device", "cpu")
    ((options,),) = asked
    assert set(options.collectives) == set(reference.KINDS)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing runs, whatever is wrong: ``goldens/cli.txt`` has command lines, and what each is told."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(running, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    found = {}
    for line in entries("cli"):
        words = shlex.split(line)
        is_command = words[1] in cli.main.list_commands()
        result = CliRunner().invoke(cli.main, words[1:], prog_name="sidelane", terminal_width=120)
        assert (result.exit_code, result.stdout) == (2, ""), (line, result.output)
        assert isinstance(result.exception, SystemExit), line
        *error, see = result.stderr.splitlines()
        assert all(text.startswith("Error: ") for text in error)
        assert see == f"See {' '.join(words[: 1 + is_command])} --help, docs/guide/commands.md"
        found[line] = "\n".join(error)
    check_golden("cli", found)


@pytest.mark.parametrize("command", ["c3", "collective", "pipeline", "claims"])
def test_machines_that_cannot_be_predicted(command: str, tmp_path: Path) -> None:
    def refused(machine: str) -> str:
        result = run(command, "--machine", machine)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        return result.output

    assert "no such file" in refused(str(tmp_path / "mine.toml"))
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "mi300x8"\nname = "mine"\n\n[links]\nusable_gpbs = 46\n', encoding="utf-8")
    assert f"{mine}: links.usable_gpbs: unknown name (allowed=topology, peak_gbps" in refused(str(mine))
    mine.write_text('base = "mi300x8"\nname = "mine"\n[gpu]\nmemory_gbps = 0\n', encoding="utf-8")
    assert f"{mine}: gpu.memory_gbps: (value=0, allowed=10 to 100000" in refused(str(mine))
    mine.write_bytes(b"\xff\xfe")
    assert "cannot be read as text" in refused(str(mine))


def test_a_users_machine_is_predicted(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"base": "mi300x8", "name": "mine", "title": "My GPUs"}', encoding="utf-8")
    result = run("c3", "--machine", str(mine), "cb1_896M", "--collective", "all_gather")
    assert result.exit_code == 0, result.output
    assert "My GPUs" in result.output and "cb1_896M" in result.output


def test_the_catalogue() -> None:
    shown, listed = run("machines"), run("machines", "--json")
    assert shown.exit_code == listed.exit_code == 0
    assert tuple(row["name"] for row in json.loads(listed.output)) == machine_names()
    assert all(name in shown.output for name in machine_names())


def test_demo_measures_where_there_are_gpus(
    asked: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "choose_target", lambda ranks, device: SimpleNamespace(on_cpu=False))
    result = run("demo", "--report", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "This machine" in result.output
    ((options,),) = asked
    assert (options.report, options.workloads) == (tmp_path, DEMO_WORKLOADS)


def test_a_name_of_some_of_the_collectives_is_fine() -> None:
    both = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
    check_asked("cpu", both, variants=("swap", "bcst", "b2b"), implementations=("dma",))
    check_asked("cuda", both, variants=("one_shot", "b2b", "swap"), launches=("graph",))
    check_asked("cuda", (Kind.ALL_REDUCE,), variants=("b2b",), implementations=("nccl",))
    for variants, implementations, chosen_from in (
        ("one_shot", ("dma",), ("dma", "sm")),
        ("one_shot", (), ("dma",)),
        ("b2b", ("sm",), ("dma", "sm")),
        ("b2b+prelaunch", (), ("dma", "sm")),
        ("two_shot", (), ("dma", "sm")),
    ):
        with pytest.raises(ValueError, match="no such variant"):
            check_asked("cuda", both, variants=(variants,), implementations=implementations, chosen_from=chosen_from)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(options: Any) -> None:
        raise error

    monkeypatch.setattr(running, "run", fail)


def test_what_happens_on_the_way_is_not_the_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, UnavailableError("no copy engines here"))
    result = run("c3")
    assert (result.exit_code, result.output) == (1, "Error: no copy engines here\nSee docs/guide/errors.md\n")


def test_a_folder_that_cannot_be_made_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"

    def come_meanwhile(*_: object) -> None:
        path.touch()
        (path / "report").mkdir()

    monkeypatch.setattr(sim_overlap, "main", come_meanwhile)
    result = run("pipeline", "--machine", "a40x4", "--report", str(path / "report"))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    *_, error, see = result.output.strip().splitlines()
    assert error.startswith("Error: ") and "Not a directory" in error and see == "See docs/guide/errors.md"


def outputs(command: str) -> dict[str, Written]:
    """Options of a command that name what it writes."""
    options = {option.opts[0]: option for option in cli.main.find(command).params}
    return {name: option.type for name, option in options.items() if isinstance(option.type, Written)}


def test_what_is_written_is_known() -> None:
    found = {command: set(outputs(command)) for command in cli.main.list_commands()}
    assert {command for command, names in found.items() if "--json" not in names} == {"info", "recorder"}
    assert found["c3"] == {"--json", "--report", "--timeline"}
    assert "--output" in found["tune"]


@pytest.mark.parametrize("command", LABORATORY)
def test_what_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()

    def refuse(*_: Any, dir: Path) -> Any:
        if dir == tmp_path / "full":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return contextlib.nullcontext()

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(cli.main.find(command), "callback", never)
    below, nowhere, there = tmp_path / "file" / "new", tmp_path / "full" / "new" / "out", tmp_path / "full" / "there"
    there.touch()
    for option, kind in outputs(command).items():
        cases = [(there, f"{there.parent}: Read-only")] if kind.exists else [(below, "file (allowed=a folder)")]
        if not kind.exists:
            cases.append((nowhere, f"{nowhere}: nothing can be written in {there.parent}: Read-only file system"))
            cases += [] if kind.is_folder else [(tmp_path, "is a directory")]
        for path, reason in cases:
            result = run(command, option, str(path))
            assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.stderr, result.stderr
            assert reason in result.stderr and isinstance(result.exception, SystemExit)
    assert not nowhere.parent.exists()


def test_findings_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("info", "--versions", "--json", str(tmp_path / "file" / "new"))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "Error: " in result.stderr and str(tmp_path / "file") in result.stderr
    assert run("info", "--json", str(tmp_path)).exit_code == 2


def test_what_can_be_written_is_not_made_before_it_is(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    assert run("c3", "--json", str(target)).exit_code == 0 and asked[0][0].json == target
    assert not list(tmp_path.iterdir())


def test_nothing_takes_the_place_of_a_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run("machines", "--json", str(pipe)).exit_code == 0
        assert pipe.is_fifo() and os.read(reader, 1) == b"["
    finally:
        os.close(reader)


@pytest.mark.parametrize("arguments", ["tune", "tune --study c3", "fused --keep"])
def test_what_is_kept_for_the_user_is_refused_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(running, "follow", lambda *_: pytest.fail("it was measured"))
    result = run(*arguments.split(), "--device", "cpu")
    assert result.exit_code == 2 and f"{tmp_path / 'file'} is a file (allowed=a folder)" in result.stderr


@pytest.mark.parametrize(
    "tool",
    ["asan --out", long("device_tests --summary"), long("measure_node --out"), long("torch_suite --page")],
)
def test_tools_refuse_what_cannot_be_written_before_anything_runs(tmp_path: Path, tool: str) -> None:
    (tmp_path / "file").touch()
    name, option = tool.split()
    line = [sys.executable, str(ROOT / "tools" / f"{name}.py"), option, str(tmp_path / "file" / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and f"argument {option}: " in done.stderr, done.stderr
    assert "is a file (allowed=a folder)" in done.stderr


def test_what_a_rank_refused_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, RankFailedError("rank 0 of 2 failed:\nTraceback ...", 0, "implementations: mpi"))
    result = run("c3")
    assert result.exit_code == 2
    assert "implementations: mpi" in result.output
    assert "Traceback ..." not in result.output


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    error = UnavailableError("no copy engines here")
    fail_with(monkeypatch, error)
    assert run("--traceback", "c3").exception is error


def test_info_as_json() -> None:
    result = run("info", "--json", "--no-probe")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["machine"]["cores"] >= 1
    assert found["software"]["sidelane"] == VERSION
    assert set(found["uses"]) >= {"ranks", "moves", "signals"}


@pytest.mark.parametrize(
    ("native", "module", "said"),
    [
        (True, "a module", "in C (compiled by cc)"),
        (True, None, "in Python, slower: compiled by cc"),
        (False, "", "NATIVE=0"),
    ],
)
def test_info_tells_how_calls_are_repeated(
    monkeypatch: pytest.MonkeyPatch, native: bool, module: Any, said: str
) -> None:
    from sidelane.config import Config, override
    from sidelane.native import Replays

    monkeypatch.setattr(info, "load_replays", lambda: Replays(module, "compiled by cc"))
    with override(Config(native=native)):
        assert said in info._repeats()


def test_info_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine with four GPUs would show, made up."""
    from sidelane.machine.inventory import Accelerators, InstalledGpu, Inventory

    gpus = tuple(InstalledGpu(i, "Example GPU", 141 << 30, 132, 3, 18, True, 700.0) for i in range(4))
    access = tuple(tuple((i, j) != (3, 0) for j in range(4)) for i in range(4))
    found = Accelerators("cuda", gpus, access, "580.1", "NCCL 2.28.9", True, False, ("a note",))
    monkeypatch.setattr(local, "inspect", lambda: Inventory("CPU", 64, 1 << 39, 1 << 38, found))
    monkeypatch.setattr(local, "device_type_and_count", lambda: ("cpu", 0))
    output = " ".join(run("info", "--no-probe").output.split())
    assert "141 GiB, 132 compute units, 3 copy engines, 18 links to a switch, 700 W at most" in output
    assert "missing for 3->0" in output
    assert "NCCL 2.28.9, copy engines possible" in output
    assert "a note" in output

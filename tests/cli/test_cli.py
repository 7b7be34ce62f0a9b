"""The command line: what it accepts, what it makes of it, and how it refuses."""

from __future__ import annotations

import contextlib
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

import sidelane
from goldens import check_golden, entries
from sidelane import cli
from sidelane.cli import info
from sidelane.cli.output import STDOUT
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.baselines import reference
from sidelane_lab.baselines.roster import check_asked
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.cli.collectives import CollectiveOptions, FusedOptions
from sidelane_lab.cli.demo import DEMO_WORKLOADS
from sidelane_lab.harness import launch, running
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.launch import RankFailedError
from sidelane_lab.machines.load import machine_names
from sidelane_lab.model import plan as sim_plan
from sidelane_lab.model.study import TABLE_II
from sidelane_lab.papers import command as claims
from sidelane_lab.papers import operator_results as sim_fused
from sidelane_lab.papers import overlap as sim_overlap
from sidelane_lab.papers import predictions as sim_study
from sidelane_lab.studies.host import HostOptions
from sidelane_lab.studies.tune import command as tune_command

ROOT = Path(__file__).resolve().parents[2]


LABORATORY = [name for name in cli.main.list_commands() if name not in ("info", "recorder")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="sidelane")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the studies; holds the options that they were called with."""
    seen = SimpleNamespace(collectives=None, c3=None, chain=None, host=None)
    monkeypatch.setattr(running, "run", lambda options: setattr(seen, options.study, options))
    return seen


def test_version():
    assert run("--version").output == f"sidelane {sidelane.__version__}\n"


def test_collective_options(asked: SimpleNamespace, tmp_path: Path):
    result = run(
        *("collective", "--collective", "all_reduce", "--collective", "broadcast", "--min-bytes", "1K"),
        *("--max-bytes", "1M", "--factor", "32", "--dtype", "float32", "--implementations", "dma, gloo"),
        *("--variants", "b2b,pcpy", "--launch", "eager", "--ranks", "3", "--device", "cpu", "--json"),
        *(str(tmp_path / "x.json"), "--iterations", "7", "--warmup", "1", "--report", str(tmp_path), "--timeout", "90"),
        *("--no-profile", "--place", "in"),
    )
    assert result.exit_code == 0, result.output
    options = asked.collectives
    assert options.collectives == (Kind.ALL_REDUCE, Kind.BROADCAST)
    assert options.sizes == (1 << 10, 32 << 10, 1 << 20)
    assert options.implementations == ("dma", "gloo")
    assert options.variants == ("b2b", "pcpy")
    assert options.launches == ("eager",)
    assert (options.dtype, options.ranks, options.repeats, options.warmup) == ("float32", 3, 7, 1)
    assert (options.json, options.report, options.timeout_s) == (tmp_path / "x.json", tmp_path, 90.0)
    assert options.places == ("in",)
    assert not options.profile


def test_lists(asked: SimpleNamespace):
    assert run("collective", "--device", "cpu").exit_code == 0
    assert asked.collectives.tensors == 1
    assert run("collective", "--device", "cpu", "--tensors", "8").exit_code == 0
    assert asked.collectives.tensors == 8
    assert "--tensors" in run("collective", "--help").output


def test_all_means_all_that_can_be_measured(asked: SimpleNamespace):
    run("collective", "--collective", "all", "--device", "cpu")
    assert set(asked.collectives.collectives) == set(reference.KINDS)


@pytest.mark.parametrize(
    ("words", "launches"), [((), ()), (("--launch", "all"), ()), (("--launch", "prelaunched"), ("prelaunched",))]
)
def test_chain_launches(asked: SimpleNamespace, words: tuple[str, ...], launches: tuple[str, ...]):
    result = run("chain", "--device", "cpu", "--variants", "b2b", *words)
    assert result.exit_code == 0, result.output
    assert (asked.chain.launches, asked.chain.variants) == (launches, ("b2b",))
    assert asked.chain.sizes == (1 << 20, 4 << 20)


def test_host_options(asked: SimpleNamespace):
    assert run("host", "--bytes", "2K", "--bytes", "1M", "--variants", "b2b", "--batches", "7").exit_code == 0
    assert asked.host == HostOptions(sizes=(2048, 1 << 20), variants=("b2b",), repeats=7)


def test_c3_options(asked: SimpleNamespace):
    result = run(
        *("c3", "mb1_896M", "--gemm", "cb2", "--gemm", "512,256,128", "--bytes", "1.5M", "--bytes", "1000"),
        *("--collective", "all_to_all", "--strategy", "serial", "--strategy", "conccl", "--dtype", "float16"),
    )
    assert result.exit_code == 0, result.output
    pairs = ("mb1_896M", "cb2_1.50M", "cb2_1000", "512x256x128_1.50M", "512x256x128_1000")
    assert tuple(text.replace("1.5M", "1.50M") for text in asked.c3.workloads) == pairs
    assert asked.c3.collectives == (Kind.ALL_TO_ALL,)
    assert asked.c3.strategies == ("serial", "conccl")
    assert asked.c3.dtype == "float16"


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the predictions; holds what they were called with. They return 3, which only claims pass on."""
    seen: list[tuple[Any, ...]] = []

    def stand_in(name: str) -> Any:
        return lambda *arguments: seen.append((name, *arguments)) or 3

    monkeypatch.setattr(sim_study, "c3_main", stand_in("c3"))
    monkeypatch.setattr(sim_study, "collective_main", stand_in("collective"))
    monkeypatch.setattr(sim_overlap, "main", stand_in("pipeline"))
    monkeypatch.setattr(claims, "main", stand_in("claims"))
    monkeypatch.setattr(sim_plan, "main", stand_in("plan"))
    monkeypatch.setattr(sim_fused, "main", stand_in("fused"))
    return seen


TO_ALL = (Kind.ALL_TO_ALL,)
WHOLE = tuple(TABLE_II)
OUT = Path("out")
SPAN = tuple(1 << power for power in range(10, 33, 2))


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("c3 --machine mi300x8", ("c3", "mi300x8", C3Options(workloads=WHOLE))),
        (
            "c3 --machine mi300x8 --version 002 --report out",
            ("c3", "mi300x8", C3Options(workloads=WHOLE, version="002", report=OUT)),
        ),
        (
            "c3 cb1_896M --machine m.toml --collective all_to_all",
            ("c3", "m.toml", C3Options(collectives=TO_ALL)),
        ),
        (
            "c3 cb1_896M --machine a40x4 --collective all_to_all --strategy priority --strategy c3_rp",
            ("c3", "a40x4", C3Options(collectives=TO_ALL, strategies=("priority", "c3_rp"))),
        ),
        (
            "c3 --gemm cb2 --bytes 1M --machine a40x4 --report out",
            ("c3", "a40x4", C3Options(workloads=("cb2_1M",), report=OUT)),
        ),
        ("collective --machine h200x4", ("collective", "h200x4", CollectiveOptions(sizes=SPAN))),
        (
            "collective --machine h200x4 --report out",
            ("collective", "h200x4", CollectiveOptions(sizes=SPAN, report=OUT)),
        ),
        ("pipeline --machine a40x4", ("pipeline", "a40x4", None, None)),
        ("pipeline --machine a40x4 --report out", ("pipeline", "a40x4", OUT, None)),
        (
            "plan --model llama-8b-like --machine a40x4 --fsdp",
            ("plan", sim_plan.PlanOptions("a40x4", "llama-8b-like", fsdp=True)),
        ),
        (
            "plan --model llama-8b --nodes 2..128 --report out",
            ("plan", sim_plan.PlanOptions("h100x8x2", "llama-8b-like", nodes="2..128", report=OUT)),
        ),
        (
            "plan --model llama-70b-like --machine m.toml --fsdp --tokens 4096 --sequence 2048 --layers 4 --json -",
            ("plan", sim_plan.PlanOptions("m.toml", "llama-70b-like", 4096, 2048, 4, fsdp=True, json=STDOUT)),
        ),
        (
            "plan --model 70b --machine 8xh100 --no-recompute",
            ("plan", sim_plan.PlanOptions("8xh100", "llama-70b-like", recompute=False)),
        ),
        ("fused --machine mi210x4", ("fused", "mi210x4", FusedOptions())),
        (
            "fused --machine m.toml --ops embedding_all_to_all --shape 1024,64,70 --shape 8,2,1 --occupancy 0.75"
            " --late 20 --report out --json -",
            (
                *("fused", "m.toml"),
                FusedOptions(
                    ops=("embedding_all_to_all",),
                    shapes=((1024, 64, 70), (8, 2, 1)),
                    occupancy=0.75,
                    late_us=20.0,
                    report=OUT,
                    json=STDOUT,
                ),
            ),
        ),
        ("claims", ("claims", claims.ClaimsOptions())),
        ("claims --json", ("claims", claims.ClaimsOptions(json=STDOUT, ranges=False))),
        ("claims --json - --ranges", ("claims", claims.ClaimsOptions(json=STDOUT))),
        ("claims --json --report out", ("claims", claims.ClaimsOptions(json=STDOUT, report=OUT))),
        ("pipeline --machine a40x4 --json x.json", ("pipeline", "a40x4", None, Path("x.json"))),
        ("c3 --machine a40x4 --json -", ("c3", "a40x4", C3Options(workloads=WHOLE, json=STDOUT))),
        ("collective --machine a40x4 --json -", ("collective", "a40x4", CollectiveOptions(sizes=SPAN, json=STDOUT))),
        (
            "claims --machine h200x4 --results out --version 002 --no-ranges",
            ("claims", claims.ClaimsOptions("h200x4", results=OUT, version="002", ranges=False)),
        ),
    ],
)
def test_predictions(asked: SimpleNamespace, predicted: list[tuple[Any, ...]], arguments: str, call: tuple[Any, ...]):
    result = run(*arguments.split())
    assert result.exit_code == (3 if arguments.startswith("claims") else 0), result.output
    assert predicted == [call]
    assert (asked.collectives, asked.c3) == (None, None)


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
        usage, _, *error, see = result.stderr.splitlines()
        assert usage.startswith("Usage: sidelane ") and all(text.startswith("Error: ") for text in error)
        assert see == f"See {' '.join(words[: 1 + is_command])} --help, docs/guide/commands.md"
        found[line] = "\n".join(error)
    check_golden("cli", found)


@pytest.mark.parametrize("command", ["c3", "collective", "pipeline", "claims"])
def test_machines_that_cannot_be_predicted(command: str, tmp_path: Path):
    def refused(machine: str) -> str:
        result = run(command, "--machine", machine)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        return result.output

    assert "no such file" in refused(str(tmp_path / "mine.toml"))
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "mi300x8"\nname = "mine"\n\n[links]\nusable_gpbs = 46\n', encoding="utf-8")
    assert f"{mine}:5: links.usable_gpbs: unknown name (allowed=topology, peak_gbps" in refused(str(mine))
    mine.write_text('base = "mi300x8"\nname = "mine"\n[gpu]\nmemory_gbps = 0\n', encoding="utf-8")
    assert f"{mine}:4: gpu.memory_gbps: (value=0, allowed=10 to 100000" in refused(str(mine))
    mine.write_bytes(b"\xff\xfe")
    assert "cannot be read as text" in refused(str(mine))


def test_a_users_machine_is_predicted(tmp_path: Path):
    mine = tmp_path / "mine.json"
    mine.write_text('{"base": "mi300x8", "name": "mine", "title": "My GPUs"}', encoding="utf-8")
    result = run("c3", "--machine", str(mine), "cb1_896M", "--collective", "all_gather")
    assert result.exit_code == 0, result.output
    assert "My GPUs" in result.output and "cb1_896M" in result.output


def test_the_catalogue():
    shown, listed = run("machines"), run("machines", "--json")
    assert shown.exit_code == listed.exit_code == 0
    assert tuple(row["name"] for row in json.loads(listed.output)) == machine_names()
    assert all(name in shown.output for name in machine_names())


def test_demo_measures_where_there_are_gpus(asked: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "choose_target", lambda ranks, device: SimpleNamespace(on_cpu=False))
    result = run("demo", "--report", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "This machine" in result.output
    assert asked.c3.report == tmp_path
    assert asked.c3.workloads == DEMO_WORKLOADS


def test_a_name_of_some_of_the_collectives_is_fine():
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


def test_what_happens_on_the_way_is_not_the_users_fault(monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, UnavailableError("no copy engines here"))
    result = run("c3")
    assert (result.exit_code, result.output) == (1, "Error: no copy engines here\nSee docs/guide/errors.md\n")


def test_a_folder_that_cannot_be_made_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    monkeypatch.setattr(sim_overlap, "main", lambda *_: (path.touch(), (path / "report").mkdir()))  # came meanwhile
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


def test_what_can_be_written_is_not_made_before_it_is(asked: SimpleNamespace, tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    assert run("c3", "--json", str(target)).exit_code == 0 and asked.c3.json == target
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
    for module in (running, tune_command):
        monkeypatch.setattr(module, "follow", lambda *_: pytest.fail("it was measured"))
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


def test_what_a_rank_refused_is(monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, RankFailedError("rank 0 of 2 failed:\nTraceback ...", 0, "implementations: mpi"))
    result = run("c3")
    assert result.exit_code == 2
    assert "implementations: mpi" in result.output
    assert "Traceback ..." not in result.output


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch):
    error = UnavailableError("no copy engines here")
    fail_with(monkeypatch, error)
    assert run("--traceback", "c3").exception is error


def test_info_as_json():
    result = run("info", "--json", "--no-probe")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["machine"]["cores"] >= 1
    assert found["software"]["sidelane"] == sidelane.__version__
    assert set(found["uses"]) >= {"ranks", "moves", "signals"}


@pytest.mark.parametrize(
    ("native", "module", "said"),
    [
        (True, "a module", "in C (compiled by cc)"),
        (True, None, "in Python, slower: compiled by cc"),
        (False, "", "NATIVE=0"),
    ],
)
def test_info_tells_how_calls_are_repeated(monkeypatch: pytest.MonkeyPatch, native: bool, module: Any, said: str):
    from sidelane.config import Config, override
    from sidelane.native import Replays

    monkeypatch.setattr(info, "load_replays", lambda: Replays(module, "compiled by cc"))
    with override(Config(native=native)):
        assert said in info._repeats()


def test_info_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch):
    """What a machine with four GPUs would show, made up."""
    from sidelane.machine.inventory import Accelerators, InstalledGpu, Inventory

    gpus = tuple(InstalledGpu(i, "Example GPU", 141 << 30, 132, 3, 18, True, 700.0) for i in range(4))
    access = tuple(tuple((i, j) != (3, 0) for j in range(4)) for i in range(4))
    found = Accelerators("cuda", gpus, access, "580.1", "NCCL 2.28.9", True, False, ("a note",))
    monkeypatch.setattr(info.local, "inspect", lambda: Inventory("CPU", 64, 1 << 39, 1 << 38, found))
    monkeypatch.setattr(info.local, "device_type_and_count", lambda: ("cpu", 0))
    output = " ".join(run("info", "--no-probe").output.split())
    assert "141 GiB, 132 compute units, 3 copy engines, 18 links to a switch, 700 W at most" in output
    assert "missing for 3->0" in output
    assert "NCCL 2.28.9, copy engines possible" in output
    assert "a note" in output

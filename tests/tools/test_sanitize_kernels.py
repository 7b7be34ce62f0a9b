"""The tool that runs kernels under compute-sanitizer: what it runs, and what it makes of reports. No GPU."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

import sidelane.kernels
from sidelane.execute.cuda import reduce
from sidelane.program.kernel import Protocol

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("sanitize_kernels")
    finally:
        sys.path.remove(str(TOOLS))


# --- cases ------------------------------------------------------------------------------------------------------------


def test_every_kernel_protocol_and_dtype_has_cases(tool: ModuleType) -> None:
    from sanitizer.cases import DTYPES, RANKS, Case, cases
    from sanitizer.places import Imagined, set_up

    every = cases()
    kernels = {reduce.KERNEL}
    for module in pkgutil.iter_modules(sidelane.kernels.__path__):
        loaded = importlib.import_module(f"sidelane.kernels.{module.name}")
        kernels |= set(getattr(loaded, "KERNELS", ()))
    found: dict[Any, list[Case]] = {}
    for case in every:
        launch = set_up(case, Imagined()).launches[0]
        form = (launch.kernel, bool(launch.constants.get("TABLE")), bool(launch.constants.get("OP")))
        found.setdefault(form, []).append(case)
    assert {kernel for kernel, *_ in found} == kernels
    listed = {kernel for kernel in kernels if "TABLE" in kernel.arg_names}
    assert {kernel for kernel, has_table, _ in found if has_table} == listed
    for (kernel, _, reduces), cases_of_it in found.items():
        least = {4, 8} if "relay" in kernel.__name__ else set(RANKS)
        assert {case.ranks for case in cases_of_it} >= least, kernel
        assert {case.odd or case.listed for case in cases_of_it} >= {True}, kernel
        if reduces:
            assert {case.dtype for case in cases_of_it} == set(DTYPES), kernel
    programs = [case.program() for case in every if case.kind != "reduce"]
    assert {program.protocol for program in programs} == set(Protocol)
    narrow = {"one_shot_narrow", "two_shot_narrow", "two_shot_push"}
    assert {program.variant for program in programs} == {"one_shot", "two_shot"} | narrow
    assert len(set(every)) == len(every)


def test_all_ranks_have_room_on_one_gpu_and_one_launch_can_be_made_of_theirs(tool: ModuleType, tmp_path: Path) -> None:
    from sanitizer.cases import MOST_BLOCKS, cases
    from sanitizer.places import Imagined, set_up
    from sanitizer.together import join

    different = 0
    for case in cases():
        launches = set_up(case, Imagined()).launches
        assert sum(launch.blocks for launch in launches) <= MOST_BLOCKS, case
        joined, table = join(launches, tmp_path)
        assert table.tolist() == [list(launch.arguments) for launch in launches]
        assert (joined.blocks, joined.warps) == (launches[0].blocks, launches[0].warps)
        constants = set(launches[0].constants)
        assert {name.rpartition("_")[0] for name in joined.constants} == constants
        different += len(joined.constants) > len(constants)
    assert different  # ranks whose addresses are not alike


def test_results_are_exact_and_differ_from_call_to_call(tool: ModuleType) -> None:
    from sanitizer.cases import DTYPES, Case
    from sanitizer.places import draw, wanted
    from sidelane.program.collective import ReduceOp

    for dtype in DTYPES:
        for op in ReduceOp:
            case = Case("reduce_scatter", "one_shot", 4, (50,), dtype=dtype, op=op)
            first, second = draw(case, 0, 0), draw(case, 0, 1)
            parts = [tensor.double()[50:100] for tensor in first]
            result = wanted(case, first, 1)
            assert str(result.dtype) == f"torch.{dtype}"
            if op in ("sum", "avg"):
                assert (result.double() * (4 if op == "avg" else 1)).equal(sum(parts[1:], parts[0]))
            assert not result.equal(wanted(case, second, 1))


# --- reports ----------------------------------------------------------------------------------------------------------

# As compute-sanitizer 2025.3.1 wrote them about what is planted, on an H100.

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_OF_RACES = (
    "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
BEYOND = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _fill+0xa0 in planted.py:53
=========     by thread (127,0,0) in block (0,0,0)
=========     Access to 0x7fb03ac001fc is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7fb03ac00000 of size 508 bytes
========= 
========= ERROR SUMMARY: 1 error
"""  # noqa: W291
UNWRITTEN = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 1 bytes
=========     at together__block_flags_17_01+0x10d0 in memory.py:50
=========     by thread (224,0,0) in block (25,1,0)
=========     Address 0x7f3854d24fe1
========= 
========= Uninitialized __global__ memory read of size 1 bytes
=========     at together__block_flags_17_01+0x10d0 in memory.py:50
=========     by thread (224,0,0) in block (25,0,0)
=========     Address 0x7f3854c493e1
========= 
========= ERROR SUMMARY: 2 errors
"""  # noqa: W291
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _race_in_shared_memory+0xa0 in planted.py:72
=========     and Read access at _race_in_shared_memory+0xc0 in planted.py:72 [512 hazards]
========= 
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""  # noqa: W291
BARRIER = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at _barrier_of_some+0x50 in planted.py:99
=========     by thread (0,0,0) in block (0,0,0)
========= 
========= ERROR SUMMARY: 16 errors
"""  # noqa: W291
UNATTACHED = """\
========= COMPUTE-SANITIZER
========= Error: No attachable process found. compute-sanitizer timed-out.
========= Default timeout can be adjusted with --launch-timeout. Awaiting target completion.
"""


def test_reports_are_read(tool: ModuleType) -> None:
    from sanitizer.report import parse

    assert parse(CLEAN).clean and parse(CLEAN_OF_RACES).clean
    assert [parse(text).errors for text in (BEYOND, UNWRITTEN, RACE, BARRIER)] == [1, 2, 1, 16]
    first = parse(BEYOND).first
    assert first.startswith(
        "Invalid __global__ write of size 4 bytes; at _fill+0xa0 in planted.py:53; by thread (127,0,0)"
    )
    assert first.endswith("is 1 bytes after the nearest allocation at 0x7fb03ac00000 of size 508 bytes")
    assert parse(UNWRITTEN).first.endswith("by thread (224,0,0) in block (25,1,0); Address 0x7f3854d24fe1")
    assert parse(RACE).first.endswith("and Read access at _race_in_shared_memory+0xc0 in planted.py:72 [512 hazards]")
    assert parse(BARRIER).first.startswith("Barrier error detected. Divergent thread(s) in warp.; at")


def test_what_is_no_error_is_not_clean_either(tool: ModuleType) -> None:
    from sanitizer.report import parse

    warned = parse(RACE.replace("1 error, 0 w", "0 errors, 1 w"))
    assert (warned.errors, warned.warnings, warned.clean) == (0, 1, False)
    unattached = parse(UNATTACHED)
    assert unattached.errors is None and "No attachable process" in unattached.trouble and not unattached.first
    ended_badly = parse("========= COMPUTE-SANITIZER\n========= Target application returned an error\n" + CLEAN)
    assert ended_badly.errors == 0 and not ended_badly.clean
    assert parse("========= COMPUTE-SANITIZER\n").errors is None


# --- processes --------------------------------------------------------------------------------------------------------

FAKE = f"""#!{sys.executable}
import json, pathlib, sys, time
words = sys.argv[1:]
if words == ["--version"]: sys.exit("Version 0")
value = lambda name: words[words.index(name) + 1]
log, tool = pathlib.Path(value("--log-file")), value("--tool")
if "--plant" in words:
    log.write_text({BEYOND!r} if value("--plant") != "gap" else {CLEAN!r})
    sys.exit()
numbers = [int(word) for word in value("--numbers").split(",")]
def say(**what):
    with open(value("--progress"), "a") as file: file.write(json.dumps(what) + "\\n")
for number in numbers:
    say(case=number, state="begun")
    if tool == "memcheck" and number == 25 and value("--way") == "apart": time.sleep(60)
    if tool == "initcheck" and number == 30: sys.exit("no luck")
    wrong = "wrong result: x" if (tool, number) == ("racecheck", 7) else ""
    say(case=number, state="ended", seconds=0.5, problem=wrong)
log.write_text({BEYOND!r} if 11 in numbers and tool == "memcheck" else {CLEAN!r})
"""


def test_findings_are_one_cases_and_time_outs_are_told(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sanitizer import jobs
    from sanitizer.cases import cases
    from sanitizer.rows import is_bad, table

    program = tmp_path / "compute-sanitizer"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jobs, "CASE_S", 1.0)
    monkeypatch.setattr(tool.Study, "_compile", lambda self, ways: None)
    study = tool.Study(tmp_path, ["memcheck", "racecheck", "initcheck"], "", 6, time.monotonic() + 60)
    study.run("auto")
    rows = [row for row in study.rows if row["variant"] != "planted"]
    assert len(rows) == 3 * len(cases())
    bad = [row for row in rows if is_bad(row)]
    assert sorted((row["tool"], row["errors"]) for row in bad) == [
        ("initcheck", None),
        ("memcheck", 1),
        ("racecheck", 0),
    ]
    by_tool = {row["tool"]: row for row in bad}
    assert by_tool["memcheck"]["first_error"].startswith("Invalid __global__ write")
    assert "wrong result" in by_tool["racecheck"]["note"] and "no luck" in by_tool["initcheck"]["note"]
    again = [row for row in rows if row["tool"] == "memcheck" and "one launch for all ranks" in row["note"]]
    assert len(again) == 1 and again[0]["errors"] == 0
    mistakes = [row for row in study.rows if row["variant"] == "planted"]
    assert [row["kernel"] for row in mistakes if is_bad(row)] == ["block_flags"]
    assert "ll " in table(study.rows) and "NOT FOUND" in table(study.rows)


@pytest.mark.parametrize(("text", "verdict"), [(CLEAN_OF_RACES, "not seen, as expected"), (UNATTACHED, "NOT RUN")])
def test_a_tool_that_did_not_come_to_its_end_has_judged_nothing(tool: ModuleType, text: str, verdict: str) -> None:
    from sanitizer.jobs import Job, Outcome
    from sanitizer.report import parse
    from sanitizer.rows import is_bad, row_of_planted

    row = row_of_planted(Job("racecheck", "together", planted="global_race"), Outcome(parse(text), {}, None, "", 1.0))
    assert verdict in row["note"] and is_bad(row) == (text is UNATTACHED)


def test_what_is_out_of_time_is_a_row_that_says_so(tool: ModuleType, tmp_path: Path) -> None:
    study = tool.Study(tmp_path, ["memcheck"], "push", 2, time.monotonic() - 1)
    study._compile = lambda ways: None
    study.run("apart")
    assert study.rows and all(row["errors"] is None and "not run" in row["note"] for row in study.rows)


def test_without_a_gpu_it_says_so(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitize_kernels.py"])
    assert tool.main() == 2
    assert "a GPU and compute-sanitizer are needed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["sanitize_kernels.py", "--list"])
    assert tool.main() == 0
    assert "direct_reduce all_reduce two_shot_narrow 8" in capsys.readouterr().out


def test_the_file_says_what_the_tools_cannot_judge(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sanitizer import jobs, rows

    program = tmp_path / "compute-sanitizer"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setattr(jobs, "find_sanitizer", lambda: str(program))
    monkeypatch.setattr(rows.provenance, "accelerator_name", lambda: ("NVIDIA H100 80GB HBM3", 1))
    rows.write(tmp_path / "new" / "sanitizer.json", [])
    content = json.loads((tmp_path / "new" / "sanitizer.json").read_text())
    assert content["machine"] == "h100x1" and content["study"] == "sanitizer"
    assert "shared memory only" in content["limits"]["racecheck"] and "flags between ranks" in content["limits"]["all"]

"""Result files: what they accept, and that they come back as they went."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidelane_lab.harness import provenance
from sidelane_lab.harness import running as study
from sidelane_lab.harness import study as results
from sidelane_lab.harness.study import Results, collect, read, write
from sidelane_lab.studies.c3.rows import C3Row
from sidelane_lab.studies.chain import ChainRow
from sidelane_lab.studies.collectives import CollectiveRow, bus_gbps
from sidelane_lab.studies.host import STUDY, HostRow
from sidelane_lab.studies.ordinary import OrdinaryRow

COLLECTIVE = CollectiveRow(
    "all_gather", 1024, "bfloat16", False, "eager", "dma", "b2b", False, 12.345678, 11.0, 14.0, 0.25, None, True
)
C3 = C3Row(
    *("cb1", 8192, 8192, 8192, "bfloat16", "all_gather", 896 << 20, "C-long", "conccl", ""),
    *(1410.0, 1850.0, 1840.0, 1860.0, 1.747, 1.766, 97.5, 110.0, True, "b2b in place"),
)
CHAIN = ChainRow(
    *(1 << 20, "bfloat16", True, "prelaunched", "dma", "b2b"),
    *(12.5, 31.0, 30.0, 32.0, True),
)
HOST = HostRow("trigger", 1024, "dma", "b2b", True, None, 4.71, 4.5, 5.25, 4.4, True)
ORDINARY = OrdinaryRow(**COLLECTIVE.to_dict(), reach="mapped", host_us=4.5)
COLLECTIVE_KEYS = [
    *("collective", "bytes", "dtype", "in_place", "launch", "implementation", "variant", "prelaunch"),
    *("time_us", "p10_us", "p90_us", "bus_gbps", "energy_mj", "correct"),
]
STRATEGIES = ["serial", "c3_base", "c3_sp", "conccl", "nccl_ce", "auto"]
ROOT = Path(__file__).resolve().parents[2]
C3_KEYS = [
    *("gemm", "m", "n", "k", "dtype", "collective", "bytes", "class", "strategy", "chosen"),
    *("gemm_us", "comm_us", "best_comm_us", "time_us", "speedup", "ideal"),
    *("percent_of_ideal", "percent_of_ideal_nccl"),
]


@pytest.mark.parametrize(
    ("study", "row"),
    [("collectives", COLLECTIVE), ("c3", C3), ("chain", CHAIN), ("host", HOST), ("ordinary", ORDINARY)],
)
def test_files_come_back(tmp_path: Path, study: str, row: C3Row | ChainRow | CollectiveRow | HostRow):
    written = collect(study, [row], device_type="cpu", ranks=2, command="sidelane something")
    path = write(tmp_path / "deep" / "file.json", written)
    back = read(path)
    assert dataclasses.replace(back, rows=()) == dataclasses.replace(written, rows=())
    assert [other.to_dict() for other in back.rows] == [row.to_dict()]
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_the_keys_that_other_tools_read():
    content = collect("c3", [C3], device_type="cpu", ranks=2, command="x").to_dict()
    assert {"study", "machine", "gpus", "date", "commit", "command", "software", "rows"} <= set(content)
    assert (content["machine"], content["gpus"], content["ranks"]) == ("cpu", 0, 2)
    assert list(C3.to_dict())[: len(C3_KEYS)] == C3_KEYS
    assert list(COLLECTIVE.to_dict())[: len(COLLECTIVE_KEYS)] == COLLECTIVE_KEYS and C3.to_dict()["class"] == "C-long"
    assert COLLECTIVE.to_dict()["time_us"] == 12.346


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch": "lazy"}, "launch"),
        ({"implementation": "mpi"}, "implementation"),
        ({"bytes": -1}, "bytes"),
        ({"time_us": float("nan")}, "time_us"),
        ({"time_us": None}, "note"),
        ({"correct": False}, "wrong result"),
        ({"tensors": 0}, r"tensors \(value=0, allowed=1 and more\)"),
    ],
)
def test_rows_refuse(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(COLLECTIVE, **change)


def test_rows_of_ordinary_memory_are_those_of_collectives_and_more():
    assert list(ORDINARY.to_dict())[: len(COLLECTIVE_KEYS)] == COLLECTIVE_KEYS
    for change, message in (({"reach": "near"}, "reach"), ({"gemm": "cb1"}, "speedup"), ({"correct": False}, "wrong")):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(ORDINARY, **change)


def test_only_chains_are_prelaunched():
    for row, launch in ((COLLECTIVE, "prelaunched"), (CHAIN, "lazy")):
        with pytest.raises(ValueError, match="launch"):
            dataclasses.replace(row, launch=launch)


def test_a_wrong_result_is_a_row_without_a_time():
    row = dataclasses.replace(COLLECTIVE, correct=False, time_us=None, bus_gbps=None, note="byte 7 of rank 1 differs")
    assert CollectiveRow.from_dict(row.to_dict()) == row


def test_rows_of_older_files_are_of_one_tensor():
    older = {key: value for key, value in COLLECTIVE.to_dict().items() if key != "tensors"}
    assert CollectiveRow.from_dict(older).tensors == 1
    listed = dataclasses.replace(COLLECTIVE, tensors=8, time_us=12.5)
    assert listed.to_dict()["tensors"] == 8 and CollectiveRow.from_dict(listed.to_dict()) == listed


@pytest.mark.parametrize(
    ("variant", "separate"), [("separate", True), ("window+separate", True), ("b2b+graph", False), ("", False)]
)
def test_separate_calls_are_told_by_their_variant(variant: str, separate: bool):
    assert dataclasses.replace(COLLECTIVE, tensors=8, variant=variant).separate is separate


def test_rows_refuse_other_keys():
    row = COLLECTIVE.to_dict()
    with pytest.raises(ValueError, match="unknown=\\['extra'\\]"):
        CollectiveRow.from_dict({**row, "extra": 1})
    del row["dtype"]
    with pytest.raises(ValueError, match="missing=\\['dtype'\\]"):
        CollectiveRow.from_dict(row)


def test_rows_of_another_study_are_refused():
    with pytest.raises(ValueError, match="C3Row"):
        collect("collectives", [C3], device_type="cpu", ranks=2)


@pytest.mark.parametrize("text", ["", "[]", '{"study": "other", "rows": []}', '{"study": "c3", "rows": [{"m": 1}]}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    good = collect("c3", [C3], device_type="cpu", ranks=2, command="x")
    path = write(tmp_path / "c3.json", good)
    before = path.read_text()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(results.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write(path, good)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_bus_bandwidth_is_that_of_nccl_tests():
    # 1 GB in 10 ms are 100 GB/s of "algorithm bandwidth"; its PERFORMANCE.md gives the factors.
    factors = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75, "broadcast": 1.0}
    for collective, factor in factors.items():
        assert bus_gbps(collective, 10**9, 4, 10_000.0) == pytest.approx(100 * factor)


def git_that_answers(monkeypatch: pytest.MonkeyPatch, *, toplevel: Path, changed: str = "") -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        answers = {"--show-toplevel": str(toplevel), "HEAD": "0123abc", "--porcelain": changed}
        asked = next(answer for argument, answer in answers.items() if argument in command)
        return subprocess.CompletedProcess(command, 0, stdout=f"{asked}\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("SIDELANE_COMMIT", raising=False)


def test_commit_of_this_checkout(monkeypatch: pytest.MonkeyPatch):
    checkout = Path(__file__).resolve().parents[2]
    git_that_answers(monkeypatch, toplevel=checkout)
    assert provenance.commit() == "0123abc"
    git_that_answers(monkeypatch, toplevel=checkout, changed=" M README.md")
    assert provenance.commit() == "0123abc-dirty"


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch):
    def without_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", without_git)
    monkeypatch.delenv("SIDELANE_COMMIT", raising=False)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("SIDELANE_COMMIT", "abc123")
    assert provenance.commit() == "abc123"


def test_commit_of_somebody_elses_repository_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    git_that_answers(monkeypatch, toplevel=tmp_path)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("SIDELANE_COMMIT", "ours")
    assert provenance.commit() == "ours"


def test_the_command_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    arguments = ["c3", "--json", "/home/me/out/c3.json", "--report=/home/me/r", "--gemm", "a b", "results/x.json"]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/sidelane", *arguments])
    expected = "sidelane c3 --json c3.json --report=r --gemm 'a b' results/x.json"
    assert provenance.command_line() == expected


def test_results_need_a_known_study():
    with pytest.raises(ValueError, match="study"):
        Results("other", "cpu", 0, "cpu", 2, "now", "unknown", "x", {}, ())
    assert json.dumps(collect("c3", [], device_type="cpu", ranks=1, command="x").to_dict())


@pytest.fixture(scope="module")
def recorded_c3() -> dict[tuple[str, int, str], dict[str, C3Row]]:
    """Rows of the recorded C3 study by pair and strategy."""
    cases: dict[tuple[str, int, str], dict[str, C3Row]] = {}
    for row in read(ROOT / "results" / "h200x4" / "c3.json").rows:
        assert isinstance(row, C3Row)
        case = cases.setdefault((row.gemm, row.bytes, row.collective), {})
        assert row.strategy not in case
        case[row.strategy] = row
    return cases


def test_the_recorded_c3_study_holds_every_strategy_of_every_pair(recorded_c3):
    pairs = [("cb1", 512 << 20), ("cb1", 896 << 20), ("cb2", 896 << 20), ("mb1", 896 << 20)]
    assert list(recorded_c3) == [(*pair, kind) for pair in pairs for kind in ("all_gather", "all_to_all")]
    for case in recorded_c3.values():
        assert list(case) == STRATEGIES
        for row in case.values():
            assert row.correct
            assert row.time_us is not None
            assert row.percent_of_ideal is not None
            assert row.percent_of_ideal_nccl is not None


def test_the_recorded_collectives_hide_behind_the_gemm(recorded_c3):
    """At least 85% of the strict ideal on average; where the GEMM ran slower alone than beside, not more than 100."""
    reached = [min(100.0, case["conccl"].percent_of_ideal) for case in recorded_c3.values()]
    assert sum(reached) / len(reached) >= 85.0
    for name in ("c3_base", "c3_sp"):
        assert max(case[name].percent_of_ideal for case in recorded_c3.values()) < min(reached)


def test_a_study_that_is_ended_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGTERM, which is what ``timeout`` sends."""

    def ranks(*_: object, progress: Callable[[str], None], **__: object) -> None:
        progress(json.dumps({"row": HOST.to_dict()}))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(study, "run_ranks", ranks)
    path = tmp_path / "host.json"
    options = study.StudyOptions(device="cpu", ranks=1, json=path, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        study.run_study(STUDY, options)
    assert list(read(path).rows) == [HOST] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

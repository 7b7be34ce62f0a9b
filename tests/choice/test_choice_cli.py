"""``sidelane tune`` and ``sidelane explain``: what they accept, what they print, how they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from homeless import leave_home

from sidelane import cli
from sidelane.choice import Candidate
from sidelane.choice.key import key_here
from sidelane.choice.profile import parse
from sidelane.choice.store import builtin, user_file
from sidelane.cli import info
from sidelane.program.collective import Kind
from sidelane.program.kernel import Protocol
from sidelane.user_files import write_whole
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.explain import call as explaining
from sidelane_lab.explain.call import explain
from sidelane_lab.harness.launch import LaunchTarget
from sidelane_lab.sdma import disassemble
from sidelane_lab.studies.tune import command as tune


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_tune_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = SimpleNamespace()
    monkeypatch.setattr(tune, "main", lambda options: setattr(seen, "options", options))
    assert run("tune", "--device", "cpu").exit_code == 0
    assert set(seen.options.collectives) == set(Kind) - {Kind.SCATTER, Kind.GATHER}
    assert (seen.options.quick, seen.options.budget_s, seen.options.output) == (False, None, None)
    where = tmp_path / "x.json"
    assert run("tune", "--collective", "all_gather", "--quick", "--seconds", "5", "--output", str(where)).exit_code == 0
    assert seen.options.collectives == (Kind.ALL_GATHER,)
    assert (seen.options.quick, seen.options.budget_s, seen.options.output) == (True, 5.0, where)


def test_without_a_home_what_would_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_home(monkeypatch)
    assert run("explain", "all_gather", "64K").exit_code == 0
    assert ("note", "no profile of this user is looked for: this user has no home") in info.look(probe=False).uses
    for command in (("tune",), ("tune", "--study", "c3"), ("fused", "--keep")):
        refused = run(*command, "--device", "cpu")
        assert refused.exit_code != 0 and "this user has no home" in refused.output, refused.output
        assert "XDG_CONFIG_HOME as an absolute path" in refused.output
        assert ("--output" in refused.output) == (command[0] == "tune")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_that_the_machine_does_not_know_sees_what_it_offers() -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-m", "sidelane", "info", "--no-probe"]
    nobody = {"user": 54321, "group": 54321, "extra_groups": ()}
    try:
        seen = subprocess.run(command, env=env, **nobody, capture_output=True, text=True, timeout=120)
    except PermissionError:
        pytest.skip("others cannot run this Python")
    if "Permission denied" in seen.stderr:
        pytest.skip("others cannot read what runs here")
    assert seen.returncode == 0 and "this user has no home" in seen.stdout, seen.stderr


@pytest.mark.parametrize("machine", ["h200x2", "h200x4"])
def test_a_table_from_results(tmp_path: Path, machine: str):
    results = Path(__file__).parents[2] / "results" / machine / "collectives.json"
    assert "needs --output" in run("tune", "--from-results", str(results)).output
    made = run("tune", "--from-results", str(results), "--output", str(tmp_path / "t.json"))
    assert made.exit_code == 0, made.output
    assert parse((tmp_path / "t.json").read_text()) == builtin(machine)
    (tmp_path / "no.json").write_text("{}")
    refused = run("tune", "--from-results", str(tmp_path / "no.json"), "--output", str(tmp_path / "t.json"))
    assert refused.exit_code == 2 and "not a result file" in refused.output


def test_explain_on_a_machine_without_gpus_what_four_h200s_would_do():
    shown = run(
        "explain", "all_gather", "16M", "--machine", "h200x4", "--in-place", "--beside", "compute", "--commands"
    )
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    for text in (
        "all_gather of 16M among 4 ranks, bfloat16, in place, eager, beside compute on 4 x NVIDIA H200 by the built-in",
        "auto takes copy engines (dma ",
        "us expected",
        "built-in table h200x4",
        "takes compute units from what runs beside it",
        f"{3 * _halves(words)} peer copies",
        "stream 0",
    ):
        assert text in words


def test_a_computation_of_known_time_is_weighed() -> None:
    given = ("explain", "all_gather", "64K", "--machine", "h200x4", "--in-place")
    short, long = (run(*given, "--beside-us", us).output.replace("\n", " ") for us in ("2", "5000"))
    assert "beside compute of 2 us on 4 x NVIDIA H200" in short
    assert "auto takes a kernel (sm one_shot)" in short and "us expected with compute of 2 us" in short
    assert "auto takes copy engines (dma" in long and "expected with compute of 5000 us" in long
    assert "exclude each other" in run(*given, "--beside-us", "5", "--beside", "compute").output


def _halves(words: str) -> int:
    """Copies to each peer. Whole ones and halves are about as fast here: the table may say either."""
    return 2 if "auto takes copy engines (dma striped)" in words else 1


@pytest.mark.parametrize("call", ["all_to_all 64K --in-place", "all_reduce 1M", "broadcast 64K --graph", "gather 4K"])
def test_explain_shows_the_packets_of_copy_engines(call: str):
    given = ("explain", *call.split(), "--machine", "mi300x8", "--packets")
    shown = json.loads(run(*given, "--json", "-").stdout)
    assert "packets of gfx942, from public headers: never run on AMD hardware" in shown["notes"]
    listed = {
        place["to"]: [line.strip() for line in place["what"] if line.startswith("    0x")]
        for place in shown["submitted"]
        if "packets," in place["to"]
    }
    assert len(listed) == len(shown["packets"]) > 0
    for queue, (place, lines) in zip(shown["packets"], listed.items(), strict=True):
        data = bytes.fromhex(queue["bytes"])
        assert place == f"engine {queue['engine']}: {len(lines)} packets, {len(data)} bytes"
        assert disassemble(data).splitlines() == lines
    others = [place["to"] for place in shown["submitted"] if place["to"] not in listed]
    assert others == (["engine compute:0, which takes no packets"] if "reduce" in call else [])
    assert "until >= value=1" in run(*given).output or "--graph" in call


@pytest.mark.parametrize(
    ("machine", "text"),
    [("h200x4", "needs --machine mi300x8"), ("a100-40x4", "MI300X or"), ("mi300x8x2", "one node of")],
)
def test_explain_has_packets_of_one_family_only(machine: str, text: str):
    refused = run("explain", "all_gather", "64K", "--machine", machine, "--packets")
    assert refused.exit_code == 2 and text in refused.output
    assert (
        json.loads(run("explain", "all_gather", "64K", "--machine", "mi300x8", "--json", "-").stdout)["packets"] == []
    )


@pytest.mark.parametrize("kind", [Kind.REDUCE_SCATTER, Kind.ALL_REDUCE])
def test_explain_knows_what_ordinary_memory_costs(kind: Kind):
    symmetric, ordinary = (
        explain(ExplainOptions(kind=kind, nbytes=64 << 20, captured=True, machine="h200x4", ordinary=ordinary)).choice
        for ordinary in (False, True)
    )
    assert "symmetric memory" not in symmetric.reason and "symmetric memory" in ordinary.reason
    kernel = Candidate("sm", "one_shot" if kind is Kind.REDUCE_SCATTER else "two_shot")
    assert (dict(symmetric.table)[kernel] or 0) + 40 < (dict(ordinary.table)[kernel] or 0)


def test_explain_a_list():
    arguments = ("explain", "all_gather", "64K", "--machine", "h200x4", "--in-place", "--tensors", "10", "--commands")
    shown = run(*arguments)
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    assert "auto takes a kernel (sm one_shot): a list of tensors: one kernel for all" in words
    assert "160K from rank to rank" in words
    shown = run(*arguments, "--beside", "compute")
    words = " ".join(shown.output.split())
    assert "all_gather of 640K among 4 ranks, bfloat16, 10 tensors, in place" in words
    assert f"{10 * 3 * _halves(words)} peer copies" in words
    for machine in ("cpu", "mi300x8"):
        assert explain(ExplainOptions(kind=Kind.ALL_REDUCE, nbytes=1000, machine=machine, tensors=3)).submitted


@pytest.mark.parametrize(
    ("arguments", "on", "by"),
    [
        ("", "2 CPU processes of this machine, which has fewer than two GPUs", "the built-in table cpu (2"),
        ("--world-size 4", "4 CPU processes of this machine", "the built-in table cpu (2"),
        ("--machine cpu", "2 CPU processes\n", "the built-in table cpu (2"),
        ("--machine h200x4", "4 x NVIDIA H200\n", "the built-in table h200x4 (2"),
        ("--machine h200x4 --world-size 8", "8 x NVIDIA H200\n", "the built-in table h200x4 (2"),
        ("--machine mi300x8", "8 x AMD Instinct MI300X\n", "the simulator: predicted"),
        ("--machine mi300x8 --world-size 4", "4 ranks of 8 x AMD Instinct MI300X\n", "the simulator: predicted"),
    ],
)
def test_explain_says_on_what_first(monkeypatch: pytest.MonkeyPatch, arguments: str, on: str, by: str):
    monkeypatch.setattr(explaining, "choose_target", lambda: LaunchTarget("cpu", 2))
    shown = run("explain", "all_gather", "64K", *arguments.split())
    assert shown.exit_code == 0, shown.output
    answer, *reasons = shown.output.split("\n")
    # Kernels of the library are predicted for all GPUs of a node, and faster at this size.
    keeps_library = arguments.endswith("mi300x8")
    assert reasons[0].startswith("Keep the vendor's library for this call: ") == keeps_library
    first, second, third, *_ = reasons[keeps_library:]
    assert answer.startswith("auto takes ") and first.startswith("all_gather of 64K among")
    assert answer.endswith("(predicted; Sidelane has never run on AMD GPUs)") == ("mi300x8" in arguments)
    assert f"{second}\n".startswith(f"on {on}") and third.startswith(f"by {by}")


def test_the_first_line_answers_for_machines_that_nobody_has():
    """With the vendor's library beside it; the commands stand behind ``--commands``."""
    amd = run("explain", "all_reduce", "256K", "--machine", "8xmi300x").output
    assert re.match(
        r"auto takes copy engines \(dma pcpy\): [\d.]+ us expected, next dma b2b [\d.]+ us; the vendor's library "
        r"[\d.]+ us \(predicted; Sidelane has never run on AMD GPUs\)\n"
        r"Keep the vendor's library for this call: \d+\.\d times as fast, as predicted\.\n",
        amd,
    )
    assert "Submitted by rank 0: 71 commands in 8 queues (--commands lists them)" in amd and "engine dma:0" not in amd
    nvidia = run("explain", "all_reduce", "256K", "--machine", "h100x8").output
    answer, *reasons = nvidia.splitlines()
    assert answer.startswith("auto takes a kernel (sm one_shot): ") and answer.endswith("(predicted: never run there)")
    assert reasons[2].startswith("by the built-in table h200x4") and reasons[3].startswith("simulated there: dma b2b ")
    assert re.match(
        r"No verdict: Sidelane's kernels are not modelled between peers over PCIe, nor in a plan; "
        r"`sidelane tune` measures them\. The best of copy engines [^\n]*\n"
        r"all_gather of 1M among .*\nby the simulator.*: sm [a-z_, ]*: Sidelane's kernels are not modelled",
        run("explain", "all_gather", "1M", "--machine", "a40x4").output,
        re.DOTALL,
    )
    few = run("explain", "all_reduce", "64K", "--machine", "4090x2").output  # through host memory
    assert re.match(
        r"auto takes a kernel \(sm one_shot\): nothing was measured; rule of thumb: a kernel below 48 MiB; predicted: "
        r"14\.5 us; the vendor's library 2[\d.]+ us \(predicted: never run there\)\nall_reduce of 64K",
        few,
    )
    assert "(no GPU reaches another one's memory)" in few and "simulated there: sm one_shot 14.5 us, dma " in few
    nodes = run("explain", "all_gather", "64M", "--machine", "2xh100x8").output
    assert nodes.startswith("a process group takes flat: hierarchical ") and "Keep the vendor's library" not in nodes
    nodes = run("explain", "all_gather", "64M", "--machine", "2xh100x8", "--beside", "compute").output
    assert nodes.startswith("a process group takes hierarchical: hierarchical ")
    assert "(predicted: never run there)\nKeep the vendor's library for this call: " in nodes


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            "all_gather 63",
            "63 bytes are not one whole number of bfloat16 elements for each of 4 ranks: explained for 64",
        ),
        ("all_to_all 1M --tensors 3", ""),
        (
            "all_gather 1001 --tensors 3",
            "1001 bytes are not one whole number of bfloat16 elements for each of 4 ranks: explained for 1008",
        ),
        ("broadcast 62", ""),
        ("all_reduce 62", ""),
        ("all_reduce 63", "63 bytes are not a whole number of bfloat16 elements: explained for 64"),
    ],
)
def test_explain_says_where_it_rounds(arguments: str, note: str):
    shown = run("explain", *arguments.split(), "--machine", "h200x4")
    assert shown.exit_code == 0, shown.output
    assert f"note: {note}" in shown.output or not note
    assert ("note: " in shown.output) == bool(note)


@pytest.mark.parametrize(
    ("arguments", "protocol", "blocks", "more"),
    [
        ("all_gather 64K", Protocol.LL, 64, "16K from rank to rank"),
        ("all_gather 1.75M", Protocol.BLOCK_FLAGS, 64, "448K from rank to rank"),
        ("all_gather 16M", Protocol.PUSH, 64, "4M from rank to rank"),
        ("all_gather 4M --ordinary", Protocol.PULL, 64, "1M from rank to rank, 1M of staging"),
        ("all_reduce 64M", Protocol.DIRECT, 128, "the results into their outputs"),
        ("all_reduce 4M --ordinary", Protocol.REDUCE, 64, "4M of staging"),
        ("broadcast 4M", Protocol.PUSH, 64, "4M from rank to rank"),
        ("broadcast 4M --ordinary", Protocol.STAGE, 64, "4M of staging"),
    ],
)
def test_explain_says_what_a_kernel_does(arguments: str, protocol: Protocol, blocks: int, more: str):
    shown = run("explain", *arguments.split(), "--machine", "h200x4", "--commands")
    assert shown.exit_code == 0, shown.output
    submitted = shown.output[shown.output.index("Submitted by rank 0: 1 kernel") :]
    assert f"on {blocks} thread blocks at most" in submitted
    assert f"how bytes travel ({protocol}): " in submitted and more in submitted


def test_explain_says_what_is_stored_with_its_owner():
    shown = run("explain", "all_reduce", "64M", "--machine", "h200x2", "--commands")
    assert shown.exit_code == 0, shown.output
    assert "auto takes a kernel (sm two_shot_push)" in shown.output
    assert "how bytes travel (send): into the staging of who adds them up; the results into the outputs" in shown.output
    assert "32M from rank to rank, 32M of staging" in shown.output


def test_the_example_in_the_docs_is_what_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "commands.md").read_text(encoding="utf-8")
    block = page[page.index("    $ sidelane explain") :].split("\n\n")[0]
    command, *lines = block.splitlines()
    shown = run(*command.split()[2:])
    assert shown.exit_code == 0, shown.output
    expected = [line.removeprefix("    ").removesuffix("...").rstrip() for line in lines]
    assert len(expected) >= 2
    assert [line for line in expected if line not in shown.output] == [], "run its command again"


def test_the_packets_of_the_docs_are_printed():
    names = "docs/guide/amd.md", "contrib/sdma_trial/README.md"
    pages = [(Path(__file__).parents[2] / name).read_text(encoding="utf-8") for name in names]
    (command,) = {
        line for page in pages for line in page.splitlines() if line.endswith("8 --packets") and "256K" in line
    }
    shown = run(*command.split()[1:])
    expected = pages[1][pages[1].index("    engine dma:1:") :].split("\n\n")[0]
    assert shown.exit_code == 0 and len(expected.splitlines()) > 5, shown.output
    assert dedent(expected) in dedent(shown.output[shown.output.index("  engine dma:0:") :]), "run its command again"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("machine", ["h200x4", "cpu", "mi300x8"])
def test_every_collective_can_be_explained(kind: Kind, captured: bool, machine: str):
    for nbytes in (1000, 1 << 22):
        for ordinary in (False, True):
            options = ExplainOptions(
                kind=kind, nbytes=nbytes, captured=captured, ordinary=ordinary, machine=machine, beside="compute"
            )
            found = explain(options)
            assert found.submitted
            assert found.choice.candidate in dict(found.choice.table)
            assert not {candidate for candidate, _ in found.excluded} & set(dict(found.choice.table))
            if machine == "mi300x8":
                assert "simulator" in found.by.where
                assert found.choice.table[0][1], "predicted"


def test_explain_reads_a_profile_of_any_machine(tmp_path: Path):
    table = builtin("h200x4")
    assert table is not None
    write_whole(tmp_path / "p.json", table.to_text().encode())
    shown = run("explain", "all_to_all", "1M", "--profile", str(tmp_path / "p.json"), "--world-size", "8", "--graph")
    assert shown.exit_code == 0, shown.output
    assert "among 8 ranks" in shown.output and "measured with 4 ranks" in shown.output
    assert "p.json" in shown.output


def test_a_profile_of_other_software_is_not_used_and_explain_and_info_say_so():
    here = key_here("cpu")
    table = builtin("cpu")
    assert table is not None
    old = json.loads(table.to_text()) | {"key": here.to_dict() | {"software": {"torch": "0.1"}}}
    write_whole(user_file(here), parse(json.dumps(old)).to_text().encode())
    shown = run("explain", "all_gather", "64K")
    assert shown.exit_code == 0, shown.output
    assert "built-in table cpu" in shown.output and "is not used" in shown.output
    assert "torch (0.1 there" in shown.output
    uses = info.look(probe=False).uses
    assert any(name == "choice" and "built-in table cpu" in text for name, text in uses)
    assert any("torch (0.1 there" in text for _, text in uses)


def test_explain_says_what_a_dash_means():
    said = "-: not measured, and taken only where nothing was"
    some = run("explain", "all_reduce", "16M", "--machine", "h200x4").output
    assert said in some and " - " in some
    assert said not in run("explain", "all_reduce", "1.2G", "--machine", "cpu").output

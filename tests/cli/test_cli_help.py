"""Help that reads like the guide, sizes that are rounded and say so, and errors that say where to read on."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from sidelane import cli
from sidelane.cli import help as help_of_commands
from sidelane.cli.help import HelpEntry
from sidelane.sizes import format_bytes, parse_bytes
from sidelane_lab.baselines.roster import implementations
from sidelane_lab.harness.help import GROUPS, GroupedCommand
from sidelane_lab.harness.parameters import NameChoice, rounding

NAMES = sorted(cli.main.list_commands())


def run(*arguments: str, width: int = 80) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="sidelane", terminal_width=width)


def command(name: str) -> HelpEntry:
    found: HelpEntry = cli.main.find(name)
    return found


def test_help_begins_with_what_one_can_do() -> None:
    text = run("--help", width=120).stdout
    headings = ("Look:", "Predict", "Measure:", "Choose:", "Laboratory", "Options:")
    places = [text.index(f"\n{heading}") for heading in headings]
    assert places == sorted(places)
    *ours, laboratory = cli.main.headed().values()
    assert 12 <= sum(map(len, ours)) <= 14 and {"claims", "prelaunch"} <= {*laboratory}, "a dozen are for users"
    assert sorted(name for names in cli.main.headed().values() for name in names) == NAMES


def test_a_shell_completes_commands_options_and_machines() -> None:
    def completed(*words: str) -> list[str]:
        *before, begun = words
        found = ShellComplete(cli.main, {}, "sidelane", "_SIDELANE_COMPLETE").get_completions(before, begun)
        return [one.value for one in found]

    assert completed("pl") == ["plan"] and completed("plan", "--mo") == ["--model"]
    assert completed("plan", "--machine", "H200") == ["h200x2", "h200x2-host", "h200x4", "h200x8", "h200x8x2"]
    for words in (("explain", "all_gather", "1M"), ("claims",), ("figure",), ("collective",), ("c3",)):
        assert completed(*words, "--machine", "mi250") == ["mi250x8"], words
    assert completed("plan", "--machine", "./mine") == ["./mine"], "a file"


@pytest.mark.parametrize("written", ["all_reduce", "allreduce", "all-reduce", "AllReduce"])
def test_names_are_taken_as_people_write_them(written: str) -> None:
    choice = NameChoice(["all_gather", "all_reduce"])
    assert choice.convert(written, None, None) == "all_reduce"
    assert NameChoice(["8b", "70b"]).convert("70B", None, None) == "70b"
    with pytest.raises(click.BadParameter, match="all_gather"):
        choice.convert("reduce", None, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_told_in_one_sentence(name: str) -> None:
    sentence = cli.main.sentence(name)
    assert sentence.endswith(".") and sentence.count(". ") == 0
    assert len(sentence) <= 95
    assert sentence.split()[0].istitle()


@pytest.mark.parametrize("width", [50, 80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command(name: str, width: int) -> None:
    text = run(name, "--help", width=width).stdout
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    *groups, last = headings
    assert last == "Examples"
    if isinstance(command(name), GroupedCommand):
        assert groups == [group for group in GROUPS if group in groups] and {"Output", "Other"} <= set(groups)
    lines = text.splitlines()
    options = lines[: lines.index("Examples:")]
    assert max(map(len, options)) <= max(width, 50)
    assert max(map(len, lines)) <= max(width, 80), "an example is too long for a terminal"
    for internal in ("None", "RANGE", "ALL_GATHER", '""', "[default: ("):
        assert internal not in text


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_explained(name: str) -> None:
    for option in command(name).params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{name} {option.opts}"
            assert "Default:" not in option.help


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_commands_that_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results" / "h100x1").mkdir(parents=True)
    for read in (
        "collectives.json",
        "c3.json",
        "results/h100x1/fused.json",
        "e2e.json",
        "rank.0.et",
        "step.json",
        "trace_rank_0",
        "trace_rank_1",
        "before.json",
        "after.json",
    ):
        (tmp_path / read).touch()
    monkeypatch.chdir(tmp_path)
    found = command(name)
    assert found.examples
    for line, does in found.examples:
        first, second, *words = shlex.split(line)
        assert (first, second) == ("sidelane", name) and does
        found.make_context(name, words)


def test_defaults_are_shown() -> None:
    words = " ".join(run("collective", "--help", width=200).stdout.split())
    assert "[default: 1K]" in words and "[default: 4G on GPUs, 16M on CPUs]" in words
    assert "[default: all_gather, all_to_all]" in words


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1.2G", 1288490192), ("0.3K", 304), ("1.5G", 3 << 29), ("1000", 1000), ("0.001K", 16)]
)
def test_sizes_are_whole_elements(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    rounded = text in ("1.2G", "0.3K", "0.001K")
    assert rounding(text) == (f"{text} is taken as {nbytes} bytes, whole elements of any dtype" if rounded else "")
    assert parse_bytes(format_bytes(nbytes)) == nbytes


@pytest.mark.parametrize(
    "line",
    [
        "explain all_gather 1.2G --machine h200x4",
        "c3 cb1_1.2G --machine mi300x8",
        "c3 --gemm cb1 --bytes 1.2G --machine mi300x8",
        "phases --machine mi300x8 --operation copy --min-bytes 1.2K --max-bytes 1.2G --factor 64",
        "power --machine mi300x8 --min-bytes 1G --max-bytes 1.2G",
    ],
)
def test_what_is_rounded_is_said(line: str) -> None:
    result = run(*line.split())
    assert result.exit_code == 0, result.output
    assert "note: 1.2G is taken as 1288490192 bytes, whole elements of any dtype\n" in result.stderr


def test_an_error_of_a_setting_says_where_settings_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from sidelane import config

    monkeypatch.setattr(config, "_stack", [])
    monkeypatch.setenv("SIDELANE_BESIDE", "everything")
    monkeypatch.setattr("sidelane_lab.harness.running.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    result = run("collective", "--device", "cpu")
    assert result.exit_code == 2 and "SIDELANE" not in result.stdout
    assert "Error: SIDELANE_BESIDE (value='everything', allowed=nothing, compute)" in result.stderr
    assert result.stderr.splitlines()[-1] == "See docs/reference/settings.md"


def test_without_a_command_there_is_the_help() -> None:
    result = run()
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == run("--help").stdout and result.stderr.count("Usage:") == 1


def test_choices_are_listed_once() -> None:
    assert run("c3", "--help").stdout.count("copy_engines_left") == 1


@pytest.mark.parametrize(("is_loading", "is_terminal"), [(True, True), (True, False), (False, True)])
def test_who_waits_for_pytorch_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_loading: bool, is_terminal: bool
) -> None:
    monkeypatch.setattr(help_of_commands, "PATIENCE_S", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=SimpleNamespace(_initializing=is_loading)))
    with help_of_commands.saying_that_pytorch_loads():
        time.sleep(0.3)
    assert ("loading PyTorch" in capsys.readouterr().err) is (is_loading and is_terminal)


@pytest.mark.parametrize(("name", "beside"), [("collective", False), ("chain", False), ("c3", True)])
def test_implementations_in_the_help_are_those_that_are_known(name: str, beside: bool) -> None:
    option = next(one for one in command(name).params if "--implementations" in one.opts)
    assert isinstance(option, click.Option) and option.help is not None
    said = re.sub(r" \([^)]*\)", "", option.help).removeprefix("Measure only these: ").removesuffix(".").split(", ")
    known = {one for kind in ("cpu", "cuda") for one in implementations(kind, with_auto=beside, with_others=beside)}
    assert set(said) == known and len(said) == len(known)

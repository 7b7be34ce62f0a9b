"""README and guide: code blocks run as printed, and commands are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from as_torchrun import run_program
from guide_blocks import README, ROOT, programs

from sidelane import cli

APART = """
import runpy, sys
for block in sys.argv[1:]:
    runpy.run_path(block, {name: value for name, value in globals().items() if not name.startswith("__")})
"""
"""End of a program that runs each further block of a page by itself, with the names of the first one."""


def run_blocks(first: str, others: list[str], folder: Path) -> None:
    if "from transformers" in "".join([first, *others]):
        pytest.importorskip("transformers")
    names = [f"block{number}.py" for number in range(len(others))]
    for name, block in zip(["example.py", *names], [first, *others], strict=True):
        (folder / name).write_text(block)
    run_program(folder / "example.py", folder, names)


# A model of transformers takes seconds to import: test_attention has the same one, with gradients.
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(blocks, id=name, marks=[pytest.mark.long] * ("from transformers" in "".join(blocks)))
        for name, blocks in programs()
    ],
)
def test_code_blocks_run_between_two_processes(blocks: list[str], tmp_path: Path) -> None:
    run_blocks("\n".join(blocks), [], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [pytest.param(blocks, id=name) for name, blocks in programs() if len(blocks) > 2])
def test_each_code_block_runs_behind_the_first_one(blocks: list[str], tmp_path: Path) -> None:
    run_blocks(blocks[0] + APART, blocks[1:], tmp_path)


def commands() -> Iterator[tuple[str, str]]:
    """Yield each line of a page's indented code, or of its blocks of shell, that begins with sidelane or make."""
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text().replace("\\\n", "")
        shell = "\n".join(re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", text, re.DOTALL))
        lines = re.findall(r"^(?:\$ )?((?:sidelane|make) .*)$", shell, re.MULTILINE)
        indented = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        lines += re.findall(r"^    \$? ?((?:sidelane|make) .*)$", indented, re.MULTILINE)
        yield from ((f"{page.stem}: {line[:60]}", line) for line in lines)


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in commands()])
def test_commands_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and arguments are, and targets of make are there: what they do has tests of its own."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif not {"COMMAND", "[OPTIONS]"} & set(words):
        try:
            cli.main.find(words[1]).make_context(words[1], words[2:])  # type: ignore[attr-defined]
        except click.exceptions.Exit:  # --help
            pass
        except click.BadParameter as problem:  # files of an example need not be here
            if "does not exist" not in problem.message:
                raise


def test_every_command_is_listed() -> None:
    page = (ROOT / "docs" / "guide" / "commands.md").read_text()
    assert set(re.findall(r"^    sidelane ([\w-]+)", page, re.MULTILINE)) >= set(cli.main.list_commands())

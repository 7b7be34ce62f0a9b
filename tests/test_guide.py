"""README and guide: code blocks run, commands are understood, pages stay short."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from as_torchrun import run_program

from sidelane import cli

ROOT = Path(__file__).resolve().parent.parent
README, GUIDE = ROOT / "README.md", sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [README, *GUIDE]
FRAME = """import torch, torch.distributed as dist
from sidelane import Communicator

dist.init_process_group("gloo")
with Communicator() as comm:
{blocks}
dist.destroy_process_group()
"""
"""Around blocks that begin with a communicator, which the first block of collectives.md makes."""


def programs() -> Iterator[tuple[str, str]]:
    """Name and text: a block that is a whole program, or all others of a page, one after another."""
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        whole = [block for block in blocks if "init_process_group" in block]
        parts = [block for block in blocks if block not in whole]
        yield from ((f"{page.stem} {number}", block) for number, block in enumerate(whole))
        if parts:
            yield f"{page.stem} parts", FRAME.format(blocks=textwrap.indent("\n".join(parts), "    "))


@pytest.mark.parametrize("program", [pytest.param(text, id=name) for name, text in programs()])
def test_code_blocks_run_between_two_processes(program: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(program)
    run_program(tmp_path / "example.py", tmp_path)


def commands() -> Iterator[tuple[str, str]]:
    """Every line of a page that begins with a command, or with make, without what is said of it."""
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\\\n", "")
        for line in re.findall(r"^    \$? ?((?:sidelane|make) .*)$", text, re.MULTILINE):
            yield f"{page.stem}: {line[:60]}", line


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

"""README and guide: code blocks run as printed, and commands are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from as_torchrun import run_program

from sidelane import cli

ROOT = Path(__file__).resolve().parent.parent
README, GUIDE = ROOT / "README.md", sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [README, *GUIDE]


APART = """
import runpy, sys
for block in sys.argv[1:]:
    runpy.run_path(block, {name: value for name, value in globals().items() if not name.startswith("__")})
"""
"""End of a program that runs each further block of a page by itself, with the names of the first one."""


def blocks_of(page: Path) -> tuple[list[str], list[str]]:
    """Return the blocks of a page that are whole programs, and the others, which are one program in their order.

    A whole program makes and destroys a process group. Nothing is added to either: they run as a reader pastes them.
    """
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    whole = [block for block in blocks if "init_process_group" in block and "destroy_process_group" in block]
    return whole, [block for block in blocks if block not in whole]


def programs() -> Iterator[tuple[str, list[str]]]:
    """Yield name and blocks of each program: a whole one, or the parts of a page."""
    for page in PAGES:
        whole, parts = blocks_of(page)
        yield from ((f"{page.stem} {number}", [block]) for number, block in enumerate(whole))
        if parts:
            yield f"{page.stem} parts", parts


def run_blocks(first: str, others: list[str], folder: Path) -> None:
    if "from transformers" in "".join([first, *others]):
        pytest.importorskip("transformers")
    names = [f"block{number}.py" for number in range(len(others))]
    for name, block in zip(["example.py", *names], [first, *others], strict=True):
        (folder / name).write_text(block)
    run_program(folder / "example.py", folder, names)


@pytest.mark.parametrize("blocks", [pytest.param(blocks, id=name) for name, blocks in programs()])
def test_code_blocks_run_between_two_processes(blocks: list[str], tmp_path: Path) -> None:
    run_blocks("\n".join(blocks), [], tmp_path)


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

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


def programs() -> Iterator[tuple[str, str]]:
    """Yield name and text of each program of a page, as a reader would paste it: nothing is added.

    A block that both makes and destroys a process group runs alone. All others of a page are one program: the first of
    them begins it, and each of the others goes on from those before.
    """
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        whole = [block for block in blocks if "init_process_group" in block and "destroy_process_group" in block]
        parts = [block for block in blocks if block not in whole]
        yield from ((f"{page.stem} {number}", block) for number, block in enumerate(whole))
        if parts:
            yield f"{page.stem} parts", "\n".join(parts)


@pytest.mark.parametrize("program", [pytest.param(text, id=name) for name, text in programs()])
def test_code_blocks_run_between_two_processes(program: str, tmp_path: Path) -> None:
    if "from transformers" in program:
        pytest.importorskip("transformers")
    (tmp_path / "example.py").write_text(program)
    run_program(tmp_path / "example.py", tmp_path)


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

"""README and guide: code blocks run, pages stay short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sidelane import cli

ROOT = Path(__file__).resolve().parent.parent
README, GUIDE = ROOT / "README.md", sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [README, *GUIDE]
BLOCKS = [
    pytest.param(block, id=f"{page.stem} {number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_code_block_runs_between_two_processes(block: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_are_short() -> None:
    assert len(README.read_text().split()) <= 500
    assert sum(len(page.read_text().split()) for page in PAGES) <= 9000
    for page in PAGES:
        assert len(page.read_text().split()) <= 900, page


def test_every_command_is_listed() -> None:
    listed = set(
        re.findall(r"^    sidelane (\w+)", (ROOT / "docs" / "guide" / "commands.md").read_text(), re.MULTILINE)
    )
    assert listed <= set(cli.main.commands), listed  # type: ignore[attr-defined]
    for name in listed:
        assert CliRunner().invoke(cli.main, [name, "--help"]).exit_code == 0

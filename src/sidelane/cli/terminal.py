"""Where output goes: tables to stdout, progress to stderr. With ``--json -`` stdout has the JSON and nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.padding
import rich.text

from sidelane.cli.output import STDOUT

PIPED_COLUMNS = 10_000
"""Width where nobody sees it: whoever reads a pipe folds lines as they like."""


def tables_console(json: Path | None = None) -> rich.console.Console:
    """Where tables go: stdout, as wide as the terminal. Nowhere if ``json`` is stdout.

    Args:
        json: where the same figures go as JSON.
    """
    return _fitted(rich.console.Console(quiet=json == STDOUT))


def progress_console() -> rich.console.Console:
    """Where a command says how far it has come, and what it has written: stderr."""
    return _fitted(rich.console.Console(stderr=True))


def _fitted(console: rich.console.Console) -> rich.console.Console:
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PIPED_COLUMNS
    return console


def say_written(files: Sequence[Path]) -> None:
    """Say where something has been written, if it is a file."""
    if named := [str(path) for path in files if path != STDOUT]:
        progress_console().print(f"written to {', '.join(named)}", style="dim", markup=False, highlight=False)


def say(console: rich.console.Console, text: str, *, indent: int = 0, style: str = "") -> None:
    """Print text as it is: folded between words, and behind its indentation."""
    line = rich.text.Text(text, style=style)
    console.print(rich.padding.Padding(line, (0, 0, 0, indent), expand=False) if indent else line)

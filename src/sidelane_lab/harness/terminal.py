"""Consoles for output: tables to stdout, progress to stderr. With ``--json -`` stdout has only the JSON."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import rich.console
import rich.padding
import rich.text

from sidelane.cli.output import STDOUT

PIPED_COLUMNS = 10_000
"""Width in columns of output that is no terminal: readers of a pipe fold lines as they like."""

PIPED_PROGRESS_S = 2.0
"""Seconds between lines of progress where stderr is no terminal."""


def tables_console(json: Path | None = None) -> rich.console.Console:
    """Return the console for tables: stdout, as wide as the terminal. Silent if ``json`` is stdout.

    Args:
        json: destination of the same figures as JSON.
    """
    return _fitted(rich.console.Console(quiet=json == STDOUT))


def progress_console() -> rich.console.Console:
    """Return the console for progress and names of written files: stderr."""
    return _fitted(rich.console.Console(stderr=True))


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done, and yield a function that adds the present step to it.

    A terminal has a line that changes. Elsewhere a line is printed every few seconds.
    """
    console = progress_console()
    if console.is_terminal:
        with console.status(text) as status:
            yield lambda step: status.update(f"{text}: {step}")
        return
    began, ended, steps = time.monotonic(), threading.Event(), ["..."]

    def report() -> None:
        while not ended.wait(PIPED_PROGRESS_S):
            console.print(f"{text}: {steps[-1]} ({time.monotonic() - began:.0f} s)", markup=False, highlight=False)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield steps.append
    finally:
        ended.set()
        reporter.join()


def _fitted(console: rich.console.Console) -> rich.console.Console:
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PIPED_COLUMNS
    return console


def say_written(files: Sequence[Path]) -> None:
    """Print the names of written files, except stdout."""
    if named := [str(path) for path in files if path != STDOUT]:
        progress_console().print(f"written to {', '.join(named)}", style="dim", markup=False, highlight=False)


def say(console: rich.console.Console, text: str, *, indent: int = 0, style: str = "") -> None:
    """Print text without markup: folded between words, and behind its indentation."""
    line = rich.text.Text(text, style=style)
    console.print(rich.padding.Padding(line, (0, 0, 0, indent), expand=False) if indent else line)

"""Writing the results of a command: to a file, atomically, or to stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from sidelane.user_files import write_whole

STDOUT = Path("-")
"""Path that stands for stdout."""


JSON_HELP = "Write the figures here as JSON; - prints them, and nothing else."
"""Help of the option ``--json`` of all commands."""

json_option = click.option(
    "--json",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    metavar="FILE",
    is_flag=False,
    flag_value="-",
    help=JSON_HELP,
)
"""Option of a command that writes its figures as one JSON object."""


def write_json(target: str | os.PathLike[str], content: Any, *, allow_nan: bool = True) -> Path:
    """Write an object as JSON.

    Args:
        target: file, whose folder is made; or ``STDOUT``.
        content: value that ``json`` can write.
        allow_nan: write numbers that JSON does not have, too.

    Returns:
        Path of the target.
    """
    return write_text(target, json.dumps(content, indent=1, allow_nan=allow_nan) + "\n")


def write_text(target: str | os.PathLike[str], text: str) -> Path:
    """Write a file atomically, making its folder; or write to stdout, or into an existing device or pipe."""
    path = Path(target)
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return path
    if is_special(path):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return path
    write_whole(path, text.encode())
    return path


def is_special(path: Path) -> bool:
    """Return True for a device or a pipe, such as /dev/null, which must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()

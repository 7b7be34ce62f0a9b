"""Writing the results of a command: to a file, atomically, or to stdout."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from sidelane.cli.help import output
from sidelane.user_files import write_whole


class Written(click.Path):
    """Parameter type for an output file or folder; missing folders are made when it is written.

    Args:
        is_folder: it is a folder; otherwise a file.
        allow_dash: ``-`` means stdout.
        exists: it must exist, as it is read before.
    """

    def __init__(self, *, is_folder: bool = False, allow_dash: bool = False, exists: bool = False) -> None:
        super().__init__(
            file_okay=not is_folder, dir_okay=is_folder, exists=exists, path_type=Path, allow_dash=allow_dash
        )
        self.is_folder = is_folder

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse a path that cannot be written."""
        found = super().convert(value, param, ctx)
        if self.allow_dash and os.fspath(found) in ("-", b"-"):
            return found
        problem = why_unwritable(os.fsdecode(found), is_folder=self.is_folder)
        if problem is not None:
            self.fail(problem, param, ctx)
        return found


STDOUT = Path("-")
"""Path that stands for stdout."""


json_option = output(
    "--json",
    type=Written(allow_dash=True),
    metavar="FILE",
    is_flag=False,
    flag_value="-",
    help="Write the figures here as JSON; - prints them, and nothing else.",
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
    if _is_special(path):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return path
    write_whole(path, text.encode())
    return path


def why_unwritable(target: str | os.PathLike[str], *, is_folder: bool = False) -> str | None:
    """Return the reason why a file, or one in a folder, cannot be written; None if it can.

    The function tries it, as permissions do not tell all: it makes a file without a name in the last existing folder.

    Args:
        target: path; missing folders are allowed.
        is_folder: files are to be written into it.
    """
    path = there = Path(target)
    ways = (path.absolute(), *path.absolute().parents)
    try:
        if not is_folder and path.is_dir():
            return f"{path} is a folder (allowed=a file)"
        if not is_folder and _is_special(path):
            return None if os.access(path, os.W_OK) else f"{path} cannot be written by this user (allowed=one that can)"
        there = next(each for each in ways[not is_folder :] if each.exists())
        if not there.is_dir():
            return f"{path}: {there} is a file (allowed=a folder)"
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as problem:
        return f"{path}: nothing can be written in {there}: {problem.strerror} (allowed=where this user may write)"


def _is_special(path: Path) -> bool:
    """Return True for a device or a pipe, such as /dev/null, which must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()

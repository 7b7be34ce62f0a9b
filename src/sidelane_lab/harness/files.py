"""Files that commands read and write; what is written is checked before a measurement runs that would be lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from sidelane.cli.output import is_special
from sidelane.user_files import bytes_of


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
        if not is_folder and is_special(path):
            return None if os.access(path, os.W_OK) else f"{path} cannot be written by this user (allowed=one that can)"
        there = next(each for each in ways[not is_folder :] if each.exists())
        if not there.is_dir():
            return f"{path}: {there} is a file (allowed=a folder)"
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as problem:
        return f"{path}: nothing can be written in {there}: {problem.strerror} (allowed=where this user may write)"


def text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a file.

    Raises:
        ValueError: there is no such file, it is a folder, or it cannot be read as UTF-8; the text names the file.
    """
    try:
        return bytes_of(path).decode("utf-8")
    except (OSError, ValueError) as problem:
        raise ValueError(f"{os.fspath(path)}: cannot be read as text: {problem}") from problem

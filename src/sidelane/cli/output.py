"""Writing what a command found: to a file, whole or not at all, or to stdout."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click


class Written(click.Path):
    """One of them; folders on the way are made when it is written.

    Args:
        is_folder: it is a folder; else a file.
        allow_dash: ``-`` is stdout.
        exists: it must be there, as it is read before.
    """

    def __init__(self, *, is_folder: bool = False, allow_dash: bool = False, exists: bool = False) -> None:
        super().__init__(
            file_okay=not is_folder, dir_okay=is_folder, exists=exists, path_type=Path, allow_dash=allow_dash
        )
        self.is_folder = is_folder

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse what cannot be written."""
        found = super().convert(value, param, ctx)
        if self.allow_dash and os.fspath(found) in ("-", b"-"):
            return found
        problem = why_unwritable(os.fsdecode(found), is_folder=self.is_folder)
        if problem is not None:
            self.fail(problem, param, ctx)
        return found


STDOUT = Path("-")
"""In place of a file: what is written goes to stdout."""


def write_json(target: str | os.PathLike[str], content: Any, *, allow_nan: bool = True) -> Path:
    """Write an object as JSON.

    Args:
        target: a file, whose folder is made; or ``STDOUT``.
        content: what ``json`` knows.
        allow_nan: write numbers that JSON does not have, too.

    Returns:
        The target.
    """
    return write_text(target, json.dumps(content, indent=1, allow_nan=allow_nan) + "\n")


def write_text(target: str | os.PathLike[str], text: str) -> Path:
    """Write a file whole or not at all, making its folder; or to stdout, or into what is there and is no file."""
    path = Path(target)
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return path
    if _is_special(path):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def why_unwritable(target: str | os.PathLike[str], *, is_folder: bool = False) -> str | None:
    """Why a file cannot be written, or one in a folder; None if it can.

    Tried, as permissions do not tell all: a file without a name, where the folders end that are there.

    Args:
        target: folders on the way need not be there.
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


def refuse_unwritable(what: str, target: str | os.PathLike[str] | None, *, is_folder: bool = False) -> None:
    """Raise before something is measured that would be lost.

    Args:
        what: names the target to whom it was given.
        target: None, like ``STDOUT``, can be written.
        is_folder: files are to be written into it.

    Raises:
        ValueError: it cannot be written.
    """
    if target is None or (Path(target) == STDOUT and not is_folder):
        return
    problem = why_unwritable(target, is_folder=is_folder)
    if problem is not None:
        raise ValueError(f"{what}: {problem}")


def _is_special(path: Path) -> bool:
    """A device or a pipe, such as /dev/null: nothing is put in its place."""
    return path.exists() and not path.is_file() and not path.is_dir()

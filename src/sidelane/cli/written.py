"""Files and folders that a command writes at its end: what cannot be is refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import click


class Written(click.Path):
    """One of them; folders on the way are made when it is written.

    Args:
        is_folder: it is a folder; else a file.
        allow_dash: ``-`` is stdout.
    """

    def __init__(self, *, is_folder: bool = False, allow_dash: bool = False) -> None:
        super().__init__(file_okay=not is_folder, dir_okay=is_folder, path_type=Path, allow_dash=allow_dash)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse what is there and is something else, and what this user may not write."""
        found = super().convert(value, param, ctx)
        if self.allow_dash and os.fspath(found) in ("-", b"-"):
            return found
        path = Path(os.fsdecode(found))
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if there != path and not there.is_dir():
            self.fail(f"{path}: {there} is a file (allowed=a folder)", param, ctx)
        if not os.access(there, os.W_OK):
            self.fail(f"{path}: {there} cannot be written by this user (allowed=one that can)", param, ctx)
        return found

"""Files and folders that a command writes at its end: what cannot be is refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import click

from sidelane.cli.output import why_unwritable


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

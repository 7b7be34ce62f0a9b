"""What the tools write: types of ``argparse`` that refuse what cannot be written before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from sidelane_lab.harness.files import why_unwritable


def file_to_write(text: str) -> Path:
    """A file; folders on the way need not be there."""
    return _checked(Path(text), is_folder=False)


def folder_to_write(text: str) -> Path:
    """A folder, there or not."""
    return _checked(Path(text), is_folder=True)


def _checked(path: Path, *, is_folder: bool) -> Path:
    problem = why_unwritable(path, is_folder=is_folder)
    if problem is not None:
        raise argparse.ArgumentTypeError(problem)
    return path

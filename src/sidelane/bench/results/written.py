"""Writing what a command found: to a file, whole or not at all, or to stdout."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

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
    """Write a file whole or not at all, making its folder; or to stdout."""
    path = Path(target)
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
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

"""Texts that tests compare with files of ``tests/goldens``: errors, plans and answers of the command line.

A file has entries: a title, and its text behind four spaces. ``make goldens`` writes anew what has changed; the
difference shows in ``git diff``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "goldens"


def entries(name: str) -> dict[str, str]:
    """The texts of a file, by title."""
    found: dict[str, list[str]] = {}
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line and not line.startswith(" "):
            found[line] = []
        elif found:
            found[[*found][-1]].append(line[4:])
    return {title: "\n".join(body).strip("\n") for title, body in found.items()}


def check_golden(name: str, found: Mapping[str, str]) -> None:
    """Compare texts with those of a file, or write them into it in ``make goldens``."""
    path = FOLDER / f"{name}.txt"
    bodies = {title: _of_any_python(text).strip("\n").splitlines() for title, text in found.items()}
    made = "\n".join(
        "\n".join([title, *(f"    {line}".rstrip() for line in body), ""]) for title, body in bodies.items()
    )
    if os.environ.get("GOLDENS") == "write":
        path.write_text(made, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    changes = difflib.unified_diff(kept.splitlines(), made.splitlines(), str(path), "found", lineterm="", n=1)
    assert kept == made, "\n".join([*changes, "make goldens writes what is found"])


def _of_any_python(text: str) -> str:
    """Take out of Python's own errors what its newer versions add."""
    text = re.sub(r"(unexpected keyword argument '\w+')\. Did you mean '\w+'\?", r"\1", text)
    return re.sub(r"cannot use .* \((unhashable type: .*)\)", r"\1", text)

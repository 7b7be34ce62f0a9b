"""Files of users: read and parsed so that any error in one is a ``ValueError`` that describes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_RANKS = 1 << 20
"""Largest number of ranks in a file."""


def text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a file.

    Raises:
        ValueError: there is no such file, it is a folder, or it cannot be read as UTF-8; the text names the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise ValueError(f"{os.fspath(path)}: cannot be read as text: {problem}") from problem


def json_of(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or contains numbers that are not finite.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def text_in(content: Mapping[str, Any], name: str) -> str:
    """Return an object's text. Raises KeyError or ValueError if it is missing or of another type, as those below do."""
    value = content[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} (value={value!r:.100}, allowed=a text)")
    return value


def flag_in(content: Mapping[str, Any], name: str) -> bool:
    """Return a truth value of an object."""
    value = content[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} (value={value!r:.100}, allowed=true, false)")
    return value


def whole_in(content: Mapping[str, Any], name: str, most: int = 2**63 - 1) -> int:
    """Return a whole number of an object, from 1 on."""
    value = content[name]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} (value={value!r:.100}, allowed=a whole number from 1 to {most})")
    return value


def number_in(content: Mapping[str, Any], name: str) -> float:
    """Return a finite number of an object."""
    value = content[name]
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} (value={value!r:.100}, allowed=a finite number)")
    return float(value)


def _no_number(text: str) -> float:
    raise ValueError(f"no number (value={text}, allowed=finite numbers)")

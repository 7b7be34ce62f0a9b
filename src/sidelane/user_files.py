"""Files of users: read and parsed so that any error in one is a ``ValueError`` that describes it."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_RANKS = 1 << 20
"""Largest number of ranks in a file."""


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file and return its descriptor: an ``opener`` for :func:`open`.

    Opening a pipe waits for its other end, and opening a device may do anything, so a path that a setting or a peer
    names must be a file.

    Raises:
        OSError: there is no such file, it may not be opened, or it is a folder, a pipe or a device.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        code, shown = (errno.EISDIR, "folder") if kind == stat.S_IFDIR else (errno.EINVAL, "pipe or device")
        raise OSError(code, f"it is a {shown} (allowed=a regular file)", os.fspath(path))
    return descriptor


def bytes_of(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file. Raises as :func:`open_regular` does."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def write_whole(path: str | os.PathLike[str], content: bytes, mode: int = 0o644) -> None:
    """Write a file in one step, making its folder: readers see the file of before or the new one.

    The bytes go into a new file beside it, whose name nobody can guess, and which takes the place of what is there: a
    link is replaced, and the file behind it stays as it is.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        os.replace(temporary, place)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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

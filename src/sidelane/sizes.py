"""Sizes in readable form: ``64K``, ``896M``, ``1.2G``."""

from __future__ import annotations

import re

ROUNDED_TO = 16
"""Multiple in bytes to which sizes are rounded: whole elements of any dtype."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Read a size: ``1024``, ``64K``, ``896M``, ``3.25G``, also with ``B`` or ``iB`` behind. Units are binary.

    A size that is no whole number of bytes, such as ``1.2G``, is rounded to a multiple of 16, whole elements of any
    dtype.

    Raises:
        ValueError: the text is no size, or a part of a byte.
    """
    nbytes = exact_bytes(text)
    return int(nbytes) if nbytes == int(nbytes) else max(ROUNDED_TO, round(nbytes / ROUNDED_TO) * ROUNDED_TO)


def format_bytes(nbytes: int) -> str:
    """Return the shortest text that ``parse_bytes`` reads back: ``896M``, ``3.25G``, ``1000``."""
    for unit in ("G", "M", "K"):
        amount = f"{nbytes / _UNITS[unit]:.2f}".rstrip("0").rstrip(".")
        if nbytes >= _UNITS[unit] and float(amount) * _UNITS[unit] == nbytes:
            return amount + unit
    return str(nbytes)


def exact_bytes(text: str) -> float:
    """Return the number of bytes of a size before it is rounded."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"not a size (value={text!r}, allowed=numbers, also ending in K, M, G)")
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    if not match[2] and nbytes != int(nbytes):
        raise ValueError(f"not a size (value={text!r}, allowed=a whole number of bytes)")
    return nbytes

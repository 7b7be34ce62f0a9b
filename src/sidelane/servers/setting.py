"""Servers that name Sidelane, versions of them that fit, and the line of the log that says what was replaced."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence

from sidelane import config
from sidelane.version import VERSION

NAME = "sidelane"
"""Name of the plug-ins, in the entry points of both servers."""


def register(server: str, variable: str, replace: Callable[[], None]) -> None:
    """Replace what a plug-in replaces, if :func:`is_named` says so, and be ``deep_ep`` where none is installed. What is
    raised is logged, and the server starts.

    Args:
        server: name of the server.
        variable: server's list of plug-ins by name.
        replace: function of the plug-in that replaces what it can, or logs why it does not.
    """
    try:
        if is_named(variable):
            replace()
            if not importlib.util.find_spec("deep_ep") and importlib.util.find_spec("triton"):
                importlib.import_module("sidelane.deep_ep").install()
    except Exception:
        logging.getLogger(f"{server}.{NAME}").exception("Sidelane %s: nothing was replaced", VERSION)


def is_named(variable: str) -> bool:
    """Return whether the server's own variable names Sidelane, or ``SIDELANE_SERVERS=1`` is set.

    Servers load all plug-ins that are installed where their variable is not set, which asks for none.

    Args:
        variable: server's list of plug-ins by name, with commas between them: ``VLLM_PLUGINS``, ``SGLANG_PLUGINS``.
    """
    return NAME in map(str.strip, os.environ.get(variable, "").split(",")) or config.is_for_servers()


def misfit(server: str, version: str, first: str, last: str, parts: int = 2) -> str:
    """Return why a version of a server is refused; an empty text if it fits.

    Args:
        server: name of the server.
        version: its version.
        first: first version that fits.
        last: last version that was tried; its own later repairs fit, too.
        parts: number of numbers that a version and its repairs have in common.

    >>> misfit("vllm", "0.21.0", "0.22.0", "0.33.0")
    'vllm 0.21.0 does not fit (allowed=0.22.0..0.33.0)'
    >>> misfit("vllm", "0.33.1+cpu", "0.22.0", "0.33.0")
    ''
    """
    fits = _numbers(first) <= _numbers(version) and _numbers(version)[:parts] <= _numbers(last)[:parts]
    return "" if fits else f"{server} {version} does not fit (allowed={first}..{last})"


def line(server: str, version: str, replaced: Sequence[str], kept: Mapping[str, str]) -> str:
    """Return the line of the log that says what a plug-in has replaced.

    Args:
        server: name of the server.
        version: its version.
        replaced: what Sidelane makes from now on.
        kept: what stays as it was, with the reason.

    >>> line("vllm", "0.33.0", ["all_reduce"], {"norms": "batch-invariant mode"}).partition(": ")[2]
    'replaced: all_reduce; as before: norms (batch-invariant mode)'
    """
    parts = [f"replaced: {', '.join(replaced) or 'nothing'}"]
    if kept:
        parts.append("as before: " + ", ".join(f"{what} ({why})" for what, why in kept.items()))
    return f"Sidelane {VERSION} in {server} {version}: " + "; ".join(parts)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])

"""Servers that name Sidelane, versions of them that fit, and the line of the log that says what was replaced."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from sidelane import config
from sidelane.version import VERSION

NAME = "sidelane"
"""Name of the plug-ins, in the entry points of both servers."""

DEVICES = ("cuda", "cpu")


def register(server: str, variable: str, replace: Callable[[], None]) -> None:
    """Call ``replace`` if :func:`is_named` says so. What is raised is logged."""
    try:
        if is_named(variable):
            replace()
    except Exception:
        logging.getLogger(f"{server}.{NAME}").exception("Sidelane %s: nothing was replaced", VERSION)


def is_named(variable: str) -> bool:
    """Return whether the server's list of plug-ins by name has Sidelane, or ``SIDELANE_SERVERS=1`` is set.

    Servers load all plug-ins that are installed where their variable is not set, which asks for none.
    """
    return NAME in map(str.strip, os.environ.get(variable, "").split(",")) or config.is_for_servers()


def offer_deep_ep() -> None:
    """Let ``import deep_ep`` import Sidelane's in a server that fits, where none is installed."""
    if not importlib.util.find_spec("deep_ep") and importlib.util.find_spec("triton"):
        importlib.import_module("sidelane.deep_ep").install()


def misfit(server: str, version: str, device: str, fits: tuple[str, str], parts: int = 2) -> str:
    """Return why a server of a version, on a kind of device, is refused; an empty text if it fits.

    ``fits`` are the first version that fits, and the last one that was tried. Its own later repairs fit, too: versions
    of which as many numbers are alike as ``parts`` says.

    >>> misfit("vllm", "0.21.0", "cuda", ("0.22.0", "0.33.0"))
    'vllm 0.21.0 does not fit (allowed=0.22.0..0.33.0)'
    """
    first, own, last = ([int(each) for each in re.findall(r"\d+", text)[:3]] for text in (fits[0], version, fits[1]))
    if first > own or own[:parts] > last[:parts]:
        return f"{server} {version} does not fit (allowed={fits[0]}..{fits[1]})"
    return "" if device in DEVICES else f"its platform does not fit (value={device}, allowed={', '.join(DEVICES)})"


def line(server: str, version: str, replaced: Sequence[str], kept: Mapping[str, str]) -> str:
    """Return the line of the log that says what a plug-in has replaced, and what stays as it was, with the reason.

    >>> line("vllm", "0.33.0", ["all_reduce"], {"norms": "batch-invariant mode"}).partition(": ")[2]
    'replaced: all_reduce; as before: norms (batch-invariant mode)'
    """
    parts = [f"replaced: {', '.join(replaced) or 'nothing'}"]
    if kept:
        parts.append("as before: " + ", ".join(f"{what} ({why})" for what, why in kept.items()))
    if getattr(sys.modules.get("deep_ep"), "__name__", "") == "sidelane.deep_ep":
        parts.append("deep_ep: Sidelane's")
    return f"Sidelane {VERSION} in {server} {version}: " + "; ".join(parts)

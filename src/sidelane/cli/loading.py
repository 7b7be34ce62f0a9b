"""A notice on the terminal while PyTorch is loaded, which takes seconds from a cold disk."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import click

PATIENCE_S = 1.5
"""Seconds of loading after which the notice appears."""


@contextlib.contextmanager
def saying_that_pytorch_loads() -> Iterator[None]:
    """Print a notice on stderr if that is a terminal and PyTorch is still being loaded after a while."""
    timer = threading.Timer(PATIENCE_S, _say)
    timer.daemon = True  # the command does not wait for it
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say() -> None:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):  # importlib marks modules under way so
        click.echo(click.style("loading PyTorch", dim=True), err=True)

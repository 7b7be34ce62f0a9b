"""A word on the terminal while PyTorch is loaded, which takes seconds on a disk that has not read it before."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import click

PATIENCE_S = 1.5
"""After which whoever looks at a terminal wonders."""


@contextlib.contextmanager
def saying_that_pytorch_loads() -> Iterator[None]:
    """Say so on stderr, if that is a terminal and PyTorch is being loaded after a while."""
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
    if getattr(spec, "_initializing", False):  # so importlib marks what it has begun to load
        click.echo(click.style("loading PyTorch", dim=True), err=True)

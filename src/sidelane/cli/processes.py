"""How processes for ranks are made: forked from one that has imported everything, where the system can do that.

To import torch takes a process two seconds; a fork of one that has done so takes milliseconds. The process that is
forked from starts no thread and touches no device, so that its copies may do either.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

PRELOADED = ("sidelane.cli.launch", "sidelane.session.communicator", "sidelane.collectives.backend_cpu")
"""What it imports. Without ``__main__``: a script's own start is not for it."""


def rank_context() -> Any:
    """The ``multiprocessing`` context for ranks, of which there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def environment() -> dict[str, str]:
    """Of this process, to be passed to ranks: what they are forked from has that of its own start."""
    return dict(os.environ)


def take_over(environment: dict[str, str]) -> None:
    """Have the environment of the process that started this one, and leave what was imported there alone.

    The garbage collector would look through all of it again and again: a tenth of a second each time, and a copy of
    every page that the processes share.
    """
    gc.freeze()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)

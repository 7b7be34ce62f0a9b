"""Start of processes for ranks: they are forked from one that has imported everything, if the system can do that.

An import of torch takes a process two seconds; a fork of one that has done so takes milliseconds. The fork server
starts no thread and touches no device, so that its copies may do either.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

PRELOADED = ("sidelane_lab.harness.launch", "sidelane.session.communicator", "sidelane.collectives.backend_cpu")
"""Modules that the fork server imports. ``__main__`` is not among them: a script's own start is not for it."""


def rank_context() -> Any:
    """Return the ``multiprocessing`` context for ranks, of which there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def environment() -> dict[str, str]:
    """Return this process's environment for its ranks: the fork server has the environment of its own start."""
    return dict(os.environ)


def take_over(environment: dict[str, str]) -> None:
    """Take the environment of the parent process, and exclude existing objects from garbage collection.

    The garbage collector would traverse all of them again and again: a tenth of a second each time, and a copy of
    every page that the processes share.
    """
    gc.freeze()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)

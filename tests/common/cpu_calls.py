"""Communicators of CPU ranks, and what becomes of a call: its error, or what it says in a copy of the process."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from sidelane import Communicator, Config


def communicator(group: dist.ProcessGroup, device: Any = "cpu", **settings: Any) -> Communicator:
    return Communicator(group, device=device, config=Config(**{"timeout_s": 20, **settings}))


def error_of(function: Any, *args: Any, **kwargs: Any) -> BaseException:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


def outcome(function: Any, *args: Any, **kwargs: Any) -> tuple[str, tuple[int, ...], str]:
    """Type, ranks at fault and text of the error; empty for none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, getattr(error, "ranks", ()), str(error)
    return "", (), ""


def in_a_forked_copy(function: Any, patience_s: float = 60) -> str:
    """Run a function in a copy of this process; its text. A copy that hangs is killed: a loaded one takes seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    began = time.monotonic()
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() - began > patience_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.01)
    with os.fdopen(reading, "rb") as answer:
        return answer.read().decode()

"""Running one command with a time-out: what it says goes to a file, the last line of it to the terminal."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ENDING_S = 15.0
"""Between asking a command to end and killing it."""
POLL_S = 0.25
TAIL_CHARACTERS = 1500
SAY_S = 20.0
"""Between two lines about a command that runs."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        problem: what went wrong, with the end of its output; empty if nothing did.
        seconds: that it took.
        is_late: it was ended by the time-out.
    """

    problem: str
    seconds: float
    is_late: bool = False


def run(
    command: Sequence[str],
    timeout_s: float,
    log: Path,
    *,
    folder: Path,
    environment: dict[str, str] | None = None,
    say: Callable[[float, str], None] = lambda seconds, line: None,
) -> Ended:
    """Run a command and its children, and end them all at the time-out, and if this process is interrupted.

    Args:
        command: program and arguments.
        timeout_s: for all of it.
        log: file for its output.
        folder: in which it runs.
        environment: of it; None: that of this process.
        say: told, every ``SAY_S`` seconds, for how long it has run and the last line that it wrote.
    """
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=environment,
        )
        is_late, told = False, began
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now - began > timeout_s:
                    is_late = True
                    _end(process)
                    break
                if now - told > SAY_S:
                    told = now
                    say(now - began, last_line(log))
                time.sleep(POLL_S)
        except BaseException:
            _end(process)
            raise
    seconds = time.monotonic() - began
    if not is_late and process.returncode == 0:
        return Ended("", seconds)
    how = f"it took longer than {timeout_s:.0f} s" if is_late else f"exit status {process.returncode}"
    return Ended(f"{how}\n{tail(log)}".rstrip(), seconds, is_late)


def tail(log: Path) -> str:
    """The end of what a command wrote."""
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]


def last_line(log: Path) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(tail(log).splitlines()) if line.strip()), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(ENDING_S)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    process.wait()

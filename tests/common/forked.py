"""Programs as processes of their own, forked from one that has imported torch already: that takes a process seconds."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sidelane_lab.harness.processes import environment, rank_context, take_over

TIMEOUT_S = 110.0


def run(program: Path, arguments: Sequence[str], folder: Path, *environments: Mapping[str, str]) -> str:
    """Run a program in a process for each of ``environments``, which are added to this one's.

    Args:
        folder: where they run, and for what they print.

    Returns:
        What they have printed, one process after the other.

    Raises:
        AssertionError: one failed, or did not end.
    """
    outputs = [folder / f"output-{number}.txt" for number in range(len(environments))]
    processes = []
    for output, added in zip(outputs, environments, strict=True):
        details = ([str(program), *arguments], str(folder), str(output), environment() | dict(added))
        processes.append(rank_context().Process(target=_run, args=details))
        processes[-1].start()
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        said = "".join(output.read_text() for output in outputs if output.exists())
        assert [process.exitcode for process in processes] == [0] * len(processes), said
    finally:
        for process in processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, 9)
            process.join()
    return said


def _run(command: list[str], folder: str, output: str, inherited: dict[str, str]) -> None:
    os.setpgid(0, 0)  # so that processes of its own end with it
    take_over(inherited)
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()

"""Programs that Python itself starts and ends, as copies of one interpreter that has imported torch for all of them.

What ``forked`` runs ends as processes of ``multiprocessing`` do: without what Python does at the end of a program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane_lab.harness.processes import environment, take_over

START_S = 100.0


class Interpreter:
    """An interpreter that becomes the programs of one test after the other."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C is for the tests, which end it.
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._folder = Path()
        self.closed = False

    def start(self, code: str, folder: Path, *arguments: Sequence[object]) -> list[int]:
        """Start a process for each of ``arguments``, which runs ``code``; returns their numbers."""
        assert self._process.stdin is not None
        self._folder = folder
        lists = [list(map(str, each)) for each in arguments]
        task = {"code": code, "folder": str(folder), "arguments": lists, "environment": environment()}
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        processes: list[int] = self._answer(START_S)
        return processes

    def wait(self, timeout_s: float = 100.0) -> tuple[list[int], list[str], list[str]]:
        """Wait for all; returns exit codes as ``subprocess`` has them, and what they wrote to stdout and stderr.

        Raises:
            AssertionError: one did not end; it has been killed.
        """
        codes = self._answer(timeout_s)
        texts = [[(self._folder / f"{kind}-{n}").read_text() for n in range(len(codes))] for kind in ("out", "err")]
        return codes, *texts

    def run(self, code: str, folder: Path, *arguments: str) -> str:
        """Run a program of one process, which must not fail; returns what it wrote to stdout."""
        self.start(code, folder, arguments)
        (status,), (said,), (errors,) = self.wait()
        assert status == 0, f"{said}{errors}"
        return said

    def close(self) -> None:
        """End the interpreter and whatever it has become."""
        self.closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.close()
            raise AssertionError(f"a program did not end within {timeout_s} s, or did not start")
        line = self._process.stdout.readline()
        assert line, f"the interpreter has died: {self._process.wait(10)}"
        return json.loads(line)


def become(task: dict[str, Any], number: int) -> None:
    """Take over what a program finds at its start."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{task['folder']}/{kind}-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.close(null)
    take_over(task["environment"])
    sys.argv = ["-c", *task["arguments"][number]]


if __name__ == "__main__":
    import torch.distributed.fsdp

    import sidelane

    _ = sidelane.Communicator, sidelane.wrap, torch.distributed.init_process_group
    mine = None
    for task in map(json.loads, iter(sys.stdin.readline, "")):
        children: list[int] = []
        for number in range(len(task["arguments"])):
            child = os.fork()
            if child == 0:
                mine = number
                break
            children.append(child)
        if mine is not None:
            break
        print(json.dumps(children), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]), flush=True)
    if mine is not None:
        become(task, mine)
        exec(compile(task["code"], "<program>", "exec"))  # in this module, whose end is that of the program

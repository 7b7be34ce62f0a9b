"""Processes under a tool, with a time-out for each case, taken apart where something is found."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sanitizer.planted import MEMCHECK
from sanitizer.ranks import APART, TOGETHER
from sanitizer.report import Report, parse

START_S, CASE_S, ENDING_S = 150.0, 30.0, 10.0
"""What the start of a process may take (on a cold machine, importing torch takes most of it), a case, and the tool's
last words."""

SANITIZER = "compute-sanitizer"
OPTIONS = (
    *("--target-processes", "application-only", "--show-backtrace", "no", "--print-limit", "20"),
    # Seconds until it gives up on a process that has not come to CUDA yet; 10 unless said otherwise.
    *("--launch-timeout", f"{START_S:.0f}"),
)
GUARD_BYTES = 512
OF_MEMCHECK = ("--leak-check", "no", "--report-api-errors", "no", "--padding", str(GUARD_BYTES))
_TAIL = 600
_FIRST_PORT, _MOST_PORTS = 49152, 16000
_ports = itertools.count(step=16)


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        tool: that looks into it.
        way: how kernels are launched (``ranks``).
        numbers: of cases; empty for a planted mistake.
        planted: its name.
    """

    tool: str
    way: str
    numbers: tuple[int, ...] = ()
    planted: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        report: of the tool.
        ended: seconds and problem of each case that came to its end.
        stopped: the case at which it did not go on; None if it did.
        trouble: why; the end of what the process printed.
        seconds: of the process.
    """

    report: Report
    ended: dict[int, tuple[float, str]]
    stopped: int | None
    trouble: str
    seconds: float


def find_sanitizer() -> str:
    """Where it is; empty if it is not here."""
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path="/usr/local/cuda/bin") or ""


def command(job: Job, log: Path, progress: Path, folder: Path) -> list[str]:
    """What to run for a job."""
    what = ["--plant", job.planted] if job.planted else ["--numbers", ",".join(map(str, job.numbers))]
    program = [sys.executable, str(Path(__file__).resolve().parent.parent / "sanitize_kernels.py"), "child"]
    own: tuple[str, ...] = OF_MEMCHECK if job.tool == MEMCHECK else ()
    # Each tool looks for its process on some ports from a first one on, and does not find it where others look, too.
    own += ("--port", str(_FIRST_PORT + next(_ports) % _MOST_PORTS))
    tool = [find_sanitizer() or SANITIZER, "--tool", job.tool, *OPTIONS, *own, "--log-file", str(log)]
    return [*tool, *program, "--way", job.way, "--progress", str(progress), "--folder", str(folder), *what]


def run(job: Job, folder: Path, deadline: float) -> Outcome:
    """Run a job, and end it where a case takes too long, or at the deadline (of ``time.monotonic``)."""
    name = f"{job.tool}-{job.way}-{job.planted or '_'.join(map(str, job.numbers[:3]))}-{len(job.numbers)}"
    log, progress, printed = (folder / f"{name}.{suffix}" for suffix in ("log", "progress", "out"))
    progress.write_text("")
    log.write_text("")
    began = time.monotonic()
    trouble = ""
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command(job, log, progress, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(folder),
        )
        size, changed = 0, began
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if progress.stat().st_size != size:
                size, changed = progress.stat().st_size, now
            limit = CASE_S if size else START_S
            if now - changed > limit or now > deadline:
                trouble = f"time-out after {now - changed:.0f} s" if now <= deadline else "out of time"
                end(process)
    ended, stopped = read_progress(progress.read_text(encoding="utf-8"))
    if process.returncode and not trouble:
        trouble = f"exit status {process.returncode}"
    if trouble:
        trouble += ": " + " ".join(printed.read_text(errors="replace")[-_TAIL:].split())
    if stopped is None and job.numbers and len(ended) < len(job.numbers):
        stopped = next(number for number in job.numbers if number not in ended)
    report = parse(log.read_text(errors="replace"))
    return Outcome(report, ended, stopped, trouble.strip(": "), time.monotonic() - began)


def read_progress(text: str) -> tuple[dict[int, tuple[float, str]], int | None]:
    """Seconds and problem of each case that has ended, and the one that has not."""
    ended: dict[int, tuple[float, str]] = {}
    begun: int | None = None
    for line in text.splitlines():
        said = json.loads(line)
        begun = said["case"] if said["state"] == "begun" else None
        if said["state"] == "ended":
            ended[said["case"]] = (said["seconds"], said["problem"])
    return ended, begun


def is_clean(outcome: Outcome) -> bool:
    """Every case came to its end with the right result, and the tool found nothing."""
    problems = any(problem for _, problem in outcome.ended.values())
    return outcome.report.clean and outcome.stopped is None and not outcome.trouble and not problems


def split(job: Job, outcome: Outcome) -> Iterator[Job]:
    """Smaller jobs, until each finding is one case's: around the case where it stopped, else halves."""
    numbers: Sequence[int] = job.numbers
    stopped = outcome.stopped
    if stopped is None:
        stopped = next((number for number in numbers if outcome.ended.get(number, (0, ""))[1]), None)
    if stopped is None:
        middle = len(numbers) // 2
        parts = [numbers[:middle], numbers[middle:]]
    else:
        place = numbers.index(stopped)
        parts = [numbers[:place], numbers[place : place + 1], numbers[place + 1 :]]
    for part in parts:
        if part:
            yield dataclasses.replace(job, numbers=tuple(part))


def second_way(job: Job, outcome: Outcome, ranks: int) -> Job | None:
    """The other way to launch a single case whose ranks never met; None where there is none."""
    if job.way == APART and ranks > 1 and outcome.stopped is not None and not outcome.report.errors:
        return dataclasses.replace(job, way=TOGETHER)
    return None


def environment(folder: Path) -> dict[str, str]:
    """Of all processes: compiled kernels are shared, and what torch allocates is an allocation."""
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "OMP_NUM_THREADS": "2",
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: politely, so that the tool can say what it has seen, then not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(ENDING_S)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    process.wait(ENDING_S)
